"""Candidate shapes of a new model in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from headwise.records.design import Candidate, Design
from headwise.report.costs import count, runs, size

SHAPE = ("shape", "layers", "heads", "kv", "dim", "width", "MLP", "evidence")
NUMBERS = ("parameters", "KV / token", "FLOPs", "rank", "cond.", "lags")
COLUMNS = (*SHAPE, *NUMBERS)
LEFT = {"shape", "layers", "evidence"}
HINT = (
    "dim: width of a head. Evidence: measured, nats of held-out loss against textbook at equal wall-clock where small "
    "models of both kinds were trained, below 0 is better; formula only, nothing like it was trained here. FLOPs: mean "
    "per input token. Predicted, not measured: rank, the share of the rank limit that a head reaches at the full "
    "context; cond., the condition number of Gaussian heads side by side; lags, the error of gathering them in the "
    "first layer."
)


def print_design(design: Design, console: Console | None = None) -> None:
    """Every candidate with its layers and evidence, then costs and predictions, then why, and which is recommended."""
    console = console or Console(width=None if Console().is_terminal else 110)
    cells = [row for candidate in design.candidates for row in rows(candidate)]
    for columns in (SHAPE, ("shape", "layers", *NUMBERS)):
        console.print(_table(columns, cells))
        console.print()
    for name, sentence in reasons(design):
        console.print(f"[bold]{name}[/bold]: {sentence}", highlight=False)
    console.print(f"[bold]recommended[/bold]: {design.recommended}. {design.because}", highlight=False)
    console.print(f"\n{HINT}", style="dim", highlight=False)


def rows(candidate: Candidate) -> list[list[str]]:
    """The cells of one candidate under `COLUMNS`: a row for each run of equal layers, totals in the first."""
    plan, predicted = candidate.plan, candidate.plan.predicted
    cached = predicted["kv_bytes_per_token"]
    whole = {
        "shape": candidate.name,
        "width": str(plan.width),
        "MLP": str(plan.require_blueprint().mlp),
        "evidence": _evidence(candidate),
        "parameters": f"{predicted['parameters']:,}",
        "KV / token": size(cached) if cached else "-",
        "FLOPs": count(predicted["prefill_flops"]),
        "cond.": f"{predicted['condition']:.3g}",
        "lags": f"{predicted['tradeoff_error']:.2f}",
    }
    lines = []
    for first, last, dims in runs(plan.before):
        own = {
            "layers": str(first) if first == last else f"{first}-{last}",
            **dict(zip(("heads", "kv", "dim"), map(str, dims), strict=False)),
            "rank": f"{predicted['rank_share'][first]:.0%}",
        }
        cells = {**whole, **own} if first == 0 else own
        lines.append([cells.get(name, "") for name in COLUMNS])
    return lines


def reasons(design: Design) -> list[tuple[str, str]]:
    """For each candidate why it is there and what was measured, for each idea that is left out why it is not."""
    named = []
    for candidate in design.candidates:
        result = "" if candidate.measured is None else f" Measured in {candidate.measured.file}: {candidate.measured}."
        named.append((candidate.name, candidate.why + result))
    return named + [(f"no {name}", why) for name, why in design.left_out.items()]


def _evidence(candidate: Candidate) -> str:
    measured = candidate.measured
    if measured is None:
        return candidate.evidence
    return f"{candidate.evidence}: {f'{measured.time.difference:+.3f} nats' if measured.time.margin else 'reference'}"


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    chosen = [COLUMNS.index(name) for name in columns]
    for row in cells:
        table.add_row(*(row[index] for index in chosen))
    return table
