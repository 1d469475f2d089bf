"""`headwise inspect` on SmolLM2-135M: time against plain passes over the same tokens, memory, and the obvious way.

    python benchmarks/inspect_speed.py [--tokens 8192] [-o results/inspect_speed.json]

Everything is measured in one run on one machine. The straightforward way (svdvals of every attention map, eigvalsh of
explicit Jacobians, SVD of each D x D product) would take days on all of it, so it is timed on a stated sample (four
layers of one window; sixteen rows for each head and length) beside ours on the very same sample, values compared, and
its time for everything that `inspect` measures is extrapolated from that.
"""

import argparse
import json
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers

from headwise.checkpoints.load import open_model
from headwise.data.calibration import text_calibration
from headwise.data.processors import open_tokenizer
from headwise.data.texts import own_texts
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.families.weights import read_attention
from headwise.linalg.ranks import effective_rank, gram_singular_values, numerical_rank, stable_rank
from headwise.linalg.saturation import jacobian_norms
from headwise.linalg.spectra import product_spectrum, weighted_spectrum
from headwise.pipelines.profile import inspect_folder
from headwise.records.settings import InspectConfig
from headwise.steps.demo import demo_model
from headwise.steps.inspect import SPECTRAL_TOKENS
from headwise.tracing.probe import watching

LAYERS = (0, 10, 20, 29)
ROWS = 16
LENGTHS = (64, 128, 256, 512, 1024)


