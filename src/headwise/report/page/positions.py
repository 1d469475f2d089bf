"""Loss by position in the window as a picture: what each model adds to the first, with its error."""

from __future__ import annotations

from html import escape

from headwise.records.scores import PartScores, Scores
from headwise.report.practice import stretches
from headwise.report.scores import names

WIDTH, HEIGHT, LEFT, BELOW, TOP = 560, 200, 60, 40, 16
COLOURS = 4


def positions_chart(scores: Scores) -> str:
    """A figure of the loss increase over positions; "" where nothing was compared at several of them."""
    parts = stretches(scores)
    compared = [place for place in range(1, len(scores.models)) if any(_ends(own[place]) for _, own in parts)]
    if not parts or not compared:
        return ""
    ends = [end for _, own in parts for place in compared for end in _ends(own[place])]
    low, high = min(0.0, *ends), max(0.0, *ends) or 1e-6
    base = HEIGHT - BELOW
    step, up = (WIDTH - LEFT - 20) / len(parts), (base - TOP) / (high - low)
    drawn, zero = [], base - (0 - low) * up
    for column, (stretch, own) in enumerate(parts):
        x = LEFT + step * (column + 0.5)
        label = stretch.removeprefix("tokens ")
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{escape(label)}</text>')
        for number, place in enumerate(compared):
            if (increase := _increase(own[place])) is None:
                continue
            at = x + 12 * (number - (len(compared) - 1) / 2)
            below, above = (base - (end - low) * up for end in _ends(own[place]))
            drawn.append(
                f'<g class="s{number % COLOURS}"><title>{escape(names(scores)[place])}, {escape(stretch)}: '
                f'{increase:+.4f}</title><path d="M{at:.1f} {below:.1f}V{above:.1f}"/>'
                f'<circle cx="{at:.1f}" cy="{base - (increase - low) * up:.1f}" r="4"/></g>'
            )
    legend = "".join(
        f'<span><b class="s{number % COLOURS}"></b> {escape(names(scores)[place])}</span>'
        for number, place in enumerate(compared)
    )
    return f"""<h3>Loss increase by position in the window</h3>
    <div class="plot seeds">
    <svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Loss increase by position in the window">
      <path class="axis" d="M{LEFT} {TOP}V{base}M{LEFT} {zero:.1f}H{WIDTH - 12}"/>
      <text x="{LEFT - 8}" y="{TOP + 8}" text-anchor="end">{high:.3g}</text>
      <text x="{LEFT - 8}" y="{base}" text-anchor="end">{low:.3g}</text>{"".join(drawn)}
    </svg></div>
    <p class="legend lines">{legend}</p>
    <p class="hint">Nats per token above {escape(names(scores)[0])}; lines are one standard error over windows.</p>"""


def _increase(part: PartScores | None) -> float | None:
    return None if part is None else part.loss_increase


def _ends(part: PartScores | None) -> tuple[float, ...]:
    """One standard error below and above."""
    if part is None or part.loss_increase is None:
        return ()
    error = part.loss_increase_error or 0.0
    return part.loss_increase - error, part.loss_increase + error
