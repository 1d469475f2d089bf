"""Neighbouring blocks side by side against dropped ones: predicted and measured losses, refits, times of a model.

    python benchmarks/flatten.py MODEL --text FILE [--context 512] [--layers 27 24] [--refits 3] [-o FILE]

The profile reads the first tokens of FILE, everything is measured on the ``--tokens`` behind them: excess nats per
token over the dense model, and the KL divergence from it; of the plans of fewest layers also refitted. Times: prefill
of ``--context`` tokens and decoding behind them, one thread, all models in turns.
"""

import argparse
import json
import platform
import random
import time
from collections import Counter
from pathlib import Path

import torch
from sharing import loss, windows
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

import headwise as hw
from headwise.data.processors import open_tokenizer
from headwise.planning.depth import shallowest
from headwise.records import Plan
from headwise.records.budget import Budget
from headwise.reduction.build import build_reduced
from headwise.reduction.flatten.change import Flatten
from headwise.reduction.mlp.change import Channels
from headwise.reduction.plans import depth_spans, predicted_losses
from headwise.reduction.reduce import reduce_model
from headwise.tracing.fisher import kl_from_baseline
from headwise.tracing.substitution import substituted

HELD_OUT = 2  # tokens of the profile for each that is held out for refits
MEASURED_ALONE = 5  # blocks joined alone, and runs of three, that are measured
RANDOM_PLANS = 10
WAYS = {"both": lambda s: True, "dropped": lambda s: s.blocks == 1, "joined": lambda s: s.blocks > 1 or s.left}
WARM, COUNTED = 4, 24


class Measured:
    """A model, its profile, and the text on which reduced models are held against it."""

    def __init__(self, model, profile, rows):
        self.model, self.profile, self.rows, self.shape = model, profile, rows, profile.shape
        self.dense = loss(model, rows)
        with torch.inference_mode():
            self.logits = [model(row[None]).logits for row in rows]

    def built(self, layers):
        """The model with these changes, its weights as they are."""
        return build_reduced(self.model, Plan.make(self.shape, layers), tensors=self.profile.tensors, share=True)

    def predicted(self, layers):
        return sum(predicted_losses(self.profile, layers))

    def against_dense(self, reduced):
        """Excess nats and KL divergence of ``reduced``."""
        kl = total = 0.0
        with torch.inference_mode():
            for row, logits in zip(self.rows, self.logits, strict=True):
                output = reduced(row[None])
                kl += kl_from_baseline({"logits": logits}, output).mean().item() / len(self.rows)
                total += cross_entropy(output.logits[0, :-1], row[1:]).item() / len(self.rows)
        return {"excess": round(total - self.dense, 4), "kl": round(kl, 4)}

    def row(self, changes, /, **facts):
        """What is predicted and measured of these changes."""
        return {**facts, "predicted": round(self.predicted(changes), 4), **self.against_dense(self.built(changes))}


def alone(measured, chance):
    """Pairs and runs of three, each by itself."""
    numbers = [n for n, layer in enumerate(measured.profile.layers) if "flattened" in layer.values]
    for blocks in (1, 2):
        fitting = [
            n
            for n in numbers
            if n + blocks < len(measured.shape.layers) and all(n + k in numbers for k in range(blocks))
        ]
        for first in sorted(chance.sample(fitting, min(MEASURED_ALONE, len(fitting)))):
            layers = [(Flatten(blocks),) if n == first else () for n in range(len(measured.shape.layers))]
            yield measured.row(layers, first=first, joined=blocks + 1)


def planned(measured, counts, refits):
    """Plans of fewer blocks: dropped, joined, or whichever costs less; cut, and refitted."""
    profile, blocks = measured.profile, len(measured.shape.layers)
    spans = depth_spans(profile, Budget("layers", blocks))
    for count in counts:
        for way, allowed in WAYS.items():
            chosen = shallowest(filter(allowed, spans), blocks, count)
            if chosen is None:
                continue
            layers = [changes for span in chosen for changes in span.changes]
            row = measured.row(layers, layers=count, way=way, changes=describe(layers))
            if count == min(counts) and refits > 0:
                refits -= 1
                refitted = reduce_model(measured.model, Plan.make(measured.shape, layers), profile.tensors)
                row |= {"refit": list(refitted.refit), "refitted": measured.against_dense(refitted.model)}
            yield row


def describe(layers):
    return {n: changes[0].kind for n, changes in enumerate(layers) if changes}


