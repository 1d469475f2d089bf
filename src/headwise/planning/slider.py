"""What the page's slider moves over: the best choices at a grid of shares, computed beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.planning.expectation import checks_of, expected
from headwise.planning.knapsack import Option, choose, least
from headwise.planning.menus import Menus
from headwise.records.budget import Budget, natural_budget
from headwise.records.plan import changed, describe, in_order
from headwise.records.profile import Profile

FIRST, ROUNDED_FIRST, STEP = 8, 3, 40  # the least and the most that is kept, in fortieths; less of a rounded cache
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
DIGITS = 4
BF16 = 2  # bytes of a number


def slider_tables(profile: Profile, menus_for: Callable[[Budget, str], Menus]) -> dict[str, Any]:
    """For each context the choices at every feasible share, widest last; one table where all contexts agree.

    ``menus_for`` takes how the cache may be rounded: ``tables`` are of choices that leave its numbers whole,
    ``rounded`` of those that give each coordinate its bits, where the profile knows them. No tables where nothing can
    be cut. A choice lists for each layer its key/value heads, qk_dim, v_dim, bytes in the cache of one token, which of
    the ``phrases`` says what changed, and bytes that the cache takes once, and once for each sequence.
    """
    shape, kind = profile.shape, natural_budget(profile.shape)
    most = max(1, shape.max_tokens)
    contexts = [tokens for tokens in CONTEXTS if tokens <= most] or [most]
    alike = kind != "keep_kv" or all(layer.cache == "tokens" and layer.window is None for layer in shape.layers)
    rows = _Rows(profile)

    def tables(cache: str) -> list[list[dict[str, Any]]]:
        chosen = [
            _table(profile, Budget(kind, 1.0, context), menus_for, cache, rows)
            for context in (contexts[-1:] if alike else contexts)
        ]
        return chosen if all(chosen) else []

    packable = kind == "keep_kv" and any("k_bit_damage" in layer.values for layer in profile.layers)
    return {
        "kind": kind,
        "contexts": contexts,
        "tables": tables("none"),
        "rounded": tables("mixed") if packable else [],
        "phrases": list(rows.phrases),
    }


class _Rows:
    """What the page shows of each layer under the options taken of its menus; most come up at many shares."""

    def __init__(self, profile: Profile) -> None:
        self.layers = profile.shape.layers
        self.phrases: dict[str, int] = {"": 0}
        self.known: dict[tuple[int, ...], tuple[list[Option], list[int]]] = {}

    def of(self, number: int, options: list[Option]) -> list[int]:
        """The row of one layer."""
        key = (number, *map(id, options))
        if key not in self.known:
            layer = self.layers[number]
            changes = in_order(change for option in options for change in option.changes())
            after, phrase = changed(layer, changes), describe(layer, changes)
            place = self.phrases.setdefault(phrase, len(self.phrases))
            row = [0, 0, 0, 0, place, 0, 0]
            if after is not None:
                packed, whole = after.packed, after.cached_per_token * BF16
                once = (0, 0) if packed is None else (packed.level_bytes, packed.whole * whole)
                row = [*after.cached.dims[1:], after.token_bytes(BF16), place, *once]
            self.known[key] = options, row  # with the options, whose ids would be used again
        return self.known[key][1]


def _table(
    profile: Profile, budget: Budget, menus_for: Callable[[Budget, str], Menus], cache: str, rows: _Rows
) -> list[dict[str, Any]]:
    menus = menus_for(budget, cache)
    options = list(menus.values())
    if all(len(menu) == 1 for menu in options):
        return []
    full = budget.measure(profile.shape)
    fixed = full - sum(menu[0].cost for menu in options)
    table = []
    checks = checks_of(profile, cache != "none")
    for step in range(FIRST if cache == "none" else ROUNDED_FIRST, STEP + 1):
        limit = full * step // STEP - fixed
        if limit >= least(options):
            chosen = choose(options, limit)
            loss = sum(option.loss for option in chosen)
            likely = expected(checks, loss)
            table.append(
                {
                    "share": 100 * step / STEP,
                    "kept": round((fixed + sum(option.cost for option in chosen)) / full, DIGITS),
                    "loss": float(f"{loss:.{DIGITS}g}"),
                    "expected": None if likely is None else float(f"{likely:.{DIGITS}g}"),
                    "layers": _listed(menus, chosen, rows),
                }
            )
    return table


def _listed(menus: Menus, chosen: list[Option], rows: _Rows) -> list[list[int]]:
    layers: list[list[Option]] = [[] for _ in rows.layers]
    for (number, _), option in zip(menus, chosen, strict=True):
        layers[number].append(option)
    return [rows.of(number, taken) for number, taken in enumerate(layers)]
