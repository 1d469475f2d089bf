"""The usual shape, the one that `headwise design` recommends, and "more heads, fewer layers" both ways, trained.

    python benchmarks/shapes.py FILE... [--params 2M] [--tokens 2M] [--seeds 3] [--on ray] [-o results/shapes.json]

FILE is text in UTF-8. The same code as `headwise compare`; an interrupted run goes on. The folder
``--folder`` keeps plans, tokens and what each training came to.
"""

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from headwise.pipelines.compare import HELD_OUT, compare
from headwise.records.blueprint import Text
from headwise.records.design import Request
from headwise.records.settings import TrainConfig
from headwise.report.comparisons import print_comparison
from headwise.steps.design import USUAL, propose


def number(text):
    """A number such as 2M or 500k."""
    factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1)
    return round(float(text.rstrip("kM")) * factor)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--params", type=number, default=2_000_000)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=number, default=2_000_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--on", choices=("local", "ray"), default="local")
    parser.add_argument("--folder", type=Path, default=Path("shapes"))
    parser.add_argument("-o", "--output", type=Path, default=Path("results/shapes.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = propose(Request("llama", args.params, Text(args.vocab, args.context, tied=True)))
    names = dict.fromkeys([USUAL, found.recommended, "lean-width", "lean-head-dim"])
    plans = []
    for name in names:
        plans.append(args.folder / "plans" / f"{name}.json")
        found.choose(name).plan.save(plans[-1])
    config = TrainConfig(tokens=args.tokens, batch=args.batch, held_out=HELD_OUT)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("opening", total=None)
        compared = compare(
            plans,
            args.files,
            args.folder,
            seeds=args.seeds,
            config=config,
            on=args.on,
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )
    print_comparison(compared)
    about = {
        "command": shlex.join(["python", "benchmarks/shapes.py", *sys.argv[1:]]),
        "recommended": found.recommended,
        "why": {name: found.choose(name).why for name in names},
        "machine": platform.machine(),
        "threads": 1 if args.on == "ray" else torch.get_num_threads(),
    }
    args.output.write_text(json.dumps({**about, **compared.body()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
