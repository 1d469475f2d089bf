"""Shapes that were trained side by side, in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from headwise.records.comparison import EQUAL, READINGS, Comparison, Outcome

COLUMNS = ("shape", "parameters", "tokens/s", "equal", "tokens", "loss", "spread", "against", "±")
HINT = (
    "Loss: mean over seeds of the held-out loss at the end of training, in nats; spread: its standard deviation. "
    "Against: mean difference to the first shape, paired by seed; ±: half its 95 % interval. Each interval stands for "
    "itself: among many, one will miss."
)


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """A row for each shape, then what each reading says."""
    console = console or Console(width=None if Console().is_terminal else 110)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "shape" else "right")
    for row in rows(comparison):
        table.add_row(*row)
    console.print(table)
    console.print()
    for reading, title in READINGS.items():
        console.print(f"[bold]{title}[/bold]: {comparison.verdict(reading)}", highlight=False)
    console.print(f"\n{caption(comparison)} {HINT}", style="dim", highlight=False)


def rows(comparison: Comparison) -> list[list[str]]:
    """The cells under `COLUMNS`: for each shape a row at equal tokens and one at equal wall-clock."""
    first, cells = comparison.contenders[0], []
    for each in comparison.contenders:
        parameters, speed = f"{each.parameters:,}", f"{each.tokens_per_second:,.0f}"
        if each is not first:
            apart = comparison.size(each.name) - 1
            parameters += f" ({apart:+.1%}{'' if abs(apart) <= EQUAL else ', not equal'})"
            speed += f" ({each.tokens_per_second / first.tokens_per_second:.2f}x)"
        equal, timed = comparison.outcome(each.name, "tokens"), comparison.outcome(each.name, "time")
        cells.append(
            [each.name, parameters, speed, "tokens", f"{comparison.tokens:,}", *_numbers(equal, each is first)]
        )
        cells.append(["", "", "", "wall-clock", f"{each.tokens_in_time:,}", *_numbers(timed, each is first)])
    return cells


def caption(comparison: Comparison) -> str:
    """What was done."""
    many = f"{len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else "one seed"
    return (
        f"{comparison.tokens:,} tokens of {comparison.data}, {many}, learning rate {comparison.settings['rate']:.2g}."
    )


def _numbers(outcome: Outcome, first: bool) -> list[str]:
    apart = ["", ""] if first else [f"{outcome.difference:+.4f}", _known(outcome.margin)]
    return [f"{outcome.mean:.4f}", _known(outcome.spread), *apart]


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
