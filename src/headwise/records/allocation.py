"""The auction that turns measured damage into widths: the cheapest cut per number saved goes first.

Damage curves are convex (the least felt units are cut first), so taking the best cut again and again solves the relaxed
knapsack. report.html does the same in the browser; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headwise.records.errors import InputError
from headwise.records.profile import Profile

Budget = Literal["kv", "parameters"]


@dataclass(frozen=True, slots=True)
class Lot:
    """One width that can be cut: of a layer its queries and keys ("qk") or its values ("v").

    ``damage[w]`` is the predicted loss at width ``w`` (None: not possible), ``price`` what one dimension costs.
    """

    layer: int
    kind: str
    damage: Sequence[float | None]
    price: float

    def widths(self, multiple: int) -> list[int]:
        """Widths on offer, widest first: the full one, then multiples of ``multiple``."""
        full = len(self.damage) - 1
        fitting = [w for w in range(multiple, full, multiple) if self.damage[w] is not None]
        return [full, *reversed(fitting)]


def allocate(lots: Sequence[Lot], budget: float, multiple: int = 8) -> list[int]:
    """A width for each lot, with prices adding up to ``budget`` at most and as little damage as the auction finds."""
    offers = [lot.widths(multiple) for lot in lots]
    chosen = [0] * len(lots)
    spent = sum(lot.price * widths[0] for lot, widths in zip(lots, offers, strict=True))
    least = sum(lot.price * widths[-1] for lot, widths in zip(lots, offers, strict=True))
    full = spent
    if least > budget * (1 + 1e-9):
        raise InputError(
            f"Keeping {budget / full:.1%} is not possible with widths in multiples of {multiple}; "
            f"the least is {least / full:.1%}."
        )
    while spent > budget * (1 + 1e-9):
        best, best_rate = -1, float("inf")
        for i, (lot, widths) in enumerate(zip(lots, offers, strict=True)):
            if chosen[i] + 1 < len(widths):
                now, after = widths[chosen[i]], widths[chosen[i] + 1]
                rate = (_at(lot, after) - _at(lot, now)) / (lot.price * (now - after))
                if rate < best_rate:
                    best, best_rate = i, rate
        now, after = offers[best][chosen[best]], offers[best][chosen[best] + 1]
        spent -= lots[best].price * (now - after)
        chosen[best] += 1
    return [widths[i] for widths, i in zip(offers, chosen, strict=True)]


def lots_of(profile: Profile, budget: Budget, context: int) -> list[Lot]:
    """What can be cut of a profiled model, latent attention apart. What cannot be is offered at its full width only.

    The price of a dimension is what it takes in the KV cache after ``context`` tokens, or in weights.
    """
    shape, lots = profile.shape, []
    for index, (layer, measured) in enumerate(zip(shape.layers, profile.layers, strict=True)):
        if not measured.values or layer.latent or (budget == "kv" and layer.cache == "none"):
            continue
        if budget == "kv":
            price = layer.kv_heads * layer.cached_tokens(context, shape.source_tokens) / context
        else:
            price = float(layer.heads + layer.kv_heads)
        queries = measured.values["qk_damage"]
        if layer.norm == "affine":
            queries = [None] * layer.qk_dim + [0.0]
        lots += [Lot(index, "qk", queries, price), Lot(index, "v", measured.values["v_damage"], price)]
    return lots


def default_budget(profile: Profile) -> Budget:
    """What there is to save: the KV cache, or the weights of models without one."""
    return "kv" if any(layer.cached_per_token for layer in profile.shape.layers) else "parameters"


def _at(lot: Lot, width: int) -> float:
    damage = lot.damage[width]
    return float("inf") if damage is None else damage
