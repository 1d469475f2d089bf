"""A plan in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from headwise.records.plan import Plan
from headwise.records.profile import Profile


def print_plan(plan: Plan, profile: Profile, console: Console | None = None) -> None:
    """What every layer keeps, and what that is predicted to cost."""
    console = console or Console(width=None if Console().is_terminal else 110)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("layer", "qk dim", "v dim", "damage"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for index, (layer, shape) in enumerate(zip(plan.layers, profile.shape.layers, strict=True)):
        values = profile.layers[index].values
        if not values:
            table.add_row(str(index), "-", "-", "-")
            continue
        cost = sum(
            values[name][width] or 0.0 for name, width in (("qk_damage", layer.qk_dim), ("v_damage", layer.v_dim))
        )
        table.add_row(str(index), _change(shape.qk_dim, layer.qk_dim), _change(shape.v_dim, layer.v_dim), f"{cost:.2g}")
    console.print(table)
    kept, damage = plan.predicted["kept"], plan.predicted["damage"]
    console.print(
        f"\nkeeps {kept:.1%}; predicted damage {damage:.3g} nats per output (large cuts cost more than predicted)"
    )


def _change(before: int, after: int) -> str:
    return str(before) if before == after else f"{before} > {after}"
