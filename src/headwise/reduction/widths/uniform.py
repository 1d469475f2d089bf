"""One head width and one set of RoPE pairs for a whole model: what stock formats can say."""

from __future__ import annotations

from collections.abc import Iterator

from headwise.files.errors import InputError
from headwise.planning.sensitivity import best_split, cut_curve, most_felt
from headwise.records.plan import Changes
from headwise.records.profile import Profile
from headwise.reduction.widths.change import Widths
from headwise.reduction.widths.options import widths_of


def uniform_layers(profile: Profile, multiple: int) -> Iterator[tuple[Changes, ...]]:
    """Changes of all layers to one width for queries, keys and values, widest first; all heads stay.

    The RoPE pairs that stay are those felt most in all layers and heads together.
    """
    shape = profile.shape
    shapes = {(*layer.dims, layer.rotary, layer.cache) for layer in shape.layers}
    first = shape.layers[0]
    if len(shapes) > 1 or first.latent or first.norm == "affine" or not all(layer.values for layer in profile.layers):
        raise InputError(
            "A uniform plan needs layers of one shape whose queries and keys can be cut; leave out `uniform`."
        )
    units = [row for layer in profile.layers for row in layer.values["qk_unit_damage"]]
    half = first.rotary // 2
    together = [sum(row[pair] for row in units) for pair in range(half)]
    pairs, free = cut_curve([together]), cut_curve([row[half:] for row in units])
    if first.qk_dim == first.v_dim:
        yield ((),) * len(shape.layers)
    for width in widths_of(min(first.qk_dim, first.v_dim), multiple):
        split = best_split(pairs, free, width)
        if split is None or width == first.qk_dim == first.v_dim:
            continue
        kept = (most_felt(together, split[1]),) * first.kv_heads if first.rotary and width < first.qk_dim else None
        yield ((Widths(first.heads, first.kv_heads, width, width, kept),),) * len(shape.layers)