class Clock:
    """Seconds spent under each name."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, name, function, *args):
        start = time.perf_counter()
        value = function(*args)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return value


class Memory:
    """Resident memory while a block runs: at its start and at its peak, in GB."""

    def __enter__(self):
        self.start = self.peak = _resident()
        self.running = True
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self):
        while self.running:
            self.peak = max(self.peak, _resident())
            time.sleep(0.01)

    def __exit__(self, *error):
        self.running = False
        self.thread.join()


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e9


def relative(ours, slow):
    return ((ours.double() - slow.double()).abs() / slow.double().abs().clamp(min=1e-6)).max().item()


def plain_passes(model, batches):
    """Forward and backward over the same windows, as training would do them."""
    start = time.perf_counter()
    for batch in batches:
        ids = batch.inputs["input_ids"]
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    return time.perf_counter() - start


def compare(model, batch):
    """Both ways on the same sample: seconds of each by piece, and the largest relative difference of any value."""
    sites = sites_of(model)
    wanted = {sites[i].path: i for i in LAYERS}
    ours, slow, worst = Clock(), Clock(), {}

    def note(name, fast_value, slow_value):
        worst[name] = max(worst.get(name, 0.0), relative(fast_value, slow_value))

    inputs = {}
    hooks = [
        sites[i].module.register_forward_pre_hook(
            lambda module, args, kwargs, i=i: inputs.__setitem__(i, kwargs["hidden_states"][0].double()),
            with_kwargs=True,
        )
        for i in LAYERS
    ]

    def see(path, attention):
        if path not in wanted:
            return
        i = wanted[path]
        a = attention.logits(slice(None), slice(None)).softmax(-1)[0]
        for L in LENGTHS:
            leading = a[:, :L, :L]
            s = ours("ranks", gram_singular_values, leading)
            t = slow("ranks", torch.linalg.svdvals, leading.double())
            for name, rank in (("effective_rank", effective_rank), ("stable_rank", stable_rank)):
                note(name, rank(s), rank(t))
            note("numerical_rank", numerical_rank(s, 1e-3), numerical_rank(t, 1e-3))
            rows = leading[:, torch.linspace(L // 2, L - 1, ROWS).long()]
            norms = ours("jacobians", jacobian_norms, rows)
            explicit = slow("jacobians", _explicit, rows)
            note("jacobian", norms, explicit)
        weights = read_attention(sites[i], 64)
        x = inputs[i]
        groups = torch.arange(9) // 3
        w_q, w_k = weights.w_q_HKD.detach().double(), weights.w_k_GKD.detach().double()[groups]
        w_v, w_o = weights.w_v_GVD.detach().double()[groups], weights.w_o_HVD.detach().double()
        fast = ours("spectra", product_spectrum, w_q.mT, w_k.mT)
        note("qk_weight_spectrum", fast, slow("spectra", torch.linalg.svdvals, w_q.mT @ w_k)[:, :64])
        fast = ours("spectra", product_spectrum, w_o.mT, w_v.mT)
        note("vo_weight_spectrum", fast, slow("spectra", torch.linalg.svdvals, w_o.mT @ w_v)[:, :64])
        # On the text: the queries' and keys' inputs weigh a D x D product (before rotary positions, where it exists).
        c = x.T @ x / len(x)
        q, k = (x @ w.flatten(0, 1).T for w in (w_q, w_k))
        q, k = (y.unflatten(1, (9, 64)).transpose(0, 1) for y in (q, k))
        fast = ours("spectra", lambda: weighted_spectrum(q.mT @ q / len(x), k.mT @ k / len(x)))
        note("qk_data_spectrum", fast[:, :32], slow("spectra", _weighted, c, w_q, w_k)[:, :32])

    with torch.no_grad(), watching(model, see):
        model(**batch.inputs)
    for hook in hooks:
        hook.remove()
    return ours.seconds, slow.seconds, worst


def _explicit(rows):
    jacobians = torch.diag_embed(rows.double()) - rows.double()[..., None] * rows.double()[..., None, :]
    return torch.linalg.eigvalsh(jacobians)[..., -1]


def _weighted(c, w_q, w_k):
    values, vectors = torch.linalg.eigh(c)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return torch.linalg.svdvals(root @ w_q.mT @ w_k @ root)


def extrapolate(slow, windows):
    """Seconds the straightforward way would take for everything inspect measures."""
    layers = 30 / len(LAYERS)
    rows = LENGTHS[-1] // 2 / ROWS  # of the longest length, whose Jacobians take nearly all of the sample's time
    spectral = min(windows, SPECTRAL_TOKENS // LENGTHS[-1])
    return {
        "ranks": slow["ranks"] * layers * spectral,
        "jacobians": slow["jacobians"] * layers * windows * rows,
        "spectra": slow["spectra"] * layers,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/inspect_speed.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_model())
    folder = Path(tempfile.mkdtemp())
    with Memory() as memory:
        start = time.perf_counter()
        inspect_folder(source, folder / "run", config=InspectConfig(tokens=args.tokens))
        whole = time.perf_counter() - start
    size = sum(path.stat().st_size for path in Path(source).glob("*.safetensors")) / 1e9
    page = (folder / "run" / "report.html").stat().st_size
    shutil.rmtree(folder)
    model = open_model(source).float()
    batches = text_calibration(
        model, shape_of(model), source, open_tokenizer(source), own_texts(), args.tokens, context=LENGTHS[-1]
    ).batches
    plain = plain_passes(model, batches)
    ours, slow, worst = compare(model, batches[0])
    straight = extrapolate(slow, len(batches))
    found = {
        "model": "SmolLM2-135M-Instruct, float32",
        "tokens": args.tokens,
        "seed": 0,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "inspect_seconds": round(whole, 1),
        "plain_forward_backward_seconds": round(plain, 1),
        "inspect_over_plain": round(whole / plain, 2),
        "memory_gb": {
            "before": round(memory.start, 2),
            "peak": round(memory.peak, 2),
            "weights": round(size, 2),
            "above_model": round(memory.peak - memory.start - size, 2),
        },
        "page_bytes": page,
        "sample": {"layers": LAYERS, "windows": 1, "rows_per_head_and_length": ROWS, "lengths": LENGTHS},
        "sample_seconds": {
            name: {"ours": round(ours[name], 3), "straightforward": round(slow[name], 3)} for name in ours
        },
        "sample_ratio": round(sum(slow.values()) / sum(ours.values()), 1),
        "largest_relative_difference": {name: float(f"{value:.1e}") for name, value in worst.items()},
        "straightforward_seconds_for_everything": {name: round(value) for name, value in straight.items()},
        "times_faster": round((sum(straight.values()) + plain) / whole, 1),
    }
    print(json.dumps(found, indent=1))
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
