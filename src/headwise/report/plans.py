"""A plan in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from headwise.planning.damage import layer_damage
from headwise.records.budget import WORDS
from headwise.records.plan import LayerPlan, Plan
from headwise.records.profile import Profile
from headwise.records.shape import LayerShape

THIRD = 3
COLUMNS = ("layer", "heads", "kv heads", "qk dim", "v dim", "damage")


def print_plan(plan: Plan, profile: Profile, console: Console | None = None) -> None:
    """What every layer keeps, what the model then costs, and how much that is predicted to damage it."""
    console = console or Console(width=None if Console().is_terminal else 110)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    for index, (layer, change) in enumerate(zip(profile.shape.layers, plan.layers, strict=True)):
        values = profile.layers[index].values
        damage = f"{layer_damage(layer, values, change):.2g}" if values else "-"
        table.add_row(str(index), *_dims(layer, change), damage)
    console.print(table)
    console.print()
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column()
    totals.add_column(justify="right", style="bold")
    for name, before, after in _costs(plan, profile):
        totals.add_row(name, f"{_change(f'{before:,}', f'{after:,}')}  ({after / before:.1%})")
    console.print(totals)
    console.print()
    for sentence in _sentences(plan, profile):
        console.print(sentence)


def _dims(layer: LayerShape, change: LayerPlan) -> list[str]:
    before = (layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim)
    after = (change.heads, change.kv_heads, change.qk_dim, change.v_dim)
    return [_change(*map(_or_dash, pair)) for pair in zip(before, after, strict=True)]


def _costs(plan: Plan, profile: Profile) -> list[tuple[str, int, int]]:
    cached, attention = (plan.predicted[name] for name in ("kv_bytes_per_token", "attention_parameters"))
    after = profile.shape.planned(plan).total_parameters()
    costs = [
        (f"KV bytes per token, {plan.budget['dtype']}", cached[0], cached[1]),
        ("attention parameters", attention[0], attention[1]),
        ("all parameters", profile.shape.total_parameters(), after),
    ]
    return [cost for cost in costs if cost[1]]


def _sentences(plan: Plan, profile: Profile) -> list[str]:
    damage, expected = plan.predicted["damage"], plan.predicted["expected"]
    what = next((words for kind, words in WORDS.items() if kind in plan.budget), "model")
    prediction = f"Keeps {plan.predicted['kept']:.1%} of the {what}; predicted damage {damage:.3g} nats per output"
    if not damage:
        return [f"{prediction}."]
    if expected is None:
        prediction += " (large cuts cost more than predicted, and nothing was held out to check it)."
    else:
        prediction += f"; such cuts, refitted, measured {expected / damage:.2g}x of it on text like "
        prediction += f"{plan.predicted['text']} that they had not seen, so expect about {expected:.2g}"
        agreement = plan.predicted.get("agreement")
        prediction += "." if agreement is None else f", and embeddings with a cosine of about {agreement:.3f}."
    return [*_early_and_late(plan, profile), prediction, *plan.predicted.get("notes", ())]


def _early_and_late(plan: Plan, profile: Profile) -> list[str]:
    layers = list(zip(profile.shape.layers, plan.layers, strict=True))
    third = len(layers) // THIRD
    if not third:
        return []
    early, late = (
        f"{_kept(part, 'qk_dim')} of queries and keys, {_kept(part, 'v_dim')} of values"
        for part in (layers[:third], layers[-third:])
    )
    return [f"The first third of the layers keeps {early}; the last third {late}."]


def _kept(layers: Sequence[tuple[LayerShape, LayerPlan]], width: str) -> str:
    """Mean share of the key/value numbers of one kind that these layers keep."""
    shares = [
        change.kv_heads * getattr(change, width) / (layer.kv_heads * getattr(layer, width))
        for layer, change in layers
        if layer.heads
    ]
    return f"{fmean(shares):.0%}" if shares else "-"


def _or_dash(value: int) -> str:
    return str(value) if value else "-"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} > {after}"