def at_random(measured, chance):
    """Random joint plans: some blocks dropped, some joined, some MLPs narrower."""
    blocks = len(measured.shape.layers)
    spans = [span for span in depth_spans(measured.profile, Budget("layers", blocks)) if span.loss < 1]
    for number in range(RANDOM_PLANS):
        limit = blocks - 1 - number * blocks // (3 * RANDOM_PLANS)
        felt = [span if span.left == span.blocks else replace_loss(span, chance.random()) for span in spans]
        chosen = shallowest(felt, blocks, limit)
        layers = [changes for span in chosen for changes in span.changes]
        for n in chance.sample(range(blocks), blocks // 5):
            if not any(change.kind == "removal" for change in layers[n]):
                full = measured.shape.layers[n].mlp.channels
                layers[n] = (Channels(full * chance.randrange(4, 8) // 8), *layers[n])
        kinds = Counter(change.kind for changes in layers for change in changes)
        yield measured.row(layers, layers=limit, changes=dict(kinds))


def replace_loss(span, value):
    return type(span)(span.first, span.blocks, span.left, value, span.changes)


def spearman(rows, name):
    ranks = torch.tensor([[row["predicted"] for row in rows], [row[name] for row in rows]]).argsort().argsort().double()
    return round(torch.corrcoef(ranks)[0, 1].item(), 4)


def times(models, context):
    """Median seconds of prefill and of a decoded token, all models in turns."""
    ids = torch.randint(3, 1000, (1, context), generator=torch.Generator().manual_seed(0))
    prefill, decode = ({name: [] for name in models} for _ in range(2))
    with torch.inference_mode():
        caches = {}
        for _ in range(WARM + 1):
            for name, model in models.items():
                caches[name] = DynamicCache(config=model.config)
                start = time.perf_counter()
                model(ids, past_key_values=caches[name])
                prefill[name].append(time.perf_counter() - start)
        for _ in range(WARM + COUNTED):
            for name, model in models.items():
                start = time.perf_counter()
                model(ids[:, :1], past_key_values=caches[name])
                decode[name].append(time.perf_counter() - start)
    return {
        name: {
            "prefill": round(min(prefill[name][1:]), 4),
            "decode": round(sorted(decode[name][WARM:])[COUNTED // 4], 5),
        }
        for name in models
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--calibration", type=int, default=4096, help="tokens of the profile")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--refits", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="*", default=[27, 24])
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = hw.open(given.model).float(), open_tokenizer(given.model)
    read = given.calibration + given.calibration // HELD_OUT
    rows = windows(tokenizer, given.text, read + given.tokens, given.context)
    own, rows = rows[: read // given.context], rows[read // given.context :]
    inputs = [{"input_ids": row[None]} for row in own]
    config, start = hw.InspectConfig(tokens=given.calibration, maps=False), time.process_time()
    profile = hw.inspect(model, inputs=inputs, config=config, checks=False)
    seconds = {"inspect": round(time.process_time() - start, 1)}
    start = time.process_time()
    substituted(model, inputs)
    seconds["of it blocks left out or joined"] = round(time.process_time() - start, 1)
    measured, chance = Measured(model, profile, rows), random.Random(0)
    facts = {
        "model": Path(given.model).name,
        "text": given.text.name,
        "settings": {"calibration": given.calibration, "tokens": given.tokens, "context": given.context},
        "machine": platform.machine(),
        "dense": round(measured.dense, 4),
        "cpu_seconds": seconds,
        "flattened": [layer.values.get("flattened") for layer in profile.layers],
        "dropped": [layer.values["left_out"][1] for layer in profile.layers],
    }
    results = {}
    for name, part in (
        ("plans", planned(measured, given.layers, given.refits)),
        ("random", at_random(measured, chance)),
        ("alone", alone(measured, chance)),
    ):
        results[name] = []
        for row in part:
            results[name].append(row)
            print(name, json.dumps(row), flush=True)
    facts["spearman"] = {name: spearman(results["random"], name) for name in ("excess", "kl")}
    models = {"dense": model}
    for way in ("dropped", "joined", "both"):
        row = next((row for row in results["plans"] if row["layers"] == min(given.layers) and row["way"] == way), None)
        spans = depth_spans(profile, Budget("layers", min(given.layers)))
        if row is not None:
            chosen = shallowest(filter(WAYS[way], spans), len(profile.shape.layers), min(given.layers))
            models[way] = measured.built([changes for span in chosen for changes in span.changes])
    facts["seconds"] = {"layers": min(given.layers), **times(models, given.context)}
    print(json.dumps(facts), flush=True)
    if given.output is not None:
        given.output.write_text(json.dumps({**facts, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
