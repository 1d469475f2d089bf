"""Which blocks go, and which become one with the next: the least loss at a limited depth, by dynamic programming.

A block is in one span only, so neighbours have to be decided together: going along the depth, the best way to leave so
many of the blocks so far is all that the blocks behind must know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from headwise.files.errors import InputError
from headwise.planning.knapsack import Option
from headwise.planning.menus import ATTENTION, MenuRequest, Menus
from headwise.records.change import Change
from headwise.records.plan import Changes, changed, runs
from headwise.records.shape import LayerShape


@dataclass(frozen=True, slots=True)
class Span:
    """What ``blocks`` neighbours from ``first`` on may become: so many ``left`` of them, at a predicted loss increase.

    ``changes`` are those of each of them.
    """

    first: int
    blocks: int
    left: int
    loss: float
    changes: tuple[Changes, ...]


def shallowest(spans: Iterable[Span], blocks: int, limit: int) -> list[Span] | None:
    """Spans that take up all ``blocks`` once and leave ``limit`` at most, at the least loss; None: impossible."""
    starting: dict[int, list[Span]] = {}
    for span in spans:
        starting.setdefault(span.first, []).append(span)
    best: list[dict[int, tuple[float, list[Span]]]] = [{} for _ in range(blocks + 1)]
    best[0][0] = 0.0, []
    for place in range(blocks):
        for left, (loss, chosen) in best[place].items():
            for span in starting.get(place, ()):
                end, more = place + span.blocks, left + span.left
                if end > blocks or more > limit:
                    continue
                total = loss + span.loss
                if more not in best[end] or total < best[end][more][0]:
                    best[end][more] = total, [*chosen, span]
    return min(best[blocks].values(), key=lambda each: each[0])[1] if best[blocks] else None


def fewest(spans: Iterable[Span], blocks: int) -> int:
    """The least number of blocks that ``spans`` can leave."""
    every = list(spans)
    return next(limit for limit in range(blocks + 1) if shallowest(every, blocks, limit) is not None)


def shallower(request: MenuRequest, menus: Menus, decided: Sequence[Changes]) -> Menus:
    """``menus`` of the model whose depth is ``decided``: none of blocks that go, and of joined ones what fits together.

    Each of those still has its own changes; what all of them cost together is what counts.
    """
    layers, left = request.profile.shape.layers, dict(menus)
    for run in runs(decided):
        if changed(layers[run[0]], decided[run[0]]) is None:
            left = {part: menu for part, menu in left.items() if part[0] != run[0]}
        joining = next((change for change in decided[run[0]] if change.following()), None)
        if joining is not None:
            parts = [part for part in left if part[0] in run]
            own = {part: left.pop(part) for part in parts}
            left |= _joined(request, own, run, joining)
    return left


def _joined(request: MenuRequest, menus: Menus, run: Sequence[int], joining: Change) -> Menus:
    layers = [request.profile.shape.layers[number] for number in run]

    def option(halves: Sequence[LayerShape], chosen: Sequence[Option]) -> Option | None:
        try:
            shape = joining.join(halves, "")
        except InputError:
            return None
        changes = [each.changes for each in chosen]
        return request.option(shape, sum(each.loss for each in chosen), changes[0], *changes[1:])

    result: Menus = {}
    for (number, name), menu in menus.items():
        if name == ATTENTION:
            continue
        place, options = run.index(number), []
        for each in menu:
            after = changed(layers[place], each.changes())
            halves = [after if n == place else layer for n, layer in enumerate(layers) if after is not None]
            if halves and (one := option(halves, [each])) is not None:
                options.append(one)
        result[number, name] = options
    attention = [_by_widths(layer, menus[number, ATTENTION]) for number, layer in zip(run, layers, strict=True)]
    options = []
    every = dict.fromkeys(key for each in attention for key in each)
    for widths in sorted(every, key=lambda key: key is None):  # the first option changes nothing, as in all menus
        fitting = [each.get(widths, []) + (each.get(None, []) if widths is not None else []) for each in attention]
        for chosen in product(*fitting):
            if widths is None or any(after.heads for after, _ in chosen):
                options.append(option([after for after, _ in chosen], [each for _, each in chosen]))
    result[run[0], ATTENTION] = [each for each in options if each is not None]
    return result


def _by_widths(
    layer: LayerShape, menu: Iterable[Option]
) -> dict[tuple[int, ...] | None, list[tuple[LayerShape, Option]]]:
    """Options of an attention with what they make of it, by what has to be alike in joined blocks; None: no heads."""
    sorted_out: dict[tuple[int, ...] | None, list[tuple[LayerShape, Option]]] = {}
    for each in menu:
        after = changed(layer, each.changes())
        if after is None:
            continue
        alike = (after.qk_dim, after.v_dim, after.rotary, after.heads // after.kv_heads) if after.heads else None
        sorted_out.setdefault(alike, []).append((after, each))
    return sorted_out
