"""Menus: for each part of each layer what it may become, from the options of all kinds of reduction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwise.planning.knapsack import Option, along_hulls, frontier
from headwise.records.change import Change
from headwise.records.profile import Profile
from headwise.records.shape import LayerShape

ATTENTION = "attention"  # the part that every layer has a menu for
BLOCK = "block"  # the part whose options are taken instead of those of all other parts
Part = tuple[int, str]  # the number of a layer and the name of what changes in it
MenuItem = tuple[Part, Option]
Menus = dict[Part, list[Option]]


@dataclass(frozen=True, slots=True)
class MenuRequest:
    """What options are asked for: a profile, the ``costs`` of a layer, a step for widths, layers to leave alone.

    ``costs`` count a layer with its block as it would be (None: dropped), one for each budget; only differences between
    the options of one menu matter. ``cache`` says how the KV cache may be rounded: "mixed", "latent", "whole", "int8",
    "int4" or "none", ``merge`` whether heads may be merged, ``absorb`` whether blocks of heads may cache latents.
    """

    profile: Profile
    costs: Sequence[Callable[[LayerShape | None], int]]
    multiple: int = 8
    protect: Collection[int] = ()
    cache: str = "none"
    merge: bool = False
    absorb: bool = False

    def layers(self) -> Iterator[tuple[int, LayerShape]]:
        """Numbers and shapes of the layers that may change: measured, and not protected."""
        for number, layer in enumerate(self.profile.shape.layers):
            if self.values(number) and number not in self.protect:
                yield number, layer

    def option(
        self,
        after: LayerShape | None,
        loss: float,
        changes: Callable[[], tuple[Change, ...]] = tuple,
        *behind: Callable[[], tuple[Change, ...]],
    ) -> Option:
        """The option of a layer to become ``after`` by ``changes``, at such a predicted loss increase.

        ``behind`` gives the changes of blocks behind that are joined to it.
        """
        cost, *also = (cost(after) for cost in self.costs)
        return Option(cost, loss, changes, tuple(also), behind)

    def saves(self, before: LayerShape | None, after: LayerShape | None) -> bool:
        """Whether ``after`` costs less than ``before`` of anything."""
        return any(cost(after) < cost(before) for cost in self.costs)

    def absorbs(self, number: int) -> bool:
        """Whether a layer may cache latents: that is asked for, nothing is rounded, and its positions were measured."""
        return self.absorb and self.cache == "none" and "positions_free" in self.values(number)

    def values(self, number: int) -> Mapping[str, Any]:
        """What was measured of a layer."""
        return self.profile.layers[number].values


def build_menus(request: MenuRequest, sources: Iterable[Callable[[MenuRequest], Iterable[MenuItem]]]) -> Menus:
    """The menus of all layers, each of which begins with the option to change nothing.

    Options of several ``sources`` for one part compete in one menu; of equals the one named first is taken. With one
    cost a menu is a `frontier`.
    """
    return worthwhile(request, every_option(request, sources))


def every_option(request: MenuRequest, sources: Iterable[Callable[[MenuRequest], Iterable[MenuItem]]]) -> Menus:
    """The menus of all layers with all options of all ``sources``, first the one to change nothing."""
    layers = request.profile.shape.layers
    menus: Menus = {(number, ATTENTION): [request.option(layer, 0.0)] for number, layer in enumerate(layers)}
    for source in sources:
        for part, option in source(request):
            if part not in menus:
                menus[part] = [request.option(layers[part[0]], 0.0)]
            menus[part].append(option)
    return menus


def worthwhile(request: MenuRequest, menus: Menus) -> Menus:
    """``menus`` in order, without options that save nothing, where there is but one thing to save.

    There whole blocks compete with all that could become of their parts together; elsewhere they are not offered.
    """
    if len(request.costs) > 1:
        return {part: menus[part] for part in sorted(menus) if part[1] != BLOCK}
    saving = {part: [option for option in menu if option.cost <= menu[0].cost] for part, menu in menus.items()}
    kept = {part: frontier(saving[part]) for part in sorted(menus)}
    for number, blocks in [(number, kept.pop((number, name))) for number, name in sorted(menus) if name == BLOCK]:
        together = _together([kept.pop(part) for part in list(kept) if part[0] == number])
        kept[number, ATTENTION] = frontier([*together, *blocks])
    return {part: kept[part] for part in sorted(kept)}


def _together(menus: Sequence[Sequence[Option]]) -> Iterator[Option]:
    """What the parts of a layer may become together, at least loss, first as they are."""
    full = menus[0][0].cost
    for options in along_hulls(menus):
        cost = sum(option.cost for option in options) - full * (len(options) - 1)
        yield Option(cost, sum(option.loss for option in options), partial(_all_changes, options))


def _all_changes(options: Sequence[Option]) -> tuple[Change, ...]:
    return tuple(change for option in options for change in option.changes())
