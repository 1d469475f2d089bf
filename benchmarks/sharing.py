"""Key/value heads merged against narrower ones: excess loss of real models at shares of the cache, unhealed.

    python benchmarks/sharing.py MODEL --calibration FILE --text FILE [--tokens 5120] [--context 256] [-o FILE]

Excess: nats per token over the dense model. "Same head width" merges neighbours into heads as wide as before, with
each RoPE frequency once, which is the usual grouped-query model; mean pooling is the usual way to make one.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.data.processors import open_tokenizer
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.reduction.build import build_reduced
from headwise.reduction.kinds import unregister
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.reduction.sharing.change import Sharing

SHARES = (0.75, 0.5)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    model, tokenizer = hw.open(given.model), open_tokenizer(given.model)
    rows = windows(tokenizer, given.text, given.tokens, given.context)
    measured = windows(tokenizer, given.calibration, CALIBRATION_TOKENS + HELD_OUT_TOKENS, given.context)
    config = hw.InspectConfig(tokens=CALIBRATION_TOKENS, maps=False)
    profile = hw.inspect(model, inputs=[{"input_ids": row[None]} for row in measured], config=config, checks=False)
    dense, results = loss(model, rows), []

    def report(name, share, plan, reduced):
        after = profile.shape.planned(plan)
        sizes = [shape.attention_parameters() for shape in (profile.shape, after)]
        row = {
            "form": name,
            "share": share,
            "class": type(reduced).__name__,
            "predicted": plan.predicted.get("loss_increase"),
            "excess": loss(reduced, rows) - dense,
            "attention_parameters": sizes[1] / sizes[0],
        }
        results.append(row)
        print(json.dumps(row), flush=True)

    def planned(name):
        for share in SHARES:
            plan = plan_for(profile, Budget("keep_kv", share), merge=True)
            report(name, share, plan, build_reduced(model, plan, tensors=profile.tensors))
            refitted = reduce_model(copy.deepcopy(model), plan, profile.tensors)
            report(f"{name}, refitted", share, plan, refitted.model)

    planned("merged or narrower heads")
    for share in SHARES:
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
    if given.output:
        given.output.write_text(json.dumps({"dense": dense, "rows": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
