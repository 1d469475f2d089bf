"""Merged heads of one width and with one list of RoPE frequencies for a whole model: what stock formats can say."""

from __future__ import annotations

from collections.abc import Iterator

from headwise.planning.sensitivity import most_felt
from headwise.records.plan import Changes
from headwise.records.profile import Profile
from headwise.reduction.sharing.change import Sharing
from headwise.reduction.sharing.options import units_of
from headwise.reduction.widths.options import widths_of


def uniform_merges(profile: Profile, multiple: int) -> Iterator[tuple[Changes, ...]]:
    """Changes of all layers to one number of merged heads of one width for queries, keys and values.

    None where layers differ, or have coordinates that do not turn. Of each frequency a merged head keeps what it feels
    most; how much of it is decided for all layers and heads together.
    """
    shape, first = profile.shape, profile.shape.layers[0]
    alike = len({(*layer.dims, layer.rotary, layer.joinable) for layer in shape.layers}) == 1
    if not alike or not first.qk_dim == first.v_dim == first.rotary:
        return
    if any("shared_k_damage" not in layer.values for layer in profile.layers):
        return
    for joined in first.joinable:
        together = [0.0] * (joined * first.rotary // 2)
        for layer in profile.layers:
            for row in units_of(first, layer.values, joined).pairs:
                for start in range(0, len(row), joined):
                    for place, loss in enumerate(sorted(row[start : start + joined], reverse=True), start):
                        together[place] += loss
        for width in widths_of(joined * first.qk_dim, multiple):
            if not width % 2:
                named = (tuple(unit // joined for unit in most_felt(together, width // 2)),) * (
                    first.kv_heads // joined
                )
                yield ((Sharing(joined, width, width, named),),) * len(shape.layers)
