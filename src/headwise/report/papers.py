"""Claims of the papers and what became of them, in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from headwise.records.papers import OPEN, UNREACHED, Claim, Findings, Verdict

MINUTE, HOUR = 60, 3600
HEADER = ("claim", "paper", "here", "verdict", "settings", "seeds", "time")


@dataclass(frozen=True, slots=True)
class Row:
    """One claim beside what decided it; ``findings`` is None where nothing was run."""

    paper: str
    claim: Claim
    verdict: Verdict
    findings: Findings | None

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        run = self.findings and {
            name: getattr(self.findings, name) for name in ("size", "settings", "seeds", "seconds")
        }
        return {"paper": self.paper, **asdict(self.claim), "verdict": asdict(self.verdict), "run": run}


def rows(paper: str, claims: Sequence[Claim], by_experiment: dict[str, Findings | None]) -> list[Row]:
    """Each claim with its verdict, out of the findings of its experiment."""
    judged = []
    for claim in claims:
        findings = by_experiment.get(claim.experiment) if claim.experiment else None
        verdicts = {verdict.claim: verdict for verdict in findings.verdicts} if findings else {}
        without = Verdict(claim.name, OPEN if claim.experiment else UNREACHED, "", claim.reason)
        judged.append(Row(paper, claim, verdicts.get(claim.name, without), findings))
    return judged


def print_claims(judged: Sequence[Row], console: Console | None = None) -> None:
    """Every claim: what decides it, how long that took, the last verdict."""
    console = console or Console(width=None if Console().is_terminal else 140)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("experiment", "claim", "says", "verdict", "time"):
        table.add_column(name, no_wrap=name in {"experiment", "time"})
    for row in judged:
        decides = f"{row.paper}/{row.claim.experiment}" if row.claim.experiment else row.paper
        table.add_row(decides, row.claim.name, row.claim.says, _status(row), _time(row.findings))
    console.print(table)


def print_findings(results: Sequence[Findings], console: Console | None = None) -> None:
    """The verdicts of one run."""
    console = console or Console(width=None if Console().is_terminal else 140)
    for findings in results:
        name = f"{findings.paper}/{findings.experiment}"
        console.print(f"[bold]{name}[/bold] {_size(findings)}, {duration(findings.seconds)}", highlight=False)
        for verdict in findings.verdicts:
            because = f" ({verdict.because})" if verdict.because else ""
            console.print(
                f"  {verdict.claim}: [bold]{verdict.status}[/bold]. {verdict.figure}{because}", highlight=False
            )


def markdown(titles: dict[str, str], judged: Sequence[Row]) -> str:
    """One table for each paper."""
    parts = []
    for paper, title in titles.items():
        parts.append(f"## {title}\n\n| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
        parts += [f"| {' | '.join(_escaped(cell) for cell in cells(row))} |" for row in judged if row.paper == paper]
        parts.append("")
    return "\n".join(parts)


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row under `HEADER`."""
    here = row.verdict.figure + (f" ({row.verdict.because})" if row.verdict.because else "")
    findings = row.findings
    settings = f"{findings.settings}, {findings.size}" if findings else ""
    return (
        f"{row.claim.name}: {row.claim.says}",
        row.claim.figure,
        here.strip(),
        row.verdict.status,
        settings,
        str(findings.seeds) if findings else "",
        _time(findings),
    )


def duration(seconds: float) -> str:
    """Seconds of one core, for people."""
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.0f} min" if seconds < HOUR else f"{seconds / HOUR:.1f} h"


def _status(row: Row) -> str:
    return row.verdict.status if row.findings is None else f"{row.verdict.status} ({row.findings.size})"


def _time(findings: Findings | None) -> str:
    return duration(findings.seconds) if findings else ""


def _size(findings: Findings) -> str:
    return f"{findings.size}, {findings.settings} settings, {findings.seeds} seed{'s' * (findings.seeds > 1)}"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
