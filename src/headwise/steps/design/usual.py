"""The shapes that people choose at a size: the textbook's, and the deep and thin one of small language models.

Textbook: heads of 64 (GPT-2, SmolLM2, ViT), narrower in narrow models (Pythia-14M: 32) and wider in wide ones (Llama
3.2 3B: 128); about 64 of width for each layer, as in GPT-2, with at least 6 layers (Pythia-14M to 70M) or 12 (ViT-Ti to
B); an MLP of 4 times the width, or of 8/3 if it is gated.

Deep and thin: the same, but about 20 of width for each layer and at least twice those layers, keys and values shared
where there is a cache (MobileLLM-125M and SmolLM2-135M: 30 layers of width 576, 9 heads on 3 for keys and values).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headwise.files.errors import InputError
from headwise.records.blueprint import BUILDABLE, Blueprint, Text
from headwise.records.cost import DTYPE_BYTES
from headwise.records.design import DTYPE, Request
from headwise.steps.design.drafts import Draft
from headwise.theory.tradeoff import HeadGroup

HEAD_DIMS = {3072: 128, 256: 64, 128: 32, 64: 16, 32: 8}  # from this width on
ALLOWED, NARROW = (32, 64, 128), 256  # head widths that kernels are made for; narrower models cannot hold them
GROUPS = (3, 2)  # query heads for a key/value head: SmolLM2's, else Qwen3's
LEAST_LAYERS = {"llama": 6, "gpt2": 6, "vit": 12}
DEEPEST = 4  # times the usual depth
DEPTH_COUNTS = 0.25  # depths of common models differ by that factor of 4 at one width, their MLPs hardly
STILL_USUAL = 1.0  # so much farther from the usual proportions a small KV cache may lead


@dataclass(frozen=True, slots=True)
class Manner:
    """How models of one kind divide their parameters."""

    width_per_layer: int
    least_layers: int  # times those of the family
    shares: bool


TEXTBOOK = Manner(width_per_layer=64, least_layers=1, shares=False)
DEEP_THIN = Manner(width_per_layer=20, least_layers=2, shares=True)


def mlp_ratio(family: str) -> float:
    """The usual width of an MLP over that of the residual stream."""
    return 8 / 3 if BUILDABLE[family].gated else 4.0


def head_dims(width: int) -> tuple[int, ...]:
    """Widths of heads to choose from: 32, 64 and 128, in models narrower than 256 half, once and twice the usual."""
    usual = _head_dim(width)
    return ALLOWED if width >= NARROW else (usual // 2, usual, 2 * usual)


def grouped(heads: int) -> tuple[int, int]:
    """So many heads, one more where they cannot be shared out, and how many of them share a key/value head."""
    return next((count, group) for count in (heads, heads + 1) for group in GROUPS if count % group == 0)


def usual_draft(request: Request) -> Draft:
    """The shape within the budget whose MLP and depth are, as ratios, nearest to what is usual at its width."""
    ranked = sorted(_shapes(request, TEXTBOOK))
    if not ranked:
        raise InputError(_too_few(request, TEXTBOOK))
    limit, needs = request.kv_bytes_per_token, []
    for distance, width, layers in ranked:
        needs.append(DTYPE_BYTES[DTYPE] * 2 * _head_dim(width) * layers)
        if limit is None or needs[-1] <= limit:
            return _draft(request, TEXTBOOK, width, layers)
        if distance > ranked[0][0] + STILL_USUAL:
            break
    raise InputError(
        f"No usual {request.family} model of {request.parameters:,} parameters does with {limit:,} KV bytes per token; "
        f"the least is one key/value head in each layer, `kv_bytes_per_token` {min(needs)}."
    )


def deep_thin_draft(request: Request) -> Draft:
    """The same for deep and thin models."""
    ranked = sorted(_shapes(request, DEEP_THIN))
    if not ranked:
        raise InputError(_too_few(request, DEEP_THIN))
    _, width, layers = ranked[0]
    return _draft(request, DEEP_THIN, width, layers)


def _head_dim(width: int) -> int:
    return next(dim for start, dim in HEAD_DIMS.items() if width >= start)


def _draft(request: Request, manner: Manner, width: int, layers: int) -> Draft:
    head_dim = _head_dim(width)
    heads, sharing = width // head_dim, 1
    if manner.shares and BUILDABLE[request.family].reads is Text:
        heads, sharing = grouped(heads)
    return Draft(width, (HeadGroup(heads, head_dim),) * layers, sharing)


def _shapes(request: Request, manner: Manner) -> Iterator[tuple[float, int, int]]:
    """How far from usual, width and layers, for all widths and depths that leave an MLP as wide as the model."""
    least, width = LEAST_LAYERS[request.family] * manner.least_layers, min(HEAD_DIMS)
    while True:
        (outside, block), (_, larger) = (_parameters(request, manner, width, mlp) for mlp in (width, width + 1))
        most = (request.parameters - outside) // block
        if most < least:
            return
        usual = max(least, width / manner.width_per_layer)
        for layers in range(least, min(most, int(DEEPEST * usual)) + 1):
            mlp = width + ((request.parameters - outside) / layers - block) / (larger - block)
            wide, deep = mlp / (mlp_ratio(request.family) * width), layers / usual
            yield abs(math.log(wide)) + DEPTH_COUNTS * abs(math.log(deep)), width, layers
        width += _head_dim(width)


def _parameters(request: Request, manner: Manner, width: int, mlp: int) -> tuple[int, int]:
    """Parameters outside the blocks and in one block."""
    draft = _draft(request, manner, width, 1)
    ((heads, head_dim),) = draft.layers
    dims = (heads, heads // draft.sharing, head_dim, head_dim)
    shape = Blueprint(mlp, request.reads).shape(request.family, width, [dims])
    return shape.outside_parameters, shape.total_parameters() - shape.outside_parameters


def _too_few(request: Request, manner: Manner) -> str:
    reads, layers, width = request.reads, LEAST_LAYERS[request.family] * manner.least_layers, min(HEAD_DIMS)
    outside, block = _parameters(request, manner, width, width)
    ends = (
        f"a vocabulary of {reads.vocab:,} and a context of {reads.context:,}"
        if isinstance(reads, Text)
        else f"images of {reads.size} and {reads.labels:,} labels"
    )
    return (
        f"{request.parameters:,} parameters are too few for a {request.family} model with {ends}: the smallest, "
        f"{layers} layers of width {width}, has {outside + layers * block:,}."
    )
