"""One model cut to the same KV bytes (or attention parameters) in many ways, unhealed, real students on real text.

    python benchmarks/compress.py MODEL --calibration FILE --text FILE [--tokens 20480] [--context 512] [-o FILE]

MODEL is a folder, or "smollm2" for the one of the demo. Excess: nats per token over the dense model. "KV measured" is
counted in a real generate; "opens as" tells whether a stock class of transformers opens it. Seconds are those of
cutting and refitting, statistics apart. Baselines: truncated SVD of the weights with RoPE pairs by norm (the papers'
way); second moments of tokens; whitened SVD of whole matrices (SVD-LLM's way, both factors counted, keys and values
still cached in full); removal of key/value groups by what the loss feels.
"""

import argparse
import copy
import importlib.util
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.families.sites import is_transposed, matrix, sites_of
from headwise.files.errors import InputError
from headwise.linalg.spectra import moment_root
from headwise.pipelines.profile import inspect_folder
from headwise.planning.sensitivity import group_loss
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.records.settings import InspectConfig
from headwise.reduction.plans import plan_for, predicted_losses
from headwise.reduction.reduce import reduce_model
from headwise.reduction.widths.change import Widths
from headwise.steps.demo import demo_model
from headwise.tracing.speed import cache_per_token

SHARES = (0.875, 0.75, 0.5)
ALL_PIECES_AT = 0.75  # the whole ablation runs at one share; the other two show the ends
CALIBRATION_TOKENS = 8192
RANKED_TOKENS = 4096
OTHERS_SECONDS = 180
PIECES = ("queries", "outputs")


