"""One option of each menu where several costs are limited at once: all but the first get a price, in nats of loss.

At the right prices (Lagrange multipliers) the cheapest choice within the first limit keeps to the others too. They are
found by bisection, and what is left of the limits then buys upgrades.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from headwise.planning.knapsack import LEAST_GAIN, Option, choose, frontier

Menus = Sequence[Sequence[Option]]
HALVINGS = 24
SWEEPS = 3  # over all prices, where there are several
RISES, RISE, FIRST = 200, 1.1, 1e-2  # of prices that one for another cost has undone
CHEAPEST, DEAREST = 1e-6, 1e6  # prices of a whole limit, in units of all that could be lost


def choose_within(menus: Menus, limits: Sequence[int]) -> list[Option] | None:
    """Options that cost at most ``limits`` together, with as little loss as can be found so; None where none are."""
    if any(sum(min(_costs(option)[k] for option in menu) for menu in menus) > limit for k, limit in enumerate(limits)):
        return None
    prices = [0.0] * (len(limits) - 1)
    chosen = _cheapest(menus, limits[0], prices)
    most = sum(max(option.loss for option in menu) for menu in menus) or 1.0
    for _ in range(SWEEPS if len(prices) > 1 else 1):
        for place, limit in enumerate(limits[1:]):
            unit = most / max(1, abs(limit))
            prices[place] = 0.0
            chosen = _cheapest(menus, limits[0], prices)
            if _spent(chosen, place) <= limit:
                continue
            low, high = CHEAPEST, DEAREST
            for _ in range(HALVINGS):
                middle = (low * high) ** 0.5
                prices[place] = middle * unit
                fits = _spent(_cheapest(menus, limits[0], prices), place) <= limit
                low, high = (low, middle) if fits else (middle, high)
            prices[place] = high * unit
            chosen = _cheapest(menus, limits[0], prices)
    for _ in range(RISES):
        over = [place for place, limit in enumerate(limits[1:]) if _spent(chosen, place) > limit]
        if not over:
            return _upgraded(menus, chosen, limits)
        for place in over:
            prices[place] = max(RISE * prices[place], FIRST * most / max(1, abs(limits[1 + place])))
        chosen = _cheapest(menus, limits[0], prices)
    return None


def _cheapest(menus: Menus, limit: int, prices: Sequence[float]) -> list[Option]:
    """The choice within the first ``limit`` that costs least loss, other costs at their ``prices``."""
    original: dict[int, Option] = {}
    priced = []
    for menu in menus:
        each = [replace(option, loss=option.loss + _worth(option, prices)) for option in menu]
        original |= {id(new): option for new, option in zip(each, menu, strict=True)}
        priced.append(each)
    return [original[id(option)] for option in choose([frontier(menu) for menu in priced], limit)]


def _worth(option: Option, prices: Iterable[float]) -> float:
    return sum(cost * price for cost, price in zip(option.also, prices, strict=True))


def _spent(chosen: Iterable[Option], place: int) -> int:
    return sum(option.also[place] for option in chosen)


def _upgraded(menus: Menus, chosen: list[Option], limits: Sequence[int]) -> list[Option]:
    """``chosen`` with what is left of the ``limits`` spent where it saves most loss, one option after the other."""
    left = [limit - sum(_costs(option)[place] for option in chosen) for place, limit in enumerate(limits)]
    while True:
        best, taken = -LEAST_GAIN, None
        for number, menu in enumerate(menus):
            now = chosen[number]
            for option in menu:
                if option.loss - now.loss < best and all(more <= room for more, room in zip(_more(option, now), left)):
                    best, taken = option.loss - now.loss, (number, option)
        if taken is None:
            return chosen
        number, option = taken
        left = [room - more for more, room in zip(_more(option, chosen[number]), left, strict=True)]
        chosen[number] = option


def _more(option: Option, now: Option) -> list[int]:
    return [after - before for after, before in zip(_costs(option), _costs(now), strict=True)]


def _costs(option: Option) -> tuple[int, ...]:
    return option.cost, *option.also
