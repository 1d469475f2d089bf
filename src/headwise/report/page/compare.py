"""A comparison of shapes as one HTML file that opens anywhere, offline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from headwise.files.writing import write_text
from headwise.records.comparison import READINGS, Comparison, Reading
from headwise.report.comparisons import COLUMNS, HINT, caption, rows
from headwise.report.page.template import filled, table

WIDTH, LEFT, RIGHT = 560, 110, 20
ROW, FOOT = 28, 22
HIGH, ROOM, TOP = 260, 46, 12
COLOURS = 4


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Write ``comparison`` as a self-contained page."""
    write_text(path, render_comparison(comparison))


def render_comparison(comparison: Comparison) -> str:
    """The page as text."""
    names = [each.name for each in comparison.contenders]
    verdicts = ((title.capitalize(), comparison.verdict(reading)) for reading, title in READINGS.items())
    parts = {
        "TITLE": escape(" / ".join(names)),
        "SENTENCE": escape(f"At equal parameters and tokens. {comparison.verdict('parameters')}"),
        "FACTS": escape(caption(comparison)),
        "VERDICTS": "".join(f"<dt>{escape(title)}</dt><dd>{escape(verdict)}</dd>" for title, verdict in verdicts),
        "TABLE": table(COLUMNS, rows(comparison)),
        "HINT": escape(HINT),
        "SEEDS": "".join(_seeds(comparison, reading) for reading in ("tokens", "time")),
        "CURVES": _curves(comparison, names),
        "LEGEND": " ".join(f'<b class="s{i % COLOURS}"></b> {escape(name)}' for i, name in enumerate(names)),
        "FIRST": "verdicts",
        "SOURCE": "<code>compare.json</code>",
    }
    return filled("compare", parts)


def _seeds(comparison: Comparison, reading: Reading) -> str:
    """Losses of all trainings of one reading, a row for each shape."""
    losses = {name: list(comparison.losses(name, reading).values()) for name in comparison.names(reading)}
    low, high = _range([loss for some in losses.values() for loss in some])
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    tall, drawn = ROW * len(losses), []
    for row, (name, some) in enumerate(losses.items()):
        middle, mean = ROW * row + ROW / 2, LEFT + (fmean(some) - low) * scale
        dots = "".join(
            f'<circle cx="{LEFT + (loss - low) * scale:.1f}" cy="{middle:.1f}" r="4"><title>{loss:.4f}</title></circle>'
            for loss in some
        )
        drawn.append(
            f'<g class="s{row % COLOURS}">{dots}'
            f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<path d="M{mean:.1f} {middle - 9:.1f}v18"/></g>'
        )
    label = "; ".join(f"{name} {fmean(some):.4f}" for name, some in losses.items())
    return f"""<figure><figcaption>{escape(READINGS[reading].capitalize())}</figcaption><div class="plot seeds">
    <svg viewBox="0 0 {WIDTH} {tall + FOOT}" role="img" aria-label="{escape(label)}">
      <path class="axis" d="M{LEFT} {tall}H{WIDTH - RIGHT}"/>{"".join(drawn)}
      <text x="{LEFT}" y="{tall + 16}">{low:.4g}</text>
      <text x="{WIDTH - RIGHT}" y="{tall + 16}" text-anchor="end">{high:.4g}</text>
    </svg></div></figure>"""


def _curves(comparison: Comparison, names: Sequence[str]) -> str:
    """Mean held-out loss of each shape against tokens."""
    lines = {}
    for name in names:
        curves = [trial.curve for trial in comparison.trials if (trial.shape, trial.reading) == (name, "tokens")]
        lines[name] = [(some[0][0], fmean(loss for _, loss in some)) for some in zip(*curves, strict=True)]
    low, high = _range([loss for line in lines.values() for _, loss in line])
    most = max(tokens for line in lines.values() for tokens, _ in line)
    across, up = (WIDTH - ROOM - RIGHT) / most, (HIGH - TOP - FOOT) / (high - low)
    drawn = []
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{ROOM + tokens * across:.1f},{TOP + (high - loss) * up:.1f}" for tokens, loss in line)
        dashed = f' stroke-dasharray="{4 * (number // COLOURS)}"' if number >= COLOURS else ""
        drawn.append(
            f'<g class="s{number % COLOURS}"><title>{escape(name)}</title><polyline points="{points}"{dashed}/></g>'
        )
    base = HIGH - FOOT
    return f"""<svg viewBox="0 0 {WIDTH} {HIGH}" role="img" aria-label="Held-out loss of all shapes against tokens">
      <path class="axis" d="M{ROOM} {TOP}V{base}H{WIDTH - RIGHT}"/>{"".join(drawn)}
      <text x="{ROOM - 6}" y="{TOP + 10}" text-anchor="end">{high:.3g}</text>
      <text x="{ROOM - 6}" y="{base}" text-anchor="end">{low:.3g}</text>
      <text x="{WIDTH - RIGHT}" y="{HIGH - 6}" text-anchor="end">{most:,} tokens</text>
    </svg>"""


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than all values, so that no dot lies on the edge."""
    low, high = min(values), max(values)
    more = 0.05 * (high - low) or 0.01
    return low - more, high + more
