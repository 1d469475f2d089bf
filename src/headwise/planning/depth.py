"""Which blocks go, and which become one with the next: the least loss at a limited depth, by dynamic programming.

A block is in one span only, so neighbours have to be decided together: going along the depth, the best way to leave so
many of the blocks so far is all that the blocks behind must know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from headwise.files.errors import InputError
from headwise.planning.knapsack import Option, along_hulls, frontier
from headwise.planning.menus import ATTENTION, BLOCK, MenuRequest, Menus
from headwise.records.change import Change
from headwise.records.plan import Changes, changed, runs
from headwise.records.shape import LayerShape

ROUNDED = -1  # among what has to be alike: a cache of rounded numbers


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
    """Menus of blocks that become one: all parts but the attention keep their own, at what they cost in the whole."""
    layers = [request.profile.shape.layers[number] for number in run]
    whole = [_Choice(layer, (), Option(0, 0.0)) for layer in layers]

    def option(halves: Sequence[_Choice], loss: float, *changes: Callable[[], tuple[Change, ...]]) -> Option | None:
        try:
            shape = joining.join([half.layer for half in halves], [half.changes for half in halves], "")
        except InputError:
            return None
        return request.option(shape, loss, *changes)

    result: Menus = {}
    for (number, name), menu in menus.items():
        if name in (ATTENTION, BLOCK):  # a half cannot go alone
            continue
        place = run.index(number)
        options = [
            option([*whole[:place], choice, *whole[place + 1 :]], choice.option.loss, choice.option.changes)
            for choice in _choices(layers[place], menu)
        ]
        result[number, name] = [each for each in options if each is not None]
    attention = [_by_widths(_choices(layer, menus[n, ATTENTION])) for n, layer in zip(run, layers, strict=True)]
    options = [
        option(halves, sum(half.option.loss for half in halves), *(half.option.changes for half in halves))
        for halves in _fitting(attention)
    ]
    result[run[0], ATTENTION] = [each for each in options if each is not None]
    return result


class _Choice(NamedTuple):
    """An option of one of the blocks, the changes it stands for and what they make of the block."""

    layer: LayerShape
    changes: tuple[Change, ...]
    option: Option


def _choices(layer: LayerShape, menu: Iterable[Option]) -> Iterator[_Choice]:
    for option in menu:
        changes = option.changes()
        after = changed(layer, changes)
        if after is not None:
            yield _Choice(after, changes, option)


Alike = tuple[int, ...] | None


def _by_widths(choices: Iterable[_Choice]) -> dict[Alike, list[_Choice]]:
    """Choices for an attention by what has to be alike in joined blocks; None: no heads."""
    by_widths: dict[Alike, list[_Choice]] = {}
    for choice in choices:
        layer = choice.layer
        alike = (layer.qk_dim, layer.v_dim, layer.rotary, layer.heads // layer.kv_heads) if layer.heads else None
        if alike is not None and layer.packed is not None:
            alike = (*alike, ROUNDED)
        by_widths.setdefault(alike, []).append(choice)
    return by_widths


def _fitting(blocks: Sequence[dict[Alike, list[_Choice]]]) -> Iterator[Sequence[_Choice]]:
    """Choices for all blocks that fit together, first the one that changes nothing, as in all menus."""
    every = dict.fromkeys(alike for block in blocks for alike in block)
    for alike in sorted(every, key=lambda alike: alike is None):
        own = [block.get(alike, []) for block in blocks]
        without = [[] if alike is None else block.get(None, []) for block in blocks]
        if alike is not None and alike[-1] == ROUNDED:
            yield from _along_hulls([[*one, *none] for one, none in zip(own, without, strict=True)])
            continue
        for halves in product(*([*one, *none] for one, none in zip(own, without, strict=True))):
            if alike is None or any(half.layer.heads for half in halves):
                yield halves


def _along_hulls(menus: Sequence[Sequence[_Choice]]) -> Iterator[Sequence[_Choice]]:
    """Of many choices those that cost least loss together: down all hulls, the least loss per cost saved first."""
    if not all(menus):
        return
    chosen_of = {id(choice.option): choice for menu in menus for choice in menu}
    for options in along_hulls([frontier(choice.option for choice in menu) for menu in menus]):
        yield [chosen_of[id(option)] for option in options]