def loss(model, windows):
    """Mean negative log-likelihood of all tokens of the windows but the first of each."""
    total, rows = 0.0, max(1, 1024 // windows.shape[1])
    with torch.inference_mode():
        for some in windows.split(rows):
            logits = model(some, use_cache=False).logits[:, :-1]
            total += cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum").item()
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def even(profile, share):
    """The same widths in every layer; the pairs each key/value head feels most."""
    layers = []
    for layer, measured in zip(profile.shape.layers, profile.layers, strict=True):
        width = round(layer.qk_dim * share / 2) * 2
        pairs = None
        if layer.rotary:
            felt = torch.tensor(measured.values["qk_unit_damage"])
            pairs = tuple(map(tuple, felt.topk(width // 2, dim=-1).indices.sort(dim=-1).values.tolist()))
        layers.append(LayerPlan(layer.heads, layer.kv_heads, width, width, rope_pairs=pairs))
    return Plan.make(profile.shape, tuple(layers))


def without_pairs(plan):
    """``plan`` with its RoPE pairs left to the method."""
    return replace(plan, layers=tuple(tuple(_unnamed(change) for change in changes) for changes in plan.layers))


def _unnamed(change):
    return replace(change, rope_pairs=None) if isinstance(change, Widths) else change


def as_widths(plan, shape):
    """For each layer the heads and widths that ``plan`` keeps; the whole layer where it changes nothing."""
    own = (next((change for change in changes if isinstance(change, Widths)), None) for changes in plan.layers)
    layers = zip(own, plan.after(shape), strict=True)
    return [change or Widths(*after.dims) for change, after in layers]


def fewer_pairs(plan, shape, share):
    """``plan`` with whole values and queries and keys so narrow that ``share`` of the cache is left."""
    layers = (
        replace(change, v_dim=layer.v_dim, qk_dim=round((2 * share - 1) * layer.qk_dim / 2) * 2, rope_pairs=None)
        for change, layer in zip(as_widths(plan, shape), shape.layers, strict=True)
    )
    return Plan.make(shape, layers)


def fewer_groups(profile, share):
    """Key/value groups removed, the least felt in the whole model first, until ``share`` of the cache is left."""
    shape = profile.shape
    felt = [group_loss(layer, measured.values) for layer, measured in zip(shape.layers, profile.layers, strict=True)]
    total = sum(layer.kv_heads for layer in shape.layers)
    order = sorted((damage, i, g) for i, groups in enumerate(felt) for g, damage in enumerate(groups))
    removed = {(i, g) for _, i, g in order[: math.ceil(total * (1 - share) - 1e-9)]}
    layers = []
    for i, layer in enumerate(shape.layers):
        groups = [g for g in range(layer.kv_heads) if (i, g) not in removed]
        each = layer.heads // layer.kv_heads
        heads = tuple(g * each + h for g in groups for h in range(each))
        if groups:
            layers.append(LayerPlan(len(heads), len(groups), layer.qk_dim, layer.v_dim, kept_heads=heads))
        else:
            layers.append(LayerPlan(0, 0, 0, 0))
    return Plan.make(shape, tuple(layers))


@torch.no_grad()
def whitened(model, batches, share, only_cached):
    """A copy whose attention matrices are products of two thin ones, best on their inputs, with ``share`` of numbers.

    ``only_cached`` factors keys and values alone, to ``share`` of their width, as if the latents were cached.
    """
    model = copy.deepcopy(model)
    sites = sites_of(model)
    family = sites[0].family
    names = [family.fused] if family.fused else [family.k, family.v] if only_cached else [family.q, family.k, family.v]
    linears = [getattr(site.module, name) for site in sites for name in names]
    if not only_cached:
        linears += [site.out for site in sites]
    moments = {}

    def see(module, args):
        x = args[0].flatten(0, -2).double()
        moments[module] = moments.get(module, 0) + x.T @ x

    handles = [linear.register_forward_pre_hook(see) for linear in linears]
    for batch in batches:
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    for linear in linears:
        weight = matrix(linear).double()
        out, into = weight.shape
        rank = int(share * out) if only_cached else int(share * out * into / (out + into))
        root, inverse = moment_root(moments[linear])
        u, s, vh = torch.linalg.svd(weight @ root, full_matrices=False)
        thin = (u[:, :rank] * s[:rank]) @ vh[:rank] @ inverse
        linear.weight.copy_(thin.T if is_transposed(linear) else thin)
    return model


def torch_pruned(source, windows, share):
    """What Torch-Pruning makes of the model, or the reason why there is nothing to show."""
    if importlib.util.find_spec("torch_pruning") is None:
        return "not installed: pip install torch-pruning"
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "windows.safetensors"
        save_file({"windows": windows}, file)
        command = [
            sys.executable,
            str(Path(__file__).with_name("torch_pruning_heads.py")),
            source,
            str(file),
            str(share),
        ]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=OTHERS_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            return f"{metadata.version('torch-pruning')}: no result within {OTHERS_SECONDS} s"
        except subprocess.CalledProcessError as error:
            return f"{metadata.version('torch-pruning')}: {error.stderr.strip().splitlines()[-1]}"
    return json.loads(process.stdout.strip().splitlines()[-1])


def ranking(model, profile, tensors, windows, dense):
    """Predicted and measured damage of a dozen plans of different kinds and sizes, unrefitted."""
    budgets = [plan_for(profile, Budget("keep_kv", share)) for share in (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)]
    only = [
        Plan.make(profile.shape, tuple(replace(layer, **{name: getattr(full, name)}, **extra) for layer, full in pairs))
        for plan in (budgets[3], budgets[5])
        for name, extra in (("v_dim", {}), ("qk_dim", {"rope_pairs": None}))
        for pairs in [list(zip(as_widths(plan, profile.shape), profile.shape.layers, strict=True))]
        if all(layer.heads == full.heads for layer, full in pairs)
    ]
    plans = [*budgets, *(even(profile, share) for share in (0.875, 0.75, 0.625)), *only][:12]
    found = []
    for plan in plans:
        student = reduce_model(model, plan, tensors, refit=()).model
        found.append((sum(predicted_losses(profile, plan.layers)), loss(student, windows) - dense))
    predicted, measured = (torch.tensor(column) for column in zip(*found, strict=True))
    ranks = torch.stack([column.argsort().argsort().double() for column in (predicted, measured)])
    return {
        "spearman": round(torch.corrcoef(ranks)[0, 1].item(), 4),
        "plans": [[round(x, 4) for x in pair] for pair in found],
    }


def main():  # noqa: PLR0915 - a table, row by row
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_model()) if args.model == "smollm2" else args.model
    ids = open_tokenizer(source)(args.text.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
    windows = torch.tensor(ids[: len(ids) // args.context * args.context]).view(-1, args.context)
    model = open_model(source).float()
    shape = shape_of(model)
    output = args.output or Path(f"results/compress_{Path(source).name.lower()}.json")
    found = {
        "model": Path(source).name,
        "text": args.text.name,
        "tokens": windows.numel(),
        "context": args.context,
        "calibration": args.calibration.name,
        "calibration_tokens": CALIBRATION_TOKENS,
        "seed": 0,
        "machine": platform.machine(),
        "dense_attention_parameters": shape.attention_parameters(),
    }
    before = json.loads(output.read_text()) if output.exists() else {}
    same = all(before.get(name) == value for name, value in found.items())
    rows = before["rows"] if same else []  # an interrupted table goes on; remove the file to measure all of it again

    def known(name, kind, share):
        return any((row["method"], row["budget"], row["share"]) == (name, kind, share) for row in rows)

    def add(name, kind, share, student, seconds, **facts):
        row = {
            "method": name,
            "budget": kind,
            "share": share,
            "excess_nats": round(loss(student, windows) - dense, 4),
            "kv_bytes_per_token": round(cache_per_token(student)),
            "attention_parameters": shape_of(student).attention_parameters(),
            "seconds": round(seconds, 1),
            "opens_as": "per-layer" if getattr(student.config, "headwise", None) else "stock",
            **facts,
        }
        rows.append(row)
        output.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    def factor(name, kind, share, only_cached):
        if not known(name, kind, share):
            start = time.perf_counter()
            student = whitened(model, batches, share, only_cached)
            add(name, kind, share, student, time.perf_counter() - start)

    def cut(name, kind, share, plan, method="weighted", refit=(), form="per-layer"):
        if known(name, kind, share):
            return
        start = time.perf_counter()
        made = reduce_model(model, plan, tensors, method, form, refit)
        student, plan = made.model, made.plan
        damage = sum(predicted_losses(profile, plan.layers)) if method == "weighted" else None
        facts = {} if damage is None else {"predicted_nats": round(damage, 4)}
        add(name, kind, share, student, time.perf_counter() - start, **facts)

    dense = loss(model, windows)
    print(f"dense perplexity {math.exp(dense):.3f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        config = InspectConfig(tokens=CALIBRATION_TOKENS, maps=False)
        profile = inspect_folder(source, Path(name) / "run", texts=[str(args.calibration)], config=config)
        statistics = time.perf_counter() - start
        tensors = load_file(Path(name) / "run" / "profile.safetensors")
    batches = [{"input_ids": tensors[key]} for key in sorted(tensors) if key.startswith("inputs.")]
    for share in SHARES:
        planned, flat = plan_for(profile, Budget("keep_kv", share)), even(profile, share)
        cut("token-weighted, one width", "kv", share, without_pairs(flat), "token-weighted")
        cut("measured directions, one width", "kv", share, flat)
        cut("+ widths by layer", "kv", share, planned)
        cut("+ refit of queries and outputs (headwise)", "kv", share, planned, refit=PIECES)
    share = ALL_PIECES_AT
    planned, flat = plan_for(profile, Budget("keep_kv", share)), even(profile, share)
    cut("headwise, outputs not refitted", "kv", share, planned, refit=("queries",))
    cut("headwise, queries not refitted", "kv", share, planned, refit=("outputs",))
    cut("headwise, a temperature instead of queries", "kv", share, planned, refit=("temperature", "outputs"))
    cut("headwise, one width", "kv", share, flat, refit=PIECES)
    cut("weights alone (SVD, pairs by norm), one width", "kv", share, without_pairs(flat), "svd")
    cut("RoPE pairs by norm alone, values whole", "kv", share, fewer_pairs(flat, shape, share), "svd")
    for share in SHARES:
        try:
            stock = plan_for(profile, Budget("keep_kv", share), uniform=True)
            cut("headwise, stock format", "kv", share, stock, refit=PIECES, form="stock")
        except InputError as error:
            found["no_stock_format"] = str(error)
        if share < SHARES[0]:
            cut("key/value groups removed", "kv", share, fewer_groups(profile, share))
            if not sites_of(model)[0].family.fused:
                factor("whitened SVD of keys and values (latents not cached)", "kv", share, only_cached=True)
    other = torch_pruned(source, windows, 2 / 3)
    print("Torch-Pruning:", other, flush=True)
    share = ALL_PIECES_AT
    planned = plan_for(profile, Budget("keep_attention_params", share))
    cut("token-weighted, one width", "parameters", share, without_pairs(even(profile, share)), "token-weighted")
    factor("whitened SVD of every matrix", "parameters", share, only_cached=False)
    cut("headwise", "parameters", share, planned, refit=PIECES)
    few = windows[: RANKED_TOKENS // args.context]
    found |= {
        "statistics_seconds": round(statistics, 1),
        "dense_perplexity": round(math.exp(dense), 3),
        "dense_kv_bytes_per_token": round(cache_per_token(model)),
        "rows": rows,
        "torch_pruning": other if isinstance(other, str) else {**other, "excess_nats": round(other["loss"] - dense, 4)},
        "ranking": ranking(model, profile, tensors, few, loss(model, few)),
    }
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
