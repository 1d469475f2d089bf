"""How far greedy generations of caches of fewer bits go along with the dense model's: 256 tokens after ten prompts.

    pip install hqq optimum-quanto
    python benchmarks/greedy.py DENSE PACKED [--prompts 10] [--caches headwise,dense-bf16,...] [-o results/greedy.json]

DENSE is a folder, or "smollm2" for the model of the demo; PACKED what headwise compress made of it with a packed cache.
All run in float32 but "dense-bf16", which says what rounding of another kind does to the same prompts. "same": prompts
with all tokens the same; "prefix": median tokens until the first other one; "agreement": share of positions at which
the model picks the dense one's token when it reads the dense one's text, with its own cache filled by that text.
The bytes of the packed caches are compared with what cost predicts; a difference ends the run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from bits import Table, commit
from torch import Tensor
from transformers import PreTrainedModel, QuantizedCache

import headwise as hw
from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.records.cost import cost_of
from headwise.steps.demo import demo_model

NEW = 256
PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I know before adopting a dog?",
    "Describe how bread is made, step by step.",
    "Why is the sky blue, and why are sunsets red?",
    "Give me a plan for learning to play the guitar in three months.",
    "Summarise the causes of the First World War.",
    "Write an email to my landlord about a broken heater.",
    "How do vaccines work?",
    "Compare living in a city with living in the countryside.",
)
Cache = Callable[[], Any]


def answers(model: Any, prompts: list[Tensor], cache: Cache) -> list[Tensor]:
    """256 greedy tokens after each prompt."""
    settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    return [
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache(), **settings)[0, ids.shape[1] :]
        for ids in prompts
    ]


def agreement(model: Any, prompts: list[Tensor], wanted: list[Tensor], cache: Cache) -> float:
    """Share of the tokens ``wanted`` that the model picks when it reads them, one prompt and one text at a time."""
    same = 0
    for ids, answer in zip(prompts, wanted, strict=True):
        filled = cache()
        logits = model(ids, past_key_values=filled).logits[:, -1:]
        rest = model(answer[None, :-1], past_key_values=filled).logits
        same += int((torch.cat((logits, rest), dim=1).argmax(-1)[0] == answer).sum())
    return same / (NEW * len(prompts))


def common(one: Tensor, other: Tensor) -> int:
    """Tokens until the first that differs."""
    differs = (one != other).nonzero()
    return int(differs[0]) if len(differs) else len(one)


def check_bytes(model: PreTrainedModel, prompts: list[Tensor]) -> None:
    """Raise where a real generation leaves other bytes than cost says."""
    for ids in prompts:
        cache: Any = hw.cache(model)
        answers(model, [ids], lambda cache=cache: cache)
        predicted = cost_of(shape_of(model), cache.get_seq_length(), 1, "fp32").kv_bytes
        if cache.nbytes != predicted:
            raise RuntimeError(f"{cache.nbytes} bytes in the cache, {predicted} predicted.")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense")
    parser.add_argument("packed")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--caches", default="headwise,dense-bf16,hqq-8,hqq-4,quanto-4")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/greedy.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    source = str(demo_model()) if args.dense == "smollm2" else args.dense
    model, small = open_model(source).float(), open_model(args.packed).float()
    tokenizer: Any = open_tokenizer(source)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for text in PROMPTS[: args.prompts]
    ]
    wanted = answers(model, prompts, lambda: None)
    check_bytes(small, prompts[:2])

    def quantized(backend: str, bits: int) -> Cache:
        settings = {"nbits": bits, "axis_key": 1, "axis_value": 1, "q_group_size": 64}
        return lambda: QuantizedCache(backend, model.config, **settings if backend == "hqq" else {"nbits": bits})

    ways: dict[str, tuple[Any, Cache]] = {
        "headwise": (small, lambda: hw.cache(small)),
        "dense-bf16": (copy.deepcopy(model).bfloat16(), transformers.DynamicCache),
        "hqq-8": (model, quantized("hqq", 8)),
        "hqq-4": (model, quantized("hqq", 4)),
        "quanto-4": (model, quantized("quanto", 4)),
    }
    table, run = (
        Table(args.output),
        {"model": Path(source).name, "packed": Path(args.packed).name, "prompts": len(prompts)},
    )
    share = cost_of(shape_of(small), 512).kv_bytes / cost_of(shape_of(model), 512).kv_bytes
    for name in args.caches.split(","):
        reader, cache = ways[name]
        if table.has(**run, cache=name):
            continue
        lengths = [common(a, b) for a, b in zip(answers(reader, prompts, cache), wanted, strict=True)]
        table.add(
            {
                **run,
                "cache": name,
                "share": round(share, 4) if name == "headwise" else None,
                "same": sum(length == NEW for length in lengths),
                "prefix": statistics.median(lengths),
                "agreement": round(agreement(reader, prompts, wanted, cache), 4),
                "commit": commit(),
            }
        )


if __name__ == "__main__":
    main()
