"""headwise papers list, run and report"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headwise.cli.heavy import importing
from headwise.cli.options import AsJson, command
from headwise.cli.progress import watched
from headwise.files.writing import check_writable

if TYPE_CHECKING:
    from headwise.report.papers import Row

app = typer.Typer(no_args_is_help=True, help="The claims of four papers, measured: which hold, which do not.")
Results = Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")]
RESULTS = Path("results/papers")
HELP = {"help_option_names": ["-h", "--help"]}


@app.command("list", context_settings=HELP)
@command
def list_claims(output: Results = RESULTS, as_json: AsJson = False) -> None:
    """List every claim: what decides it, how long that took and the last verdict."""
    from headwise.report.papers import print_claims

    rows = _claims(output)
    if as_json:
        typer.echo(json.dumps([row.facts() for row in rows]))
    else:
        print_claims(rows)


@app.command("run", context_settings=HELP)
@command
def run_experiments(
    what: Annotated[str, typer.Argument(metavar="KEY[/EXPERIMENT]", help="As papers list names them, or all.")],
    size: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: minutes, a hint; full: what the verdicts rest on.")
    ] = "quick",
    on: Annotated[Literal["local", "ray"], typer.Option(help="All cores of this machine, or a Ray cluster.")] = "local",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds, where an experiment has any.")] = None,
    output: Results = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Run the experiments of a paper and check its claims. A rerun never repeats a finished setting."""
    from headwise.papers.catalogue import find

    chosen = find(what)
    check_writable(output / what)
    with importing():
        from headwise.papers.kit.grid import run_grids
        from headwise.report.papers import print_findings

    with watched() as progress:
        findings = run_grids(chosen, output, size=size, seeds=seeds, ray=on == "ray", progress=progress)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings], indent=1))
    else:
        print_findings(findings)


@app.command("report", context_settings=HELP)
@command
def report_claims(output: Results = RESULTS) -> None:
    """Write what was found so far as one page and one Markdown file, the papers' figures beside ours."""
    from headwise.files.writing import write_text
    from headwise.papers.catalogue import PAPERS
    from headwise.report.page.papers import write_papers_page
    from headwise.report.papers import markdown

    check_writable(output / "papers.md")
    rows = _claims(output)
    titles = {paper.key: f"{paper.key}: {paper.title} ({paper.source})" for paper in PAPERS.values()}
    write_text(output / "papers.md", markdown(titles, rows))
    write_papers_page(titles, rows, output / "papers.html")
    typer.echo(f"{output / 'papers.md'}\n{output / 'papers.html'}  <- open in a browser")


def _claims(folder: Path) -> list[Row]:
    """Every claim of every paper with its verdict, of a full run where there was one."""
    from headwise.papers.catalogue import PAPERS, SIZES
    from headwise.records.papers import Findings
    from headwise.report.papers import rows

    claims = []
    for paper in PAPERS.values():
        loaded = {name: Findings.load(folder, paper.key, name, SIZES[::-1]) for name in paper.experiments}
        claims += rows(paper.key, paper.claims, loaded)
    return claims
