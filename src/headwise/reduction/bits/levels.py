"""From a reduced model and text to the levels that its cached coordinates are rounded to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.calibration import Batch
from headwise.families.shapes import rotary_width
from headwise.families.sites import Site, sites_of
from headwise.files.progress import Progress, silent
from headwise.linalg.attention import Attention
from headwise.linalg.coding import fit_levels
from headwise.records.packing import NOISE, WIDTHS
from headwise.records.plan import Plan
from headwise.reduction.bits.change import Bits
from headwise.runtime.cache import CacheSpec, LayerCodes
from headwise.tracing.coded import WHOLE
from headwise.tracing.forward import forward
from headwise.tracing.probe import watching
from headwise.tracing.turns import turning

COHERENCE = 3.0  # of errors over tokens: how much more it costs to shrink a coordinate than to add noise to it
SAMPLES = 1 << 28  # numbers (1 GB) kept at once; more layers than that take more passes over the text


def bits_of(plan: Plan) -> list[Bits | None]:
    """For each layer that stays after ``plan`` the bits of its cache."""
    staying = zip(plan.layers, plan.dropped(), strict=True)
    return [next((each for each in changes if isinstance(each, Bits)), None) for changes, gone in staying if not gone]


def fit_cache(
    model: PreTrainedModel, plan: Plan, batches: Sequence[Batch], *, progress: Progress = silent
) -> CacheSpec | None:
    """The levels of every packed layer of ``model``, which ``plan`` made, fitted to ``batches``; None without any."""
    packed = {site.path: (site, bits) for site, bits in zip(sites_of(model), bits_of(plan), strict=True) if bits}
    if not packed:
        return None
    tokens = sum(batch.inputs[model.main_input_name].numel() for batch in batches)
    each = tokens * max(len(bits.widths()) for _, bits in packed.values())
    at_once, paths, layers = max(1, SAMPLES // each), list(packed), {}
    for start in range(0, len(paths), at_once):
        progress(start, len(paths), "fitting levels")
        samples = _samples(model, {path: packed[path][0] for path in paths[start : start + at_once]}, batches)
        for path, (keys, values) in samples.items():
            site, bits = packed[path]
            layers[int(site.module.layer_idx)] = _codes(bits, keys, values)
    return CacheSpec(layers, WHOLE, rotary_width(model))


def _samples(model: PreTrainedModel, sites: dict[str, Site], batches: Sequence[Batch]) -> dict[str, list[Tensor]]:
    """Keys before RoPE and values of the layers ``sites``, (tokens, G, C) each, first tokens left out."""
    parts: dict[str, tuple[list[Tensor], list[Tensor]]] = {path: ([], []) for path in sites}

    def see(path: str, attention: Attention) -> None:
        if path in parts:
            keys = turns.back(attention.k_BGSK.float(), getattr(sites[path].module, "rope_pairs", None))
            for kept, x in zip(parts[path], (keys, attention.v_BGSV.float()), strict=True):
                kept.append(x[:, :, WHOLE:].transpose(1, 2).flatten(0, 1).cpu())

    with torch.inference_mode(), turning(model) as turns, watching(model, see):
        for batch in batches:
            forward(model, batch.inputs, head=False)
    return {path: [torch.cat(kept) for kept in both] for path, both in parts.items()}


def _codes(bits: Bits, keys_NGK: Tensor, values_NGV: Tensor) -> LayerCodes:
    key_bits, value_bits = (torch.tensor([list(map(int, row)) for row in rows]) for rows in (bits.keys, bits.values))
    return LayerCodes(
        key_bits=key_bits.to(torch.uint8),
        value_bits=value_bits.to(torch.uint8),
        key_levels=_levels(keys_NGK, key_bits),
        value_levels=_levels(values_NGV, value_bits),
        key_gain=gains(),
        value_gain=gains(),
    )


def _levels(samples_NGC: Tensor, bits_GC: Tensor) -> Tensor:
    levels, samples, bits = torch.zeros(bits_GC.numel(), 3), samples_NGC.flatten(1), bits_GC.flatten()
    for width in bits.unique().tolist():
        place = (bits == width).nonzero()[:, 0]
        levels[place] = fit_levels(samples[:, place], width)
    return levels.unflatten(0, bits_GC.shape).half()


def gains() -> Tensor:
    """For each width the factor on a decoded deviation from its mean.

    Rounding to the nearest level shrinks a coordinate by its own noise; shrinkage is alike for all tokens and hurts
    more than as much noise. The factor that costs least lies between none and undoing all of it.
    """
    factors = torch.ones(WIDTHS[-1] + 1)
    for bits, noise in NOISE.items():
        factors[bits] = COHERENCE / (COHERENCE * (1 - noise) + noise)
    return factors.half()
