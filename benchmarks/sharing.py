"""Key/value heads merged, or read from latents, against narrower ones: excess loss of real models, unhealed.

    python benchmarks/sharing.py MODEL --calibration FILE --text FILE [--tokens 5120] [--context 256] [-o FILE]
    python benchmarks/sharing.py MODEL --forms latents --shares 0.5,0.375,0.25 ...

Excess: nats per token over the dense model. "Same head width" merges neighbours into heads as wide as before, with
each RoPE frequency once, which is the usual grouped-query model; mean pooling is the usual way to make one.

"Latents" are read as they are (`plan --absorb`). Their decode time is against that of the dense model in stock
transformers: on one thread, in processor time, of tokens that both decode in turn.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.reduction.build import build_reduced
from headwise.reduction.kinds import unregister
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.reduction.sharing.change import Sharing
from headwise.steps.timing import reduced_with_cache

SHARES = (0.75, 0.5)
LENGTHS, DTYPES = (1024, 8192), (torch.float32, torch.bfloat16)
STEPS = 9  # tokens decoded by each
CALIBRATION_TOKENS, HELD_OUT_TOKENS = 8192, 2048


def windows(tokenizer, file, tokens, context):
    """The first ``tokens`` of a text as rows of ``context``."""
    ids = tokenizer(file.read_text(encoding="utf-8")[: 8 * tokens], add_special_tokens=False)["input_ids"][:tokens]
    return torch.tensor(ids[: len(ids) // context * context]).view(-1, context)


def loss(model, rows):
    """Mean negative log-likelihood of all tokens of the rows but the first of each."""
    total = 0.0
    with torch.inference_mode():
        for row in rows:
            total += cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum").item()
    return total / (rows.numel() - len(rows))


def decode_ratio(model, plan, tokens):
    """Time of one new token of the reduced model after so many tokens against the dense one's, the least of several."""
    pair = [reduced_with_cache(model, each, tokens) for each in (Plan.full(shape_of(model)), plan)]
    token, seconds = torch.ones(1, 1, dtype=torch.long), ([], [])
    with torch.inference_mode():
        for _ in range(STEPS):
            for (each, cache), taken in zip(pair, seconds):
                start = time.process_time()
                each(token, past_key_values=cache)
                taken.append(time.process_time() - start)
    return min(seconds[1]) / min(seconds[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--forms", choices=("merged", "latents"), default="merged")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    shares = [float(share) for share in given.shares.split(",")]
    model, tokenizer = hw.open(given.model), open_tokenizer(given.model)
    rows = windows(tokenizer, given.text, given.tokens, given.context)
    measured = windows(tokenizer, given.calibration, CALIBRATION_TOKENS + HELD_OUT_TOKENS, given.context)
    config = hw.InspectConfig(tokens=CALIBRATION_TOKENS, maps=False, positions=given.forms == "latents")
    profile = hw.inspect(model, inputs=[{"input_ids": row[None]} for row in measured], config=config, checks=False)
    dense, results = loss(model, rows), []

    def report(name, share, plan, reduced, **more):
        after = profile.shape.planned(plan)
        sizes = [shape.attention_parameters() for shape in (profile.shape, after)]
        row = {
            "form": name,
            "share": share,
            "class": type(reduced).__name__,
            "predicted": plan.predicted.get("loss_increase"),
            "excess": loss(reduced, rows) - dense,
            "attention_parameters": sizes[1] / sizes[0],
            **more,
        }
        results.append(row)
        print(json.dumps(row), flush=True)

    def planned(name, **forms):
        for share in shares:
            plan = plan_for(profile, Budget("keep_kv", share), **forms)
            report(name, share, plan, build_reduced(model, plan, tensors=profile.tensors))
            refitted = reduce_model(copy.deepcopy(model), plan, profile.tensors)
            report(f"{name}, refitted", share, plan, refitted.model, **(times(plan) if "absorb" in forms else {}))

    def times(plan):
        if given.no_time:
            return {}
        torch.set_num_threads(1)
        models = {str(dtype).removeprefix("torch."): copy.deepcopy(model).to(dtype) for dtype in DTYPES}
        ratios = {name: {T: decode_ratio(each, plan, T) for T in LENGTHS} for name, each in models.items()}
        return {"decode_time": ratios}

    if given.forms == "latents":
        planned("latents", absorb=True)
    else:
        merged_forms(profile, model, shares, planned, report)
    if given.output:
        given.output.write_text(json.dumps({"dense": dense, "rows": results}, indent=1) + "\n", encoding="utf-8")


def merged_forms(profile, model, shares, planned, report):
    """Heads merged where that is best, in one way for all layers, in the usual way, and not at all."""
    planned("merged or narrower heads", merge=True)
    for share in shares:
        plan = plan_for(profile, Budget("keep_kv", share), uniform=True, merge=True)
        report("one width for all", share, plan, build_reduced(model, plan, tensors=profile.tensors))
    first = profile.shape.layers[0]
    for joined in first.joinable:
        plan = Plan.make(profile.shape, (Sharing(joined, first.qk_dim, first.v_dim),) * len(profile.shape.layers))
        report("same head width", 1 / joined, plan, build_reduced(model, plan, tensors=profile.tensors))
        pooled = LayerPlan(first.heads, first.kv_heads // joined, first.qk_dim, first.v_dim)
        plan = Plan.make(profile.shape, (pooled,) * len(profile.shape.layers))
        report("mean pooled", 1 / joined, plan, build_reduced(model, plan))
    unregister(Sharing.kind)
    planned("narrower heads")


if __name__ == "__main__":
    main()
