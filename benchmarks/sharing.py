"""Loss of models whose key/value heads share what they cache, at shares of the numbers, and their decode time.

    python benchmarks/sharing.py MODEL --text FILE --calibration FILE [--healing FILE] [--contexts 512] [--methods ...]
    python benchmarks/sharing.py MODEL --text FILE --calibration FILE --times absorbed@0.5,stock-merged@0.5

Rows are those of benchmarks/bits.py, in results/sharing.json: windows of the text, teacher-forced, in float32; excess
and its standard error are paired over windows. A cache keeps 16 bits of each number. A name is a form and its share;
``-unrefitted`` is cut and not fitted, ``-healed`` is healed on 200,000 tokens.

- ``absorbed``: a few RoPE pairs and one latent for all heads of a layer, read as they are (`plan --absorb`);
- ``merged``: neighbouring heads merged or narrower (`plan --merge-heads`), ``narrower``: heads narrower only;
- ``stock-merged``: one number of merged heads of one width in all layers, a stock class;
- ``mean-pooled``: key/value heads averaged, as the usual conversion to grouped queries does;
- ``pca-separate``, ``pca-joint``: stand-ins, ours, for latents as in Palu and SVD-LLM (of keys and of values, by the
  covariance of what is cached, one rank for all layers) and in TransMLA (of both together, keys scaled to the size of
  values; all pairs keep their position, which flatters it). ``pca-separate-4`` rounds its latents to 4 bits after a
  Hadamard rotation, with a scale for each token. Keys are rebuilt.

Times: one new token against the dense model's in stock transformers, least of several, on one thread, in processor
time.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from alternatives import Rounded, rotated_per_token
from bits import Calibration, Factory, arguments, measure, reading
from coordinates import HEALED, TOKENS, WINDOW, turns_of
from torch import Tensor
from transformers import PreTrainedModel

import headwise as hw
from headwise.checkpoints.load import open_model
from headwise.checkpoints.profiled import Profile
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.files.writing import replacing
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.records.cost import cost_of
from headwise.reduction.build import build_reduced
from headwise.reduction.plans import plan_for
from headwise.steps.demo import demo_model
from headwise.steps.timing import reduced_with_cache

SHARES = (0.75, 0.5, 0.375, 0.3334, 0.25)
LENGTHS, DTYPES = (1024, 8192), (torch.float32, torch.bfloat16)
STEPS = 9  # tokens decoded by each
AT_ONCE = 4  # windows of calibration

Planner = Callable[[Profile, float], Plan]


@dataclass(frozen=True)
class Cut:
    """A model with other attention, which reads its cache as it is: a `bits.Quantiser`."""

    model: PreTrainedModel
    dense: PreTrainedModel
    bits: float = 16

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return k_BGTK, v_BGTV

    def share(self, tokens: int) -> float:
        """Bytes of a cache of so many tokens against those of the dense model."""
        return cost_of(shape_of(self.model), tokens).kv_bytes / cost_of(shape_of(self.dense), tokens).kv_bytes


@functools.cache
def profile_of(source: str, text: Path, positions: bool, work: Path | None) -> Profile:
    """What the model at ``source`` does on the calibration text, kept in ``work`` for other runs."""
    folder = work and work / f"{Path(source).name}-{text.stem}{'-positions' * positions}"
    if folder and (folder / "profile.json").exists():
        return Profile.load(folder)
    model = open_model(source).float()
    window = min(WINDOW, shape_of(model).max_tokens)
    config = hw.InspectConfig(tokens=TOKENS, context=window, maps=False, positions=positions)
    profile = hw.inspect(model, open_tokenizer(source), text=text, config=config, checks=False)
    if folder:
        profile.save(folder)
    return profile


def pooled(profile: Profile, share: float) -> Plan:
    """Key/value heads averaged, as many as fit into one."""
    first = profile.shape.layers[0]
    joined = round(1 / share)
    layer = LayerPlan(first.heads, first.kv_heads // joined, first.qk_dim, first.v_dim)
    return Plan.make(profile.shape, (layer,) * len(profile.shape.layers))


def within(**forms: Any) -> Planner:
    """The plan of least predicted loss that has these forms to choose from."""
    return lambda profile, share: plan_for(profile, Budget("keep_kv", share), **forms)


PLANNERS: dict[str, Planner] = {
    "absorbed": within(absorb=True),
    "merged": within(merge=True),
    "narrower": within(),
    "stock-merged": within(uniform=True, merge=True),
    "mean-pooled": pooled,
}


def form(name: str, share: float, kind: str) -> Factory:
    """From the dense model and what it is calibrated on to one cut to a plan: unrefitted, refitted or healed."""

    def build(model: PreTrainedModel, calibration: Calibration) -> Cut:
        profile = profile_of(calibration.source, calibration.text, name == "absorbed", calibration.work)
        plan = PLANNERS[name](profile, share)
        if kind == "-unrefitted":
            return Cut(build_reduced(model, plan, tensors=profile.tensors), model)
        small = hw.compress(model, plan, profile)
        if kind == "-healed":
            own = replace(HEALED["headwise-healed"], context=calibration.context, stage="auto")
            tokenizer = open_tokenizer(calibration.source)
            small = hw.heal(small, teacher=model, tokenizer=tokenizer, text=calibration.healing, config=own)
        return Cut(small, model)

    return build


@dataclass(frozen=True)
class Recorder:
    """Adds up second moments of keys before RoPE and of values, of all heads of a layer side by side."""

    model: PreTrainedModel
    moments: dict[int, Tensor]

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are."""
        both = beside(self.model, k_BGTK, v_BGTV)
        y = torch.cat(both, dim=-1).double().flatten(0, 1)
        self.moments[layer] = y.mT @ y + self.moments.get(layer, 0.0)
        return k_BGTK, v_BGTV


