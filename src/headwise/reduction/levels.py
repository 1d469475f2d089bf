"""From a reduced model and text to the levels that its cached coordinates are rounded to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.calibration import Batch
from headwise.families.latent import caches_neighbours
from headwise.families.shapes import rotary_width, shape_of
from headwise.families.sites import Site, sites_of
from headwise.files.progress import Progress, silent
from headwise.linalg.attention import Attention
from headwise.linalg.coding import fit_levels
from headwise.records.change import code_digits, joined_digits
from headwise.records.packing import LOUD_BITS, NOISE, WIDTHS, bits_of
from headwise.records.plan import Plan
from headwise.records.shape import LayerShape
from headwise.runtime.cache import CacheSpec, LayerCodes, storable, together
from headwise.tracing.coded import WHOLE
from headwise.tracing.forward import forward
from headwise.tracing.latents import Latents, watching_latents
from headwise.tracing.probe import watching
from headwise.tracing.turns import turning

Digits = tuple[str, ...]
ROUNDS = 2  # of fitting levels and loudness in turns
EXTREME = 1e-3  # of tokens are louder, and as many quieter, than any code says
COHERENCE = 3.0  # of errors over tokens: how much more it costs to shrink a coordinate than to add noise to it
SMALLEST = 2.0**-10  # of what is positive and stored in half precision
SAMPLES = 1 << 28  # numbers (1 GB) kept at once; more layers than that take more passes over the text


class Bits(NamedTuple):
    """Bits of the coordinates of keys and of values; without keys, values stand for both."""

    keys: Digits
    values: Digits


def rounds_cache(plan: Plan) -> bool:
    """Whether ``plan`` rounds the cache of any layer."""
    layers = zip(plan.before, plan.layers, strict=True)
    return any(change.code_bits(LayerShape(*dims)) for dims, changes in layers for change in changes)


def _bits_of(model: PreTrainedModel, plan: Plan) -> list[Bits | None]:
    """For each layer of ``model``, which ``plan`` made, the bits of its cache."""
    coded: list[Bits | None] = []
    for layer, run in zip(shape_of(model).layers, plan.made_of(), strict=True):
        digits = [code_digits(layer, plan.layers[number]) for number in run]
        rounded = [each for each in digits if each is not None]
        coded.append(Bits(*joined_digits(rounded)) if rounded else None)
    return coded


def fit_cache(
    model: PreTrainedModel,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    progress: Progress = silent,
) -> CacheSpec | None:
    """The levels of every packed layer of ``model``, which ``plan`` made, fitted to ``batches``; None without any.

    ``tensors`` of a profile name the coordinates of values.
    """
    made_of = {site.path: run for site, run in zip(sites_of(model), plan.made_of(), strict=True)}
    packed = {s.path: (s, bits) for s, bits in zip(sites_of(model), _bits_of(model, plan), strict=True) if bits}
    if not packed:
        return None
    tokens = sum(batch.inputs[model.main_input_name].numel() for batch in batches)
    each = tokens * max(len("".join((*bits.keys, *bits.values))) for _, bits in packed.values())
    at_once, paths, layers = max(1, SAMPLES // each), list(packed), {}
    for start in range(0, len(paths), at_once):
        progress(start, len(paths), "fitting levels")
        samples = _samples(model, {path: packed[path][0] for path in paths[start : start + at_once]}, batches)
        for path, (keys, values) in samples.items():
            site, bits = packed[path]
            name = "v_code_map" if any(bits.keys) else "kv_code_map"
            maps = [own for number in made_of[path] if (own := tensors.get(f"{number}.{name}")) is not None]
            value_map = _value_map(bits, torch.cat(maps) if maps else None)
            layers[int(site.module.layer_idx)] = _codes(bits, value_map, keys, values)
    return _spec(model, layers)


def any_codes(model: PreTrainedModel, plan: Plan) -> CacheSpec | None:
    """Codes with the bits that ``plan``, which made ``model``, says, and any levels: enough for time and bytes."""
    layers = {}
    for site, layer, bits in zip(sites_of(model), shape_of(model).layers, _bits_of(model, plan), strict=True):
        if bits:
            cached = layer.cached
            keys, values = (torch.randn(64, cached.kv_heads, width) for width in (cached.qk_dim, cached.v_dim))
            layers[int(site.module.layer_idx)] = _codes(bits, _value_map(bits, None), keys, values)
    return _spec(model, layers) if layers else None


def _spec(model: PreTrainedModel, layers: dict[int, LayerCodes]) -> CacheSpec:
    return CacheSpec(layers, WHOLE, rotary_width(model), interleaved=caches_neighbours(model.config))


def _samples(model: PreTrainedModel, sites: dict[str, Site], batches: Sequence[Batch]) -> dict[str, list[Tensor]]:
    """What the layers ``sites`` cache as keys before RoPE and as values, (tokens, G, C) each, without first tokens."""
    parts: dict[str, tuple[list[Tensor], list[Tensor]]] = {path: ([], []) for path in sites}

    def keep(path: str, *both: Tensor) -> None:
        for kept, x in zip(parts[path], both, strict=True):
            kept.append(x[:, :, WHOLE:].transpose(1, 2).flatten(0, 1).cpu())

    def see(path: str, attention: Attention) -> None:
        if path in parts and not sites[path].family.latent:
            keys = turns.back(attention.k_BGSK.float(), getattr(sites[path].module, "rope_pairs", None))
            keep(path, keys, attention.v_BGSV.float())

    def see_latents(path: str, latents: Latents) -> None:
        keep(path, latents.k_BGTK.float(), latents.v_BGTV.float())

    with (
        torch.inference_mode(),
        turning(model) as turns,
        watching(model, see),
        watching_latents(sites.values(), see_latents),
    ):
        for batch in batches:
            forward(model, batch.inputs, head=False)
    return {path: [torch.cat(kept) for kept in both] for path, both in parts.items()}


def _value_map(bits: Bits, measured: Tensor | None) -> Tensor:
    """What makes values, or keys and values, of their coordinates: as it was measured.

    Nothing behind a cut, which has other coordinates, and where half precision cannot hold what undoes the map.
    """
    shape = len(bits.values), len(bits.values[0]), len(bits.values[0])
    if measured is not None and measured.shape == shape:
        inverse, failed = torch.linalg.inv_ex(measured.half().double())
        if not failed.any() and inverse.float().isfinite().all():
            return measured.half()
    return torch.eye(shape[-1]).expand(shape).half()


def _codes(bits: Bits, value_map_AWW: Tensor, keys_NGK: Tensor, values_NGV: Tensor) -> LayerCodes:
    key_bits, value_bits = (
        torch.tensor([bits_of(row) for row in rows], dtype=torch.long) for rows in (bits.keys, bits.values)
    )
    if not any(bits.keys):
        keys_NGK, values_NGV = keys_NGK[..., :0], together(keys_NGK, values_NGV, len(value_bits))
    key_levels, key_loudness = _levels(keys_NGK, key_bits)
    grouped_NAW = values_NGV.flatten(1).unflatten(1, value_bits.shape)
    coordinates = torch.linalg.solve(value_map_AWW.float(), grouped_NAW.permute(1, 2, 0)).permute(2, 0, 1)
    value_levels, value_loudness = _levels(coordinates, value_bits)
    return LayerCodes(
        key_bits=key_bits.to(torch.uint8),
        value_bits=value_bits.to(torch.uint8),
        key_levels=key_levels,
        value_levels=value_levels,
        key_gain=gains(),
        value_gain=gains(),
        key_loudness=key_loudness,
        value_loudness=value_loudness,
        value_map=value_map_AWW,
    )


def _levels(samples_NGC: Tensor, bits_GC: Tensor) -> tuple[Tensor, Tensor]:
    """Levels (G, C, 3) and loudness (3,), fitted in turns: each is measured in units of the other."""
    if not bits_GC.numel():
        return torch.zeros(*bits_GC.shape, 3), torch.ones(3).half()
    samples, bits = samples_NGC.flatten(1), bits_GC.flatten()
    live = bits > 0
    offset, scale = samples.mean(0), samples.std(0).clamp(min=1e-6)
    factor, levels = torch.tensor(1.0), torch.zeros(len(bits), 3)
    loudness = torch.ones(3)
    for _ in range(ROUNDS):
        size_N = factor * _size(samples[:, live], offset[live], scale[live])
        low, high = size_N.sqrt().quantile(torch.tensor((EXTREME, 1 - EXTREME)))
        step = ((high - low) / (2**LOUD_BITS - 1)).clamp(min=SMALLEST)
        loudness = torch.stack((low.clamp(min=SMALLEST), step, factor)).half().float()
        codes_N = ((size_N.sqrt() - loudness[0]) / loudness[1]).round().clamp(0, 2**LOUD_BITS - 1)
        loud_N = (loudness[0] + loudness[1] * codes_N).square()
        even = torch.where(live, offset + (samples - offset) / loud_N[:, None], samples)
        for width in bits.unique().tolist():
            place = (bits == width).nonzero()[:, 0]
            levels[place] = fit_levels(even[:, place], width)
        levels = storable(levels)
        offset, scale = levels[:, 0], levels[:, 1]
        factor = (loud_N.log().mean() - _size(samples[:, live], offset[live], scale[live]).log().mean()).exp()
    return levels.unflatten(0, bits_GC.shape), torch.stack((*loudness[:2], factor)).half()


def _size(samples_NC: Tensor, offset_C: Tensor, scale_C: Tensor) -> Tensor:
    """Root mean square of the deviations of each token, in units of ``scale_C``."""
    if not samples_NC.shape[1]:
        return torch.ones(len(samples_NC))
    return ((samples_NC - offset_C) / scale_C).square().mean(1).sqrt().clamp(min=SMALLEST)


def gains() -> Tensor:
    """For each width the factor on a decoded deviation from its mean.

    Rounding to the nearest level shrinks a coordinate by its own noise; shrinkage is alike for all tokens and hurts
    more than as much noise. The factor that costs least lies between none and undoing all of it.
    """
    factors = torch.ones(WIDTHS[-1] + 1)
    for bits in WIDTHS:
        noise = NOISE[bits]
        factors[bits] = COHERENCE / (COHERENCE * (1 - noise) + noise)
    return factors.half()
