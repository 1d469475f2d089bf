"""headwise's own packed caches as methods of the benchmark of bits: whole, and with parts of the method left out.

A name is ``headwise@SHARE`` with what is left out or changed before the ``@``: ``headwise-own-basis@0.25``;
``headwise-healed@0.25`` is healed on 200,000 tokens, all layers together, reading rounded keys and values as it learns,
``headwise-healed-briefly@0.25`` on half of them.

    python benchmarks/coordinates.py MODEL --calibration FILE --share 0.27 -o FOLDER

saves such a model, not healed, for the benchmarks that generate. MODEL is a folder, or "smollm2".
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from alternatives import GROUP, affine
from torch import Tensor
from transformers import PreTrainedModel

import headwise as hw
from headwise.checkpoints.load import open_model
from headwise.checkpoints.packed import codes_of
from headwise.checkpoints.profiled import Profile
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.linalg.spectra import Basis
from headwise.records.budget import Budget
from headwise.records.cost import cost_of
from headwise.reduction.bits import options
from headwise.reduction.bits.change import Bits
from headwise.reduction.latent.change import Latent
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.runtime.cache import CacheSpec, LayerCodes
from headwise.steps.demo import demo_model
from headwise.tracing import coded, collect
from headwise.tracing.turns import Turns

SHARES = (0.5, 0.375, 0.27, 0.25, 0.2, 0.1875, 0.13, 0.125, 0.09, 0.0625)
ABLATED = (0.25, 0.125)
NUMBERS = (0.75, 0.5, 0.375, 0.25)
STEPS = 7  # of bisection
TOKENS = 16384  # to calibrate on
WINDOW = 512
HEALED = {
    "headwise-healed": hw.HealConfig(tokens=200_000, stage="global", evaluations=5),
    "headwise-healed-briefly": hw.HealConfig(tokens=100_000, stage="global", evaluations=4),
}

Planner = Callable[[Profile, int], hw.Plan]  # for a context


@dataclass(frozen=True)
class Coordinates:
    """A model whose cache is packed: a `bits.Quantiser`."""

    model: PreTrainedModel
    codes: CacheSpec
    dense_bytes: Callable[[int], int]

    @property
    def bits(self) -> float:
        """Mean of all coordinates."""
        widths = torch.cat([layer.bits for layer in self.codes.layers.values()])
        return round(widths.double().mean().item(), 3)

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the packed cache gives them back; the first token is whole."""
        codes = self.codes.layers.get(layer)
        if codes is None:
            return k_BGTK, v_BGTV
        turns = turns_of(self.model, k_BGTK.shape[2])
        given = (x.transpose(1, 2) for x in (turns.back(k_BGTK, None), v_BGTV))
        keys, values = (x.transpose(1, 2) for x in codes.round(*given))
        keys = turns.on(keys, None)
        whole = self.codes.whole
        return (
            torch.cat((k_BGTK[:, :, :whole], keys[:, :, whole:]), dim=2),
            torch.cat((v_BGTV[:, :, :whole], values[:, :, whole:]), dim=2),
        )

    def share(self, tokens: int) -> float:
        """Bytes of a cache of so many tokens against those of bfloat16."""
        return cost_of(shape_of(self.model), tokens).kv_bytes / self.dense_bytes(tokens)


@dataclass(frozen=True)
class Grouped(Coordinates):
    """The same coordinates with as many bits, but levels of their own for every 64 tokens: evenly spaced, as KIVI's.

    Each coordinate with any bits takes 32 more a group for them, and needs no levels and no loudness.
    """

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(LayerCodes, "round", round_in_groups):
            return super().read(layer, k_BGTK, v_BGTV)

    def share(self, tokens: int) -> float:
        whole = sum(layer.cached_per_token for layer in shape_of(self.model).layers) * 2
        bits = torch.cat([layer.bits for layer in self.codes.layers.values()])
        coded = (tokens - 1) * (bits.sum() + (bits > 0).sum() * 32 / GROUP) / 8
        return (coded.item() + whole) / self.dense_bytes(tokens)


