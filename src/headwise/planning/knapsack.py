"""One option of each menu, for a limited cost in all, at the least predicted loss: a multiple-choice knapsack.

Going down the lower convex hulls of all menus, the least loss per cost saved first, is its linear relaxation, solved
exactly; the last step overshoots. What it leaves of the budget buys upgrades, where need be paid for by a downgrade
elsewhere, until none helps. The result is feasible, and above the best one by less than the loss of the last step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headwise.files.errors import InputError
from headwise.records.change import Change

LEAST_GAIN = 1e-12  # below it, rounding could exchange the same two options for ever


@dataclass(frozen=True, slots=True)
class Option:
    """What a part of a layer may become: what that costs and the loss increase it is predicted to bring.

    ``changes`` gives the changes it stands for, and is asked only of options that are taken; ``behind`` those of blocks
    behind that are joined to that of the layer. ``also`` are costs that are limited at the same time as ``cost``.
    """

    cost: int
    loss: float
    changes: Callable[[], tuple[Change, ...]] = tuple
    also: tuple[int, ...] = ()
    behind: tuple[Callable[[], tuple[Change, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class _Move:
    """Taking another option of a menu: the cost and the loss it adds, either of which may be negative."""

    menu: int
    option: Option
    cost: int
    loss: float


def frontier(options: Iterable[Option]) -> list[Option]:
    """Of ``options`` those that no cheaper one matches, dearest first; of equals the one named first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.cost, option.loss)):
        if not kept or (option.cost > kept[-1].cost and option.loss <= kept[-1].loss):
            kept.append(option)
    return kept[::-1]


def least(menus: Sequence[Sequence[Option]]) -> int:
    """The least that one option of every menu costs."""
    return sum(options[-1].cost for options in menus)


def choose(menus: Sequence[Sequence[Option]], limit: int) -> list[Option]:
    """One option of each menu (a `frontier`), for ``limit`` at most, with as little loss as can be found so."""
    if least(menus) > limit:
        raise InputError(f"The least that can be kept costs {least(menus)}, which is more than {limit}.")
    hulls = [lower_hull(options) for options in menus]
    spent = sum(hull[0].cost for hull in hulls)
    heap = [(step_rate(hull, 0), menu, 0) for menu, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(heap)
    chosen = [hull[0] for hull in hulls]
    while spent > limit:
        _, menu, place = heapq.heappop(heap)
        hull = hulls[menu]
        chosen[menu] = hull[place + 1]
        spent -= hull[place].cost - hull[place + 1].cost
        if place + 2 < len(hull):
            heapq.heappush(heap, (step_rate(hull, place + 1), menu, place + 1))
    return _improved(menus, chosen, limit - spent)


def _improved(menus: Sequence[Sequence[Option]], chosen: list[Option], left: int) -> list[Option]:
    """``chosen`` after all moves that help. The sum falls with each, so that no choice comes twice and this ends."""
    while moves := _best_moves(menus, chosen, left):
        better = list(chosen)
        for move in moves:
            better[move.menu] = move.option
            left -= move.cost
        if not _total(better) < _total(chosen):  # differences of large numbers, or none at all, may promise otherwise
            break
        chosen = better
    return chosen


def _total(chosen: Iterable[Option]) -> float:
    return sum(option.loss for option in chosen)


def lower_hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull of a frontier: every step down costs more loss per cost saved than the one before."""
    lowest: list[Option] = []
    for option in options:
        while len(lowest) > 1 and step_rate((*lowest[-2:], option), 0) >= step_rate((*lowest[-2:], option), 1):
            lowest.pop()
        lowest.append(option)
    return lowest


def step_rate(options: Sequence[Option], place: int) -> float:
    """The loss that the step from one of ``options`` to the next adds, per cost it saves."""
    now, after = options[place], options[place + 1]
    return (after.loss - now.loss) / (now.cost - after.cost)


def along_hulls(menus: Sequence[Sequence[Option]]) -> Iterator[list[Option]]:
    """One option of each menu (a `frontier`), as they are first and then down all hulls, the least loss per cost saved
    first: what costs least loss together.
    """
    hulls = [lower_hull(options) for options in menus]
    steps = sorted(
        (step_rate(hull, place), number, place) for number, hull in enumerate(hulls) for place in range(len(hull) - 1)
    )
    taken = [hull[0] for hull in hulls]
    yield list(taken)
    for _, number, place in steps:
        taken[number] = hulls[number][place + 1]
        yield list(taken)


def _best_moves(menus: Sequence[Sequence[Option]], chosen: list[Option], left: int) -> list[_Move]:
    """The upgrade that helps most, with the downgrade in another menu that pays what is not ``left``; none: []."""
    moves = [
        _Move(menu, option, option.cost - now.cost, option.loss - now.loss)
        for menu, (options, now) in enumerate(zip(menus, chosen, strict=True))
        for option in options
    ]
    downs = sorted((move for move in moves if move.cost < 0), key=lambda move: move.cost)
    best_pairs = list(_best_pairs(downs))
    costs = [move.cost for move in downs]
    most, best = LEAST_GAIN, []
    for up in moves:
        if not up.loss < -most:
            continue
        if up.cost <= left:
            most, best = -up.loss, [up]
            continue
        candidates = best_pairs[place - 1] if (place := bisect_right(costs, left - up.cost)) else ()
        down = next((down for down in candidates if down.menu != up.menu), None)
        if down is not None and -(up.loss + down.loss) > most:
            most, best = -(up.loss + down.loss), [up, down]
    return best


def _best_pairs(downs: Iterable[_Move]) -> Iterable[tuple[_Move, ...]]:
    """After each of ``downs``, the one of least loss so far and the one of least loss in another menu."""
    best: tuple[_Move, ...] = ()
    for down in downs:
        by_loss = sorted((*best, down), key=lambda move: move.loss)
        second = (move for move in by_loss[1:] if move.menu != by_loss[0].menu)
        best = (by_loss[0], *list(second)[:1])
        yield best
