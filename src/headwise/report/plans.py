"""A plan in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from headwise.records.budget import WORDS
from headwise.records.cost import cost_of
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.shape import LayerShape

THIRD = 3
COLUMNS = ("layer", "change", "predicted loss increase")


def print_plan(plan: Plan, profile: Profile | None, console: Console | None = None) -> None:
    """What is done to every layer, what the model then costs, and how much loss that is predicted to bring.

    Without the ``profile`` it was made from a plan knows no costs but those it was made to keep to.
    """
    console = console or Console(width=None if Console().is_terminal else 110)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name == COLUMNS[-1] else "left", no_wrap=True)
    losses = plan.predicted.get("by_layer") or [None] * len(plan.layers)
    phrases = plan.describe() if plan.blueprint is None else [_built(dims) for dims in plan.before]
    for index, (phrase, loss) in enumerate(zip(phrases, losses, strict=True)):
        known = loss is not None and (profile is None or profile.layers[index].values)
        table.add_row(str(index), phrase or "-", f"{loss:.2g}" if known else "-")
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


def _built(dims: Sequence[int]) -> str:
    heads, kv_heads, qk_dim, v_dim = dims
    return f"{heads} heads, {kv_heads} of keys and values, {qk_dim} and {v_dim} wide"


def _costs(plan: Plan, profile: Profile | None) -> list[tuple[str, int, int]]:
    if profile is None:
        known = {name: plan.predicted.get(name, (0, 0)) for name in ("kv_bytes_per_token", "attention_parameters")}
        costs = [(name.replace("_", " "), *pair) for name, pair in known.items()]
        return [cost for cost in costs if cost[1]]
    before, after = profile.shape, profile.shape.planned(plan)
    dtype = str(plan.budget.get("dtype", "bf16"))
    cached = [cost_of(shape, 1, dtype=dtype).kv_bytes_per_token for shape in (before, after)]
    costs = [
        (f"KV bytes per token, {dtype}", cached[0], cached[1]),
        ("attention parameters", before.attention_parameters(), after.attention_parameters()),
        ("all parameters", before.total_parameters(), after.total_parameters()),
    ]
    return [cost for cost in costs if cost[1]]


def _sentences(plan: Plan, profile: Profile | None) -> list[str]:
    early_and_late = [] if profile is None else _early_and_late(plan, profile)
    if not plan.predicted or plan.blueprint is not None:
        return early_and_late
    loss, expected = plan.predicted["loss_increase"], plan.predicted.get("expected")
    also = plan.predicted.get("also", {})
    what = next((words for kind, words in WORDS.items() if kind in plan.budget and kind not in also), "model")
    shares = [(plan.predicted["kept"], what), *((share, WORDS[kind]) for kind, share in also.items())]
    kept = " and ".join(f"{share:.1%} of the {words}" for share, words in shares)
    prediction = f"Keeps {kept}; predicted loss increase {loss:.3g} nats per output"
    if not loss:
        return [f"{prediction}."]
    if expected is None:
        prediction += " (large cuts cost more than predicted, and nothing was held out to check it)."
    else:
        such = f"such {'caches' if plan.budget.get('cache') else 'cuts'}, refitted,"
        prediction += f"; {such} measured {expected / loss:.2g}x of it on text like "
        prediction += f"{plan.predicted['text']} that they had not seen, so expect about {expected:.2g}"
        agreement = plan.predicted.get("agreement")
        prediction += "." if agreement is None else f", and embeddings with a cosine of about {agreement:.3f}."
    return [*early_and_late, prediction, *plan.predicted.get("notes", ())]


def _early_and_late(plan: Plan, profile: Profile) -> list[str]:
    after = [layer for layer in plan.after(profile.shape) if layer is not None]
    third = len(after) // THIRD
    if not third or len(after) < len(profile.shape.layers):  # dropped and joined blocks have no thirds
        return []
    layers = list(zip(profile.shape.layers, after, strict=True))
    parts = (layers[:third], layers[-third:])
    if any(layer.packed is not None for layer in after):
        early, late = (f"{_bytes_kept(part)} of its cache" for part in parts)
    else:
        early, late = (
            f"{_kept(part, 'qk_dim')} of queries and keys, {_kept(part, 'v_dim')} of values" for part in parts
        )
    return [f"The first third of the layers keeps {early}; the last third {late}."]


def _bytes_kept(layers: Sequence[tuple[LayerShape, LayerShape]]) -> str:
    """Share of the bytes of a token that these layers keep in a cache of 16 bits a number."""
    before = sum(layer.token_bytes(2) for layer, _ in layers)
    return f"{sum(after.token_bytes(2) for _, after in layers) / (before or 1):.0%}"


def _kept(layers: Sequence[tuple[LayerShape, LayerShape]], width: str) -> str:
    """Mean share of the key/value numbers of one kind that these layers keep."""
    shares = [
        after.kv_heads * getattr(after, width) / (layer.kv_heads * getattr(layer, width))
        for layer, after in layers
        if layer.heads
    ]
    return f"{fmean(shares):.0%}" if shares else "-"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} > {after}"