def round_in_groups(codes: LayerCodes, k_BTGK: Tensor, v_BTGV: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `LayerCodes.round`."""
    heads_BTAW = v_BTGV.flatten(2).unflatten(2, codes.value_bits.shape)
    z_BTAW = (heads_BTAW[..., None, :] @ codes.to_coordinates)[..., 0, :]
    keys = evenly(k_BTGK, codes.key_bits, codes.key_levels)
    values = evenly(z_BTAW, codes.value_bits, codes.value_levels)[..., None, :] @ codes.to_values
    return keys, values.reshape(v_BTGV.shape)


def evenly(x_BTGC: Tensor, bits_GC: Tensor, levels_GC3: Tensor) -> Tensor:
    """Each coordinate on evenly spaced levels from its least to its largest number in 64 tokens; its mean at 0 bits."""
    read = levels_GC3[..., 0].expand(x_BTGC.shape).clone()
    for bits in bits_GC.unique().tolist():
        if bits:
            place = bits_GC == bits
            read[:, :, place] = affine(x_BTGC[:, :, place].unflatten(1, (-1, GROUP)), bits, dim=2).x.flatten(1, 2)
    return read


@functools.lru_cache(maxsize=4)
def turns_of(model: PreTrainedModel, tokens: int) -> Turns:
    """How a window of so many tokens is turned."""
    turns = Turns()
    rotary: Any = model.base_model.rotary_emb
    turns.cos, turns.sin = rotary(torch.zeros(1), torch.arange(tokens)[None])
    return turns


@functools.cache
def profile_of(source: str, text: Any, own_basis: bool, work: Path | None = None) -> Profile:
    """What the model at ``source`` does on the calibration text; ``own_basis``: in the model's own coordinates."""
    folder = work and work / f"{Path(source).name}-{text.stem}{'-own-basis' * own_basis}"
    if folder and (folder / "profile.json").exists():
        return Profile.load(folder)

    def identities(layer: Any, sums: Any, weights: Any) -> dict[str, Basis]:
        sizes = {"k": (layer.kv_heads, layer.qk_dim), "v": (layer.value_groups, layer.value_group_width)}
        sizes["kv"] = (layer.value_groups, layer.joint_group_width)
        eyes = {part: torch.eye(n, dtype=torch.float64).repeat(groups, 1, 1) for part, (groups, n) in sizes.items()}
        return {part: Basis(eye[..., 0], eye, eye) for part, eye in eyes.items()}

    bases = identities if own_basis else coded.coded_bases
    model = open_model(source).float()
    window = min(WINDOW, shape_of(model).max_tokens)
    config = hw.InspectConfig(tokens=TOKENS, context=window, maps=False)
    with mock.patch.object(collect, "coded_bases", bases):
        profile = hw.inspect(model, open_tokenizer(source), text=text, config=config, checks=False)
    if folder:
        profile.save(folder)
    return profile


def felt_alike(profile: Profile) -> Profile:
    """The profile with all coordinates of a layer alike: each counts as much as their mean."""
    layers = []
    for layer in profile.layers:
        rows = {name: rows for name, rows in layer.values.items() if name.endswith("bit_damage")}
        losses = [loss for part in rows.values() for row in part for loss in row]
        alike = {name: [[sum(losses) / len(losses)] * len(row) for row in part] for name, part in rows.items()}
        layers.append(replace(layer, values={**layer.values, **alike}))
    return replace(profile, layers=tuple(layers))


def packed(
    share: float,
    *,
    cache: str = "mixed",
    own_basis: bool = False,
    importance: bool = True,
    widths: tuple[int, ...] | None = None,
) -> Callable[[PreTrainedModel, Any], Coordinates]:
    """From the dense model and a calibration text to its packed form."""

    def build(model: PreTrainedModel, calibration: Any) -> Coordinates:
        profile = profile_of(calibration.source, calibration.text, own_basis, calibration.work)
        if not importance:
            profile = felt_alike(profile)
        allowed: Mapping[str, tuple[int, ...]] = dict(options.ALLOWED)
        if widths is not None:
            allowed = {**allowed, cache: widths}
        budget = Budget("keep_kv", share, calibration.context)
        with mock.patch.object(options, "ALLOWED", allowed):
            plan = plan_for(profile, budget, cache=cache)
        reduced = reduce_model(model, plan, profile.tensors)
        if reduced.codes is None:
            raise RuntimeError("The plan does not round the cache.")
        return Coordinates(reduced.model, reduced.codes, lambda tokens: cost_of(shape_of(model), tokens).kv_bytes)

    return build


def grouped(share: float) -> Callable[[PreTrainedModel, Any], Coordinates]:
    """As `packed`, but with scales for groups of tokens, paid for by bits."""

    def build(model: PreTrainedModel, calibration: Any) -> Coordinates:
        low, high, best = 0.0, share, None
        for _ in range(STEPS):
            middle = (low + high) / 2
            each = packed(middle)(model, calibration)
            tried = Grouped(each.model, each.codes, each.dense_bytes)
            fits = tried.share(calibration.context) <= share
            low, high, best = (middle, high, tried) if fits else (low, middle, best)
        return best

    return build


def uniform(bits: int) -> Callable[[PreTrainedModel, Any], Coordinates]:
    """As `packed`, but with the same bits for every coordinate."""

    def build(model: PreTrainedModel, calibration: Any) -> Coordinates:
        profile, digit = profile_of(calibration.source, calibration.text, False, calibration.work), str(bits)
        layers = [
            Bits((digit * layer.qk_dim,) * layer.kv_heads, (digit * layer.value_group_width,) * layer.value_groups)
            for layer in profile.shape.layers
        ]
        reduced = reduce_model(model, hw.Plan.make(profile.shape, layers), profile.tensors)
        return Coordinates(reduced.model, reduced.codes, lambda tokens: cost_of(shape_of(model), tokens).kv_bytes)

    return build


def numbers(share: float, *, joint: bool, digit: str = "8") -> Callable[[PreTrainedModel, Any], Coordinates]:
    """As `packed`, but with the cache of `numbers_plan`."""

    def build(model: PreTrainedModel, calibration: Any) -> Coordinates:
        profile = profile_of(calibration.source, calibration.text, False, calibration.work)
        reduced = reduce_model(model, numbers_plan(profile, share, joint=joint, digit=digit), profile.tensors)
        return Coordinates(reduced.model, reduced.codes, lambda tokens: cost_of(shape_of(model), tokens).kv_bytes)

    return build


def numbers_plan(profile: Profile, share: float, *, joint: bool, digit: str = "8") -> hw.Plan:
    """8 bits (``digit`` g: 16) for the ``share`` of all coordinates felt most, and none for others.

    ``joint``: of latents of keys and values; else of keys and of values by themselves.
    """
    names = ("kv_bit_damage",) if joint else ("k_bit_damage", "v_bit_damage")
    felt = sorted(loss for layer in profile.layers for name in names for row in layer.values[name] for loss in row)
    least = felt[round((1 - share) * len(felt))]
    layers = []
    for layer in profile.layers:
        rows = (
            tuple("".join(digit if loss >= least else "0" for loss in row) for row in layer.values[name])
            for name in names
        )
        layers.append(Latent(*rows) if joint else Bits(*rows))
    return hw.Plan.make(profile.shape, layers)


def joint_numbers(share: float) -> Planner:
    """Plans of joint latents that keep this share of the numbers: see `numbers_plan`."""
    return lambda profile, _: numbers_plan(profile, share, joint=True)


def shared_out(share: float, cache: str = "mixed") -> Planner:
    """Plans of packed caches that take ``share`` of the bytes."""
    return lambda profile, context: plan_for(profile, Budget("keep_kv", share, context), cache=cache)


def healed(planner: Planner, config: hw.HealConfig = HEALED["headwise-healed"]) -> Callable[..., Coordinates]:
    """From the dense model, a calibration text and one to heal on to its packed form, healed."""

    def build(model: PreTrainedModel, calibration: Any) -> Coordinates:
        tokenizer = open_tokenizer(calibration.source)
        profile = profile_of(calibration.source, calibration.text, False, calibration.work)
        small = hw.compress(model, planner(profile, calibration.context), profile)
        own = replace(config, context=calibration.context)
        small = hw.heal(small, teacher=model, tokenizer=tokenizer, text=calibration.healing, config=own)
        return Coordinates(small, codes_of(small), lambda tokens: cost_of(shape_of(model), tokens).kv_bytes)

    return build


OURS = {
    **{f"headwise@{share}": packed(share) for share in SHARES},
    **{f"headwise-latent@{share}": packed(share, cache="latent") for share in SHARES},
    **{f"headwise-own-basis@{share}": packed(share, own_basis=True) for share in ABLATED},
    **{f"headwise-no-importance@{share}": packed(share, importance=False) for share in ABLATED},
    **{f"{name}@{share}": healed(shared_out(share), config) for name, config in HEALED.items() for share in SHARES},
    **{f"headwise-latent-healed@{share}": healed(shared_out(share, "latent")) for share in SHARES},
    **{f"headwise-latent-numbers-healed@{share}": healed(joint_numbers(share)) for share in NUMBERS},
    **{f"headwise-grouped@{share}": grouped(share) for share in ABLATED},
    **{f"headwise-uniform-{bits}": uniform(bits) for bits in (4, 3, 2)},
    **{f"headwise-numbers@{share}": numbers(share, joint=False) for share in NUMBERS},
    **{f"headwise-latent-numbers@{share}": numbers(share, joint=True) for share in NUMBERS},
    **{f"headwise-latent-whole@{share}": numbers(share, joint=True, digit="g") for share in NUMBERS},
    **{f"headwise-0248@{share}": packed(share, widths=(0, 2, 4, 8)) for share in ABLATED},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A model with a packed cache, for other benchmarks.")
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.27)
    parser.add_argument("--cache", choices=("mixed", "latent"), default="mixed")
    parser.add_argument("--work", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    source = str(demo_model()) if args.model == "smollm2" else args.model
    profile = profile_of(source, args.calibration, False, args.work)
    small = hw.compress(open_model(source).float(), shared_out(args.share, args.cache)(profile, WINDOW), profile)
    hw.save(small, args.output, tokenizer=open_tokenizer(source))


if __name__ == "__main__":
    main()
