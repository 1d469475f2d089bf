"""All papers on one page: every claim with its verdict, and charts with the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from headwise.files.writing import write_text
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, UNREACHED, Chart, Findings, Line
from headwise.report.page.template import filled
from headwise.report.papers import HEADER, Row, cells, duration

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 8, 36
COLOURS = 10
TICKS = 4
CLASSES = {HELD: "held", CONDITIONAL: "conditional", FAILED: "failed", UNREACHED: "unreached", OPEN: "open"}
Axis = tuple[float, float, bool]


def write_papers_page(titles: dict[str, str], rows: Sequence[Row], path: Path) -> None:
    """Write the page, self-contained."""
    write_text(path, render_papers(titles, rows))


def render_papers(titles: dict[str, str], rows: Sequence[Row]) -> str:
    """The page as text."""
    counts = {status: sum(row.verdict.status == status for row in rows) for status in CLASSES}
    listed = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    by_experiment = {(f.paper, f.experiment): f for row in rows if (f := row.findings)}
    seconds = sum(findings.seconds for findings in by_experiment.values())
    parts = {
        "TITLE": "Four papers, reproduced",
        "SENTENCE": escape(f"{len(rows)} claims of {len(titles)} papers: {listed}."),
        "FACTS": escape(f"{duration(seconds)} on one core in all; the time of a row is that of its experiment."),
        "FIRST": "papers",
        "SOURCE": "the JSON files that <code>headwise papers run</code> writes",
        "PAPERS": "".join(_paper(key, title, rows) for key, title in titles.items()),
    }
    return filled("papers", parts)


def _paper(key: str, title: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.paper == key]
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADER)
    body = "".join(_row(row) for row in own)
    by_experiment = {f.experiment: f for row in own if (f := row.findings)}
    charts = "".join(_chart(findings, chart) for findings in by_experiment.values() for chart in findings.charts)
    return f"""<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>
    <div class="scroll"><table class="claims"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
    <div class="columns">{charts}</div></section>"""


def _row(row: Row) -> str:
    verdict = row.verdict
    marked = {name: f"<td>{escape(cell)}</td>" for name, cell in zip(HEADER, cells(row), strict=True)}
    because = f"<small>{escape(verdict.because)}</small>" if verdict.because else ""
    marked |= {
        "claim": f'<th scope="row">{escape(row.claim.name)}<small>{escape(row.claim.says)}</small></th>',
        "here": f"<td>{escape(verdict.figure)}{because}</td>",
        "verdict": f'<td class="{CLASSES[verdict.status]}">{escape(verdict.status)}</td>',
    }
    return f"<tr>{''.join(marked.values())}</tr>"


def _chart(findings: Findings, chart: Chart) -> str:
    x, y = (
        _axis([v for line in chart.lines for v in line.x], chart.log_x),
        _axis([v for line in chart.lines for v in line.y], chart.log_y),
    )
    names = list(dict.fromkeys(line.name.removesuffix(", paper") for line in chart.lines))
    drawn = "".join(_line(line, names.index(line.name.removesuffix(", paper")), x, y) for line in chart.lines)
    grid = "".join(_tick_x(value, x) for value in _ticks(x)) + "".join(_tick_y(value, y) for value in _ticks(y))
    legend = "".join(
        f'<span><b class="c{index % COLOURS}"></b>{escape(name)}</span>' for index, name in enumerate(names)
    )
    dashed = "<span>dashed: the paper's numbers</span>" if any(line.paper for line in chart.lines) else ""
    title = escape(f"{findings.experiment}: {chart.title} ({findings.size})")
    across, down = escape(chart.x), escape(chart.y)
    return f"""<figure><figcaption>{title}</figcaption><div class="plot">
    <svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {down} over {across}">
    {grid}{drawn}<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{across}</text>
    <text transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{down}</text>
    </svg></div><p class="legend lines">{legend}{dashed}</p></figure>"""


def _line(line: Line, colour: int, x: Axis, y: Axis) -> str:
    spots = [(_x(a, x), _y(b, y)) for a, b in zip(line.x, line.y, strict=True) if not (y[2] and b <= 0)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
    kind = f"c{colour % COLOURS}{' paper' if line.paper else ''}"
    dots = (
        "" if line.paper else "".join(f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in spots)
    )
    return f'<g><title>{escape(line.name)}</title><polyline class="{kind}" points="{path}"/>{dots}</g>'


def _axis(values: Sequence[float], log: bool) -> Axis:
    """Ends of an axis, as logarithms if it is logarithmic."""
    kept = [math.log10(value) for value in values if value > 0] if log else list(values)
    low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    return (low, high, log) if high > low else (low - 0.5, high + 0.5, log)


def _ticks(axis: Axis) -> list[float]:
    low, high, log = axis
    if log and high - low >= 1:
        step = max(1, round((high - low) / TICKS))
        return [10.0**power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, step)]
    ends = (10**low, 10**high) if log else (low, high)
    step = _round_step((ends[1] - ends[0]) / TICKS)
    first = math.ceil(ends[0] / step - 1e-9)
    return [index * step for index in range(first, math.floor(ends[1] / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    power = 10 ** math.floor(math.log10(step))
    return next(nice * power for nice in (1, 2, 5, 10) if nice * power >= step * (1 - 1e-9))


def _tick_x(value: float, axis: Axis) -> str:
    at = _x(value, axis)
    return (
        f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{value:g}</text>'
    )


def _tick_y(value: float, axis: Axis) -> str:
    at = _y(value, axis)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'
    )


def _x(value: float, axis: Axis) -> float:
    return LEFT + _share(value, axis) * (WIDTH - LEFT - RIGHT)


def _y(value: float, axis: Axis) -> float:
    return HEIGHT - BOTTOM - _share(value, axis) * (HEIGHT - TOP - BOTTOM)


def _share(value: float, axis: Axis) -> float:
    low, high, log = axis
    return ((math.log10(value) if log else value) - low) / (high - low)
