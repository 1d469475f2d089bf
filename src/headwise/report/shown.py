"""Records as text and as HTML: what the terminal shows, for `print` and for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console

from headwise.records.cost import CostReport
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.scores import Scores
from headwise.report.costs import print_costs
from headwise.report.plans import print_plan
from headwise.report.profiles import print_profile
from headwise.report.scores import print_scores

WIDTH = 110
FRAME = '<pre style="font-family: monospace; line-height: 1.3">{code}</pre>'


def text_of(record: Any) -> str:
    """``record`` as the terminal shows it, without colours."""
    return "\n".join(line.rstrip() for line in _drawn(record).export_text().splitlines())


def html_of(record: Any) -> str:
    """The same for a notebook."""
    return _drawn(record).export_html(inline_styles=True, code_format=FRAME)


def _drawn(record: Any) -> Console:
    console = Console(file=StringIO(), record=True, width=WIDTH)
    draw: dict[type, Callable[[Any, Console], None]] = {
        Plan: _plan,
        Profile: _profile,
        Scores: print_scores,
        CostReport: print_costs,
    }
    next(show for kind, show in draw.items() if isinstance(record, kind))(record, console)
    return console


def _plan(plan: Plan, console: Console) -> None:
    print_plan(plan, None, console)


def _profile(profile: Profile, console: Console) -> None:
    if profile.maps:
        print_profile(profile, console)
    else:
        tokens, name = profile.text.get("tokens", 0), profile.text.get("name", "")
        layers = sum(bool(layer.values) for layer in profile.layers)
        console.print(f"{layers} attention layers, measured for planning on {tokens:,} tokens of {name}.")
