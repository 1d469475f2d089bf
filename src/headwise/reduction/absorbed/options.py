"""Which RoPE pairs and how wide a latent a block of key/value heads may cache, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.planning.sensitivity import most_felt
from headwise.records.change import Change, Pairs
from headwise.records.shape import LayerShape
from headwise.reduction.absorbed.change import Absorbed

COHERENT = 3.0  # what leaving coordinates out costs, of what it would if errors were independent: they are alike
Values = Mapping[str, Any]
Rows = Sequence[Sequence[float]]


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer that may have them caches of every width, with more and more pairs let go."""
    for number, layer in request.layers():
        values = request.values(number)
        for place, count in enumerate(values["positions_free"] if request.absorbs(number) else ()):
            for change, loss in _of_candidate(layer, values, place, count, request.multiple):
                yield (number, ATTENTION), request.option(change.shape(layer), loss, partial(_only, change))


def predicted_loss(layer: LayerShape, values: Values, change: Change) -> float:
    """The predicted loss increase of such a cache in a measured layer; 0 of pairs let go otherwise than measured."""
    if not isinstance(change, Absorbed):
        raise TypeError(f"{change} is no such cache.")
    free, half = len(change.free), layer.rotary // 2
    if free not in values.get("positions_free", ()) or change.free != tuple(range(half - free, half)):
        return 0.0
    place = values["positions_free"].index(free)
    lost = sum(sum(row[change.rank :]) for row in values["absorbed_latent_damage"][place])
    for row, pairs in zip(values["absorbed_pair_damage"], change.rope_pairs, strict=True):
        J = change.joined
        lost += sum(sum(row[J * pair + pairs.count(pair) : J * pair + J]) for pair in range(half - free))
    return values["positions_lost"][place] + COHERENT * lost


def _of_candidate(
    layer: LayerShape, values: Values, place: int, count: int, multiple: int
) -> Iterator[tuple[Absorbed, float]]:
    """Caches of every width in multiples of ``multiple``, what is felt least by the number left out first."""
    half, joined = layer.rotary // 2, layer.kv_heads // layer.value_groups
    pair_rows = [list(row)[: joined * (half - count)] for row in values["absorbed_pair_damage"]]
    free = tuple(range(half - count, half))
    latents = _added([row[: _rank(layer, joined, count)] for row in values["absorbed_latent_damage"][place]])
    pairs = _added([sorted(row, reverse=True) for row in pair_rows])
    lost = values["positions_lost"][place]
    pair_tails, latent_tails = (_tails(row) for row in (pairs, latents))
    taken = sorted([(loss / 2, 2) for loss in pairs] + [(loss, 1) for loss in latents], reverse=True)
    widths = list(accumulate(width for _, width in taken))
    seen: set[tuple[int, int]] = set()
    for reached, width in enumerate(widths, start=1):
        if width < len(seen) * multiple:  # one of about every width
            continue
        kept = sum(size == 2 for _, size in taken[:reached])  # noqa: PLR2004 - a pair
        rank = min(len(latents), max(multiple, round((reached - kept) / multiple) * multiple))
        kept = min(len(pairs), round(kept * 2 / multiple) * multiple // 2)
        keys = kept or count or layer.qk_dim > layer.rotary
        if keys and (kept, rank) not in seen:
            seen.add((kept, rank))
            named: Pairs = tuple(tuple(unit // joined for unit in most_felt(row, kept)) for row in pair_rows)
            yield Absorbed(joined, rank, named, free), lost + COHERENT * (pair_tails[kept] + latent_tails[rank])


def _rank(layer: LayerShape, joined: int, count: int) -> int:
    return joined * (2 * count + layer.qk_dim - layer.rotary + layer.v_dim)


def _added(rows: Rows) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _tails(row: Sequence[float]) -> list[float]:
    """What is left out of a row if its first n stay, for n from 0."""
    return [*accumulate(reversed(row), initial=0.0)][::-1]


def _only(change: Absorbed) -> tuple[Absorbed]:
    return (change,)
