"""The shape that people choose at a size: the textbook's.

Heads of 64 (GPT-2, SmolLM2, ViT), narrower in narrow models (Pythia-14M: 32) and wider in wide ones (Llama 3.2 3B:
128); about 64 of width for each layer, as in GPT-2, with at least 6 layers (Pythia-14M to 70M) or 12 (ViT-Ti to B); an
MLP of 4 times the width, or of 8/3 if it is gated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headwise.records.blueprint import BUILDABLE, Blueprint, Text
from headwise.records.cost import DTYPE_BYTES
from headwise.records.design import DTYPE, Request
from headwise.records.errors import InputError
from headwise.steps.design.drafts import Draft
from headwise.theory.tradeoff import HeadGroup

HEAD_DIMS = {3072: 128, 256: 64, 128: 32, 64: 16, 32: 8}  # from this width on
LEAST_LAYERS = {"llama": 6, "gpt2": 6, "vit": 12}
WIDTH_PER_LAYER = 64
DEEPEST = 4  # times the usual depth
DEPTH_COUNTS = 0.25  # depths of common models differ by that factor of 4 at one width, their MLPs hardly
STILL_USUAL = 1.0  # so much farther from the usual proportions a small KV cache may lead


def mlp_ratio(family: str) -> float:
    """The usual width of an MLP over that of the residual stream."""
    return 8 / 3 if BUILDABLE[family].gated else 4.0


def usual_draft(request: Request) -> Draft:
    """The shape within the budget whose MLP and depth are, as ratios, nearest to what is usual at its width."""
    ranked = sorted(_shapes(request))
    if not ranked:
        raise InputError(_too_few(request))
    limit, needs = request.kv_bytes_per_token, []
    for distance, width, layers in ranked:
        needs.append(DTYPE_BYTES[DTYPE] * 2 * _heads(width).head_dim * layers)
        if limit is None or needs[-1] <= limit:
            return Draft(width, (_heads(width),) * layers)
        if distance > ranked[0][0] + STILL_USUAL:
            break
    raise InputError(
        f"No usual {request.family} model of {request.parameters:,} parameters does with {limit:,} KV bytes per token; "
        f"the least is one key/value head in each layer, --kv-bytes-per-token {min(needs)}."
    )


def _heads(width: int) -> HeadGroup:
    head_dim = next(dim for start, dim in HEAD_DIMS.items() if width >= start)
    return HeadGroup(width // head_dim, head_dim)


def _shapes(request: Request) -> Iterator[tuple[float, int, int]]:
    """How far from usual, width and layers, for all widths and depths that leave an MLP as wide as the model."""
    least, width = LEAST_LAYERS[request.family], min(HEAD_DIMS)
    while True:
        (outside, block), (_, larger) = (_parameters(request, width, mlp) for mlp in (width, width + 1))
        most = (request.parameters - outside) // block
        if most < least:
            return
        usual = max(least, width / WIDTH_PER_LAYER)
        for layers in range(least, min(most, int(DEEPEST * usual)) + 1):
            mlp = width + ((request.parameters - outside) / layers - block) / (larger - block)
            wide, deep = mlp / (mlp_ratio(request.family) * width), layers / usual
            yield abs(math.log(wide)) + DEPTH_COUNTS * abs(math.log(deep)), width, layers
        width += _heads(width).head_dim


def _parameters(request: Request, width: int, mlp: int) -> tuple[int, int]:
    """Parameters outside the blocks and in one block."""
    heads, head_dim = _heads(width)
    shape = Blueprint(mlp, request.reads).shape(request.family, width, [(heads, heads, head_dim, head_dim)])
    return shape.outside_parameters, shape.total_parameters() - shape.outside_parameters


def _too_few(request: Request) -> str:
    reads, layers, width = request.reads, LEAST_LAYERS[request.family], min(HEAD_DIMS)
    outside, block = _parameters(request, width, width)
    ends = (
        f"a vocabulary of {reads.vocab:,} and a context of {reads.context:,}"
        if isinstance(reads, Text)
        else f"images of {reads.size} and {reads.labels:,} labels"
    )
    return (
        f"{request.parameters:,} parameters are too few for a {request.family} model with {ends}: the smallest, "
        f"{layers} layers of width {width}, has {outside + layers * block:,}."
    )