def beside(model: PreTrainedModel, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
    """Keys before RoPE and values of all heads side by side, (B, T, G K) and (B, T, G V)."""
    before = turns_of(model, k_BGTK.shape[2]).back(k_BGTK, None)
    return before.transpose(1, 2).flatten(2), v_BGTV.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Latents:
    """Keys and values rebuilt of latents by principal components: a `bits.Quantiser`."""

    model: PreTrainedModel
    maps: dict[int, list[tuple[Tensor, Tensor]]]  # by layer to and from each latent
    bits: int

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the latents, in the order of keys, values."""
        y = torch.cat(beside(self.model, k_BGTK, v_BGTV), dim=-1)
        read = sum(self._stored(y @ to).x @ back for to, back in self.maps[layer])
        G, K = k_BGTK.shape[1], k_BGTK.shape[3]
        keys, values = (
            x.unflatten(-1, (G, -1)).transpose(1, 2) for x in read.split((G * K, read.shape[-1] - G * K), -1)
        )
        return turns_of(self.model, k_BGTK.shape[2]).on(keys, None), values

    def share(self, tokens: int) -> float:
        """Bytes of the latents against those of bfloat16."""
        stored = sum(
            self._stored(torch.zeros(1, tokens, to.shape[1])).nbytes for maps in self.maps.values() for to, _ in maps
        )
        return stored / cost_of(shape_of(self.model), tokens).kv_bytes

    def _stored(self, z_BTR: Tensor) -> Rounded:
        if self.bits == 16:
            return Rounded(z_BTR, 2 * z_BTR.numel())
        rounded = rotated_per_token(z_BTR[:, None], self.bits)
        return Rounded(rounded.x[:, 0], rounded.nbytes)


def latents(share: float, *, joint: bool, bits: int = 16) -> Factory:
    """Latents that keep this share of the numbers."""

    def build(model: PreTrainedModel, calibration: Calibration) -> Latents:
        ids = open_tokenizer(calibration.source)(calibration.text.read_text(encoding="utf-8"))["input_ids"][:TOKENS]
        windows_WT = torch.tensor(ids[: len(ids) // calibration.context * calibration.context])
        recorder = Recorder(model, {})
        with torch.inference_mode(), reading(model, recorder):
            for some in windows_WT.view(-1, calibration.context).split(AT_ONCE):
                model.base_model(some, use_cache=False)
        layers = shape_of(model).layers
        maps = {
            number: components(moment, layers[number].kv_heads * layers[number].qk_dim, share, joint)
            for number, moment in recorder.moments.items()
        }
        return Latents(model, maps, bits)

    return build


def components(moment: Tensor, keys: int, share: float, joint: bool) -> list[tuple[Tensor, Tensor]]:
    """Maps to latents and back by the principal components of keys and of values, or of both scaled to one size."""
    size, parts = len(moment), ((0, keys), (keys, len(moment)))
    if joint:
        scale = torch.cat([(moment.diagonal()[a:b].mean() ** -0.5).expand(b - a) for a, b in parts])
        vectors = torch.linalg.eigh(scale[:, None] * moment * scale).eigenvectors.flip(-1)[:, : round(share * size)]
        return [((scale[:, None] * vectors).float(), (vectors / scale[:, None]).mT.float())]
    maps = []
    for a, b in parts:
        vectors = torch.zeros(size, round(share * (b - a)), dtype=torch.float64)
        vectors[a:b] = torch.linalg.eigh(moment[a:b, a:b]).eigenvectors.flip(-1)[:, : vectors.shape[1]]
        maps.append((vectors.float(), vectors.mT.float()))
    return maps


FORMS: dict[str, Factory] = {
    **{
        f"{name}{kind}@{share}": form(name, share, kind)
        for name in PLANNERS
        for kind in ("", "-unrefitted", "-healed")
        for share in SHARES
    },
    **{f"pca-separate@{share}": latents(share, joint=False) for share in SHARES},
    **{f"pca-joint@{share}": latents(share, joint=True) for share in SHARES},
    **{f"pca-separate-4@{share}": latents(share, joint=False, bits=4) for share in (1.0, *SHARES)},
}


def decode_ratio(model: PreTrainedModel, plan: Plan, tokens: int) -> float:
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


def times(args: argparse.Namespace) -> None:
    """Decode ratios of plans after all lengths, added to what the file knows."""
    torch.set_num_threads(1)
    source = str(demo_model()) if args.model == "smollm2" else args.model
    known = json.loads(args.times_output.read_text()) if args.times_output.exists() else {}
    for name in args.times.split(","):
        kind, share = name.split("@")
        profile = profile_of(source, args.calibration, kind == "absorbed", args.work)
        plan = PLANNERS[kind](profile, float(share))
        for dtype in DTYPES:
            model = open_model(source).to(dtype)
            for tokens in LENGTHS:
                ratio = round(decode_ratio(model, plan, tokens), 3)
                words = f"{Path(source).name} {name} {str(dtype).removeprefix('torch.')} after {tokens}"
                known[words] = ratio
                print(words, ratio, flush=True)
                with replacing(args.times_output) as temporary:
                    temporary.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[arguments(FORMS)]
    )
    parser.add_argument("--times", help="measure these plans' decode time instead of losses")
    parser.add_argument("--times-output", type=Path, default=Path("results/sharing_times.json"))
    parser.set_defaults(output=Path("results/sharing.json"))
    args = parser.parse_args()
    if args.times:
        times(args)
    else:
        measure(args, FORMS)


if __name__ == "__main__":
    main()
