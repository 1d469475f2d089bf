"""The shape that people choose at a size: the textbook's.

Heads of 64 (GPT-2, SmolLM2, ViT), narrower in narrow models (Pythia-14M: 32) and wider in wide ones (Llama 3.2 3B:
128); about 64 of width for each layer, as in GPT-2, with at least 6 layers (Pythia-14M to 70M) or 12 (ViT-Ti to B); an
MLP of 4 times the width, or of 8/3 if it is gated; one matrix for both ends of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from headwise.records.blueprint import BUILDABLE, Blueprint
from headwise.records.design import Request
from headwise.records.errors import InputError
from headwise.steps.design.drafts import Draft, kv_heads
from headwise.theory.tradeoff import HeadGroup

HEAD_DIMS = {3072: 128, 256: 64, 128: 32, 64: 16, 32: 8}  # from this width on
LEAST_LAYERS = {"llama": 6, "gpt2": 6, "vit": 12}
WIDTH_PER_LAYER = 64
DEPTH_COUNTS = 0.25  # depths of common models differ by a factor of 4 at one width, their MLPs hardly
DEEPEST = 4


def mlp_ratio(family: str) -> float:
    """The usual width of an MLP over that of the residual stream."""
    return 8 / 3 if BUILDABLE[family].gated else 4.0


def usual_draft(request: Request) -> Draft:
    """The shape nearest to the usual proportions, all three counted as logarithms, that spends the budget."""
    ranked = [
        (_distance(request.family, width, layers, mlp), width, layers) for width, layers, mlp in _shapes(request)
    ]
    if not ranked:
        raise InputError(_smallest(request))
    _, width, layers = min(ranked)
    return Draft(width, (_heads(width),) * layers)


def _heads(width: int) -> HeadGroup:
    head_dim = next(dim for start, dim in HEAD_DIMS.items() if width >= start)
    return HeadGroup(width // head_dim, head_dim)


def _usual_layers(family: str, width: int) -> float:
    return max(LEAST_LAYERS[family], width / WIDTH_PER_LAYER)


def _distance(family: str, width: int, layers: int, mlp: float) -> float:
    depth = abs(math.log(layers / _usual_layers(family, width)))
    return abs(math.log(mlp / (mlp_ratio(family) * width))) + DEPTH_COUNTS * depth


def _shapes(request: Request) -> Iterator[tuple[int, int, float]]:
    """Widths, layers and MLP widths within the budget, the MLP at least as wide as the residual stream."""
    narrowest, least = min(HEAD_DIMS), LEAST_LAYERS[request.family]
    width = narrowest
    while _room(request, width, least, 1) >= width:
        heads = _heads(width)
        for layers in range(least, int(DEEPEST * _usual_layers(request.family, width)) + 1):
            share = None if request.kv_bytes_per_token is None else request.kv_bytes_per_token / layers
            shared = kv_heads(heads, share)
            if not shared:
                break
            mlp = _room(request, width, layers, shared)
            if mlp < width:
                break
            yield width, layers, mlp
        width += next(dim for start, dim in HEAD_DIMS.items() if width >= start)


def _room(request: Request, width: int, layers: int, shared: int) -> float:
    """The width of MLP that the budget leaves to each of so many equal layers."""
    heads, head_dim = _heads(width)
    dims = [(heads, shared, head_dim, head_dim)]
    one, two = (Blueprint(mlp, request.reads).shape(request.family, width, dims) for mlp in (1, 2))
    block = one.total_parameters() - one.outside_parameters
    left = request.parameters - one.outside_parameters - layers * block
    return 1 + left / (layers * (two.total_parameters() - one.total_parameters()))


def _smallest(request: Request) -> str:
    """Why no shape fits, and what would."""
    width, least = min(HEAD_DIMS), LEAST_LAYERS[request.family]
    head_dim = _heads(width).head_dim
    if request.kv_bytes_per_token is not None:
        roomy = replace(request, kv_bytes_per_token=None)
        needed = [layers * 4 * _heads(width).head_dim for width, layers, _ in _shapes(roomy)]
        if needed:
            return (
                f"No usual {request.family} model of {request.parameters:,} parameters does with "
                f"{request.kv_bytes_per_token:,} KV bytes per token; the least is --kv-bytes-per-token {min(needed)}."
            )
    dims = [(_heads(width).heads, _heads(width).heads, head_dim, head_dim)] * least
    smallest = Blueprint(width, request.reads).shape(request.family, width, dims).total_parameters()
    return (
        f"{request.parameters:,} parameters are too few for a {request.family} model with {_ends(request)}; "
        f"the smallest has {smallest:,} ({least} layers of width {width}): give --params {smallest}."
    )
