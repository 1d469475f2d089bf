"""headwise design"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise.cli.options import AsJson
from headwise.cli.progress import as_flags
from headwise.files.writing import check_file
from headwise.records.settings import DesignConfig


def design(
    config: DesignConfig,
    family: Annotated[
        Literal["llama", "gpt2", "vit"], typer.Option(help="llama or gpt2 for text, vit for images.")
    ] = "llama",
    choose: Annotated[
        str | None, typer.Option(metavar="NAME", help="Candidate to write instead of the recommended one.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plan to write.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Page to write; by default design.html beside the plan, if there is one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Propose shapes for a model that does not exist yet, all of the same size, the usual one among them."""
    from headwise.report.designs import print_design
    from headwise.report.page.design import write_design_page
    from headwise.steps.design import propose, request_of

    request = request_of(config, family)
    page = page or (None if output is None else output.with_name("design.html"))
    for file in (output, page):
        if file is not None:
            check_file(file)
    proposal = propose(request)
    left_out = {name: as_flags(sentence) for name, sentence in proposal.left_out.items()}
    proposal = replace(proposal, left_out=left_out)
    chosen = proposal.choose(choose)
    if output is not None:
        chosen.plan.save(output)
    if page is not None:
        write_design_page(proposal, page)
    if as_json:
        typer.echo(proposal.json())
        return
    print_design(proposal)
    if output is not None:
        typer.echo(f"\n{output}: {chosen.name}")
    if page is not None:
        typer.echo(f"{page}  <- open in a browser")
