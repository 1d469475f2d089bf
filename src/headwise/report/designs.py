"""Candidate shapes of a new model in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from headwise.records.design import Candidate, Design
from headwise.report.costs import count, runs, size

COLUMNS = (
    "shape",
    "layers",
    "heads",
    "kv",
    "dim",
    "MLP",
    "parameters",
    "KV / token",
    "FLOPs",
    "rank",
    "cond.",
    "lags",
)
HINT = (
    "dim: width of a head. FLOPs: mean per input token. Predicted, not measured: rank, the share of the rank limit "
    "that a head reaches at the full context; cond., the condition number of Gaussian heads side by side; lags, the "
    "error of gathering them in the first layer."
)
RULE = (
    "the usual shape with every paper's idea that its own formula predicts a gain for at this budget. It is a "
    "hypothesis: only training the candidates side by side can tell."
)


def print_design(design: Design, console: Console | None = None) -> None:
    """Every candidate with its layers, cost and predictions, then why, and which one is recommended."""
    console = console or Console(width=None if Console().is_terminal else 110)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in {"shape", "layers"} else "right", no_wrap=True)
    for candidate in design.candidates:
        for row in rows(candidate):
            table.add_row(*row)
    console.print(table)
    console.print()
    for candidate in design.candidates:
        _say(console, candidate.name, candidate.why)
    for name, why in design.left_out.items():
        _say(console, f"no {name}", why)
    _say(console, "recommended", f"{design.recommended}, {RULE}")
    console.print(f"\n{HINT}", style="dim")


def rows(candidate: Candidate) -> list[list[str]]:
    """The cells of one candidate under `COLUMNS`: a row for each run of equal layers, totals in the first."""
    plan, predicted = candidate.plan, candidate.plan.predicted
    cached = predicted["kv_bytes_per_token"]
    costs = [
        str(plan.require_blueprint().mlp),
        f"{predicted['parameters']:,}",
        size(cached) if cached else "-",
        count(predicted["prefill_flops"]),
    ]
    formulas = [f"{predicted['condition']:.3g}", f"{predicted['tradeoff_error']:.2f}"]
    name, found = candidate.name, []
    for first, last, layer in runs(plan.layers):
        numbers = str(first) if first == last else f"{first}-{last}"
        share = f"{predicted['rank_share'][first]:.0%}"
        found.append([name, numbers, *map(str, layer.dims[:3]), *costs, share, *formulas])
        name, costs, formulas = "", [""] * len(costs), [""] * len(formulas)
    return found


def _say(console: Console, name: str, sentence: str) -> None:
    console.print(f"[bold]{name}[/bold]: {sentence}", highlight=False)
