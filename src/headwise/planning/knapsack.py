"""The auction: of all that every layer may keep, each at a price and a predicted damage, one option per layer is taken.

A multiple-choice knapsack. Going down the lower convex hulls of all layers, the least damage per price saved first, is
its linear relaxation, solved exactly; the last step overshoots. What it leaves of the budget buys upgrades, where need
be paid for by a downgrade elsewhere, until none helps. The result is feasible, and above the best one by less than the
damage of the last step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwise.files.errors import InputError

LEAST_GAIN = 1e-12  # below it, rounding could exchange the same two options for ever


@dataclass(frozen=True, slots=True)
class Option:
    """What a layer may keep (0 key/value heads: no attention), what that costs and what it is predicted to damage."""

    kv_heads: int
    qk_dim: int
    v_dim: int
    price: int
    damage: float


@dataclass(frozen=True, slots=True)
class _Move:
    """A layer's change to another option: the price and the damage it adds, either of which may be negative."""

    layer: int
    option: Option
    price: int
    damage: float


def frontier(options: Iterable[Option]) -> list[Option]:
    """Of ``options`` those that no cheaper one matches, dearest first; of equals the one named first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.price, option.damage)):
        if not kept or (option.price > kept[-1].price and option.damage <= kept[-1].damage):
            kept.append(option)
    return kept[::-1]


def least(offers: Sequence[Sequence[Option]]) -> int:
    """The least that one option of every layer costs."""
    return sum(options[-1].price for options in offers)


def choose(offers: Sequence[Sequence[Option]], limit: int) -> list[Option]:
    """One option of each layer's `frontier`, for ``limit`` at most, with as little damage as the auction finds."""
    if least(offers) > limit:
        raise InputError(f"The least that can be kept costs {least(offers)}, which is more than {limit}.")
    hulls = [_hull(options) for options in offers]
    spent = sum(hull[0].price for hull in hulls)
    heap = [(_rate(hull, 0), layer, 0) for layer, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(heap)
    chosen = [hull[0] for hull in hulls]
    while spent > limit:
        _, layer, place = heapq.heappop(heap)
        hull = hulls[layer]
        chosen[layer] = hull[place + 1]
        spent -= hull[place].price - hull[place + 1].price
        if place + 2 < len(hull):
            heapq.heappush(heap, (_rate(hull, place + 1), layer, place + 1))
    return _improved(offers, chosen, limit - spent)


def _improved(offers: Sequence[Sequence[Option]], chosen: list[Option], left: int) -> list[Option]:
    """``chosen`` after all moves that help. The sum falls with each, so that no choice comes twice and this ends."""
    while moves := _best_moves(offers, chosen, left):
        better = list(chosen)
        for move in moves:
            better[move.layer] = move.option
            left -= move.price
        if not _total(better) < _total(chosen):  # differences of large numbers, or none at all, may promise otherwise
            break
        chosen = better
    return chosen


def _total(chosen: Iterable[Option]) -> float:
    return sum(option.damage for option in chosen)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull of a frontier: every step down costs more damage per price saved than the one before."""
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and _rate((*hull[-2:], option), 0) >= _rate((*hull[-2:], option), 1):
            hull.pop()
        hull.append(option)
    return hull


def _rate(hull: Sequence[Option], place: int) -> float:
    now, after = hull[place], hull[place + 1]
    return (after.damage - now.damage) / (now.price - after.price)


def _best_moves(offers: Sequence[Sequence[Option]], chosen: list[Option], left: int) -> list[_Move]:
    """The upgrade that helps most, with the downgrade of another layer that pays what is not ``left``; none: []."""
    moves = [
        _Move(layer, option, option.price - now.price, option.damage - now.damage)
        for layer, (options, now) in enumerate(zip(offers, chosen, strict=True))
        for option in options
    ]
    downs = sorted((move for move in moves if move.price < 0), key=lambda move: move.price)
    best_pairs = list(_best_pairs(downs))
    prices = [move.price for move in downs]
    most, best = LEAST_GAIN, []
    for up in moves:
        if not up.damage < -most:
            continue
        if up.price <= left:
            most, best = -up.damage, [up]
            continue
        found = best_pairs[place - 1] if (place := bisect_right(prices, left - up.price)) else ()
        down = next((down for down in found if down.layer != up.layer), None)
        if down is not None and -(up.damage + down.damage) > most:
            most, best = -(up.damage + down.damage), [up, down]
    return best


def _best_pairs(downs: Iterable[_Move]) -> Iterable[tuple[_Move, ...]]:
    """After each of ``downs``, the least damaging one so far and the least damaging one of another layer."""
    best: tuple[_Move, ...] = ()
    for down in downs:
        by_damage = sorted((*best, down), key=lambda move: move.damage)
        second = (move for move in by_damage[1:] if move.layer != by_damage[0].layer)
        best = (by_damage[0], *list(second)[:1])
        yield best
