"""What came of a plan, as a section of the page: the model before and after, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from headwise.records.plan import Plan
from headwise.records.scores import Scores
from headwise.records.shape import DIMS, ModelShape
from headwise.report.page.positions import positions_chart
from headwise.report.page.template import table
from headwise.report.page.towers import towers
from headwise.report.practice import Rows, exercises
from headwise.report.scores import caption, names, tables

WIDTH, HEIGHT, LEFT, BELOW = 560, 220, 60, 40
Curve = Sequence[tuple[str, int, Mapping[str, float]]]


def result_section(scores: Scores, plan: Plan, shape: ModelShape, curve: Curve = ()) -> str:
    """The scores as an HTML section, what was done to a model of ``shape``, and how healing went."""
    measures, *others = [(title, _table(scores, lines)) for title, lines in tables(scores)]
    kept = "".join(
        f"<tr><th scope='row'>{index}</th>"
        + "".join(
            f"<td>{escape(str(cell))}</td>" for cell in (*((0,) * len(DIMS) if layer is None else layer.dims), phrase)
        )
        + "</tr>"
        for index, (layer, phrase) in enumerate(zip(plan.after(shape), plan.describe(), strict=True))
    )
    columns = ("layer", "heads", "kv heads", "qk dim", "v dim", "change")
    titles = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return f"""<section id="result" aria-labelledby="result-title">
    <h2 id="result-title">Before and after</h2>
    {measures[1]}
    <p class="hint">{escape(caption(scores))} {escape(" ".join(scores.notes))}</p>
    {positions_chart(scores)}
    {"".join(f"<h3>{escape(title)}</h3>{shown}" for title, shown in others)}
    {_needles(scores)}
    {towers(plan)}
    {_healing(curve) if curve else ""}
    <details><summary>What each layer keeps</summary>
    <table class="scores"><thead><tr>{titles}</tr></thead><tbody>{kept}</tbody></table></details>
  </section>"""


def _table(scores: Scores, lines: Rows) -> str:
    columns = ("", *names(scores))
    return (
        f'<div class="scroll"><table class="scores">{table(columns, [(n, *cells) for n, cells in lines])}</table></div>'
    )


def _needles(scores: Scores) -> str:
    """Needles by length and depth at once."""
    lines = exercises(scores, crossed=True)
    shown = f"<details><summary>Needles by length and depth</summary>{_table(scores, lines)}</details>"
    return shown if lines else ""


def _healing(curve: Curve) -> str:
    """Held-out scores while the model healed, as a picture: cut, healed layer by layer, then all together."""
    name = next(iter(curve[0][2]))
    points = [(tokens, scores[name]) for _, tokens, scores in curve]
    most, top = max(tokens for tokens, _ in points) or 1, max(score for _, score in points) or 1.0
    places = [
        (LEFT + tokens / most * (WIDTH - LEFT - 20), HEIGHT - BELOW - score / top * (HEIGHT - BELOW - 20))
        for tokens, score in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
        f"<title>{escape(stage)}, {tokens:,} tokens: {score:.4f}</title></circle>"
        for (x, y), (stage, _, _), (tokens, score) in zip(places, curve, points, strict=True)
    )
    base = HEIGHT - BELOW
    return f"""<h3>Healing</h3>
    <div class="plot healing">
    <svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Held-out {escape(name)} while healing">
      <path class="axis" d="M{LEFT} 12V{base}H{WIDTH - 12}"/>
      <text x="{LEFT - 8}" y="24" text-anchor="end">{top:.3g}</text>
      <text x="{LEFT - 8}" y="{base}" text-anchor="end">0</text>
      <text x="{WIDTH - 12}" y="{base + 18}" text-anchor="end">{most:,} tokens</text>
      <polyline points="{line}"/>{dots}
    </svg></div>
    <p class="hint">{escape(name)} from the dense model on held-out text: {points[0][1]:.4f} when cut,
    {points[-1][1]:.4f} at the end; the best of all points is what was saved.</p>"""
