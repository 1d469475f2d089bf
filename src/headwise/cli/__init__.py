"""The front door: a file for each command parses, calls one step and prints. Results on stdout, the rest on stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headwise import __version__
from headwise.cli import (
    compare,
    compress,
    cost,
    demo,
    design,
    evaluate,
    export,
    heal,
    inspect,
    papers,
    plan,
    run,
    train,
)
from headwise.cli.old_names import renamed
from headwise.cli.options import command
from headwise.cli.progress import as_flags, notes
from headwise.files.errors import Failed, InputError

INTERRUPTED = 130
SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
    help="How many attention heads, how wide and how deep a Transformer needs to be, and that model.",
    epilog="Example: headwise cost HuggingFaceTB/SmolLM2-135M --context 8k",
)
for module in (cost, inspect, plan, compress, heal, evaluate, export, run, design, train, compare, demo):
    name = module.__name__.rpartition(".")[2]
    app.command(name, context_settings=SETTINGS)(command(getattr(module, name)))
app.add_typer(papers.app, name="papers", context_settings=SETTINGS)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """How many attention heads, how wide and how deep a Transformer needs to be, and that model."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line: 0 done, 1 failed, 2 wrong call, 130 interrupted."""
    try:
        _check_arguments()
        arguments, old = renamed(sys.argv[1:])
        notes(old)
        app(arguments)
    except InputError as error:
        _fail(as_flags(str(error)), 2)
    except Failed as error:
        _fail(as_flags(str(error)), 1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _fail(
                "stopped; nothing is half-written. Where a command can go on later, the same command does.", INTERRUPTED
            )
        raise
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 1)


def _check_arguments() -> None:
    """Raise where an argument cannot be written into a card or a page: names of files are any bytes on some systems."""
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InputError(f"The argument {argument!r} is not UTF-8 text; rename the file.") from None


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"headwise: {sentence}", err=True)
    sys.exit(code)
