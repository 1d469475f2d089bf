"""What the page's slider moves over: the auction's result at a grid of shares."""

from __future__ import annotations

from typing import Any

from headwise.planning.damage import expected
from headwise.planning.knapsack import Option, choose, least
from headwise.planning.options import offers_of
from headwise.records.budget import Budget, natural_budget
from headwise.records.profile import Profile

STEPS = range(8, 41)  # of a fortieth of the whole each
STEP = 40
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
DIGITS = 4


def budget_tables(profile: Profile) -> dict[str, Any]:
    """For each context the choices at every feasible share, widest last; one table where all contexts agree.

    No tables where nothing can be cut. A choice lists for each layer its key/value heads, qk_dim and v_dim.
    """
    shape, kind = profile.shape, natural_budget(profile.shape)
    most = max(1, shape.max_tokens)
    contexts = [tokens for tokens in CONTEXTS if tokens <= most] or [most]
    alike = kind != "keep_kv" or all(layer.cache == "tokens" and layer.window is None for layer in shape.layers)
    tables = [_table(profile, Budget(kind, 1.0, context)) for context in (contexts[-1:] if alike else contexts)]
    return {"kind": kind, "contexts": contexts, "tables": tables if all(tables) else []}


def _table(profile: Profile, budget: Budget) -> list[dict[str, Any]]:
    shape = profile.shape
    offers = offers_of(profile, lambda layer: budget.price(layer, shape))
    if all(len(options) == 1 for options in offers):
        return []
    full = budget.measure(shape)
    limits = {step: full * step // STEP for step in STEPS}
    return [
        _choice(profile, 100 * step / STEP, choose(offers, limit), full)
        for step, limit in limits.items()
        if limit >= least(offers)
    ]


def _choice(profile: Profile, share: float, options: list[Option], full: int) -> dict[str, Any]:
    damage = sum(option.damage for option in options)
    hoped = expected(getattr(profile, "checks", ()), damage)
    return {
        "share": share,
        "kept": round(sum(option.price for option in options) / full, DIGITS),
        "damage": float(f"{damage:.{DIGITS}g}"),
        "expected": None if hoped is None else float(f"{hoped:.{DIGITS}g}"),
        "layers": [[option.kv_heads, option.qk_dim, option.v_dim] for option in options],
    }
