"""Scores side by side: in the terminal, and as Markdown for model cards, issues and pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headwise.records.scores import ModelScores, Rate, Scores
from headwise.report.practice import Rows, by_position, exercise_hint, exercises, tasks, with_error

WIDTH = 110


def print_scores(scores: Scores, console: Console | None = None) -> None:
    """One column per model, one row per measure, and what they were measured on; then by position, skills and tasks."""
    console = console or Console(width=None if Console().is_terminal else WIDTH)
    for title, lines in tables(scores):
        if title:
            console.print(f"\n{title}", highlight=False)
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in names(scores):
            table.add_column(name, justify="right", overflow="fold")
        for name, cells in lines:
            table.add_row(name, *cells)
        console.print(table)
    console.print(f"\n{caption(scores)}", highlight=False, style="dim")


def markdown(scores: Scores) -> str:
    """The same as Markdown tables, with the notes below them."""
    lines: list[str] = []
    for title, body in tables(scores):
        lines += [title, ""] if title else []
        lines += ["| | " + " | ".join(map(_escaped, names(scores))) + " |"]
        lines += ["| --- |" + " ---: |" * len(scores.models)]
        lines += [*(f"| {name} | {' | '.join(cells)} |" for name, cells in body), ""]
    return "\n".join([*lines, caption(scores), *(f"\n{note}" for note in scores.notes)]) + "\n"


def tables(scores: Scores) -> list[tuple[str, Rows]]:
    """All tables that hold anything, each with a line above it; that of the measures has none."""
    others = [
        ("Loss by position in the window, nats; for others its increase and the KL from the baseline", by_position),
        (exercise_hint(scores), exercises),
        ("Tasks of lm-evaluation-harness", tasks),
    ]
    return [("", rows(scores)), *((title, body) for title, of in others if (body := of(scores)))]


def names(scores: Scores) -> list[str]:
    """What to call the models: the last part of where they come from, or all of it where that names two of them."""
    short = [Path(model.source).name or model.source for model in scores.models]
    return [name if short.count(name) == 1 else model.source for name, model in zip(short, scores.models, strict=True)]


def rows(scores: Scores) -> Rows:
    """The name of each measure that some model has, and its cells."""
    first, models = scores.models[0], scores.models
    lines: list[tuple[str, Callable[[ModelScores], str]]] = [
        ("class", lambda model: model.kind),
        ("precision of the weights", lambda model: model.dtype),
        ("parameters", lambda model: _share(model.parameters, first.parameters)),
        ("of these in attention", lambda model: _share(model.attention_parameters, first.attention_parameters)),
        ("KV cache, bytes per token", lambda model: _share(model.cache_bytes_per_token, first.cache_bytes_per_token)),
        ("perplexity", lambda model: _number(model.perplexity, ",.3f")),
        ("loss increase, nats", lambda model: with_error(model.loss_increase, model.loss_increase_error)),
        ("KL from the baseline, nats", lambda model: with_error(model.kl, model.kl_error)),
        ("KL, 99th percentile", lambda model: _number(model.kl_p99, ".3f")),
        ("same likeliest token", lambda model: _number(model.same_top, ".1%")),
        ("agreement, mean cosine", lambda model: _number(model.agreement, ".4f")),
        ("agreement, 5th percentile", lambda model: _number(model.agreement_p5, ".4f")),
        ("accuracy", lambda model: _number(model.accuracy, ".1%")),
    ]
    table = [(name, [show(model) for model in models]) for name, show in lines]
    for name in dict.fromkeys(part.name for model in models for part in model.parts if part.last is None):
        mine = [next((part for part in model.parts if part.name == name), None) for model in models]
        table.append(
            (f"{name}: nats per token", [_number(None if part is None else part.loss, ".4f") for part in mine])
        )
        table.append(
            (f"{name}: KL from the baseline", [_number(None if part is None else part.kl, ".4f") for part in mine])
        )
    for place, speed in enumerate(first.speed):
        table.append(
            (f"prefill of {speed.context:,} tokens, tokens/s", [_rate(m.speed[place].prefill) for m in models])
        )
        if speed.decode is not None:
            table.append((f"decode after {speed.context:,}, tokens/s", [_rate(m.speed[place].decode) for m in models]))
    return [(name, cells) for name, cells in table if any(cell != "-" for cell in cells)]


def caption(scores: Scores) -> str:
    """What the scores were measured on and with, in a few sentences."""
    text, settings = scores.text, scores.settings
    sentences = []
    if text:
        context = f" in windows of {text['context']:,}" if "context" in text else ""
        errors = " ± is one standard error over windows." if any(m.kl_error is not None for m in scores.models) else ""
        sentences.append(f"Quality on {text['tokens']:,} tokens{context} of {text['name']}.{errors}")
    if settings:
        many = "s" if settings["threads"] > 1 else ""
        threads = f", {settings['threads']} thread{many}" if settings["device"] == "cpu" else ""
        sentences.append(f"Run in {settings['precision']} on {settings['device']}{threads}.")
    if any(model.cache_bytes_per_token is not None for model in scores.models):
        sentences.append("The cache is that of a real generation in the precision of the weights.")
    if settings and len(scores.models) > 1 and any(model.speed for model in scores.models):
        sentences.append(
            f"Speeds: the first model's is the median of {settings['rounds']} rounds in turns; in brackets times that, "
            "the median and the range over rounds."
        )
    return " ".join(sentences)


def _share(value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    shown = f"{value:,.1f}".removesuffix(".0")
    return shown if not first or value == first else f"{shown} ({value / first:.1%})"


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return "-"
    shown = f"{rate.tokens_per_second:,.0f}" if rate.tokens_per_second >= 100 else f"{rate.tokens_per_second:.1f}"  # noqa: PLR2004
    if rate.lowest == rate.highest == 1:
        return shown
    return f"{shown} ({rate.ratio:.2f}x, {rate.lowest:.2f} to {rate.highest:.2f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _escaped(name: str) -> str:
    return name.replace("|", "\\|")
