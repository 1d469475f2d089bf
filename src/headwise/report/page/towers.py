"""A plan as two towers of blocks, before and after: what goes, what stays, and what becomes one."""

from __future__ import annotations

from html import escape

from headwise.records.plan import Plan

STEP, BLOCK, WIDE = 18, 14, 90
LEFT, RIGHT, WIDTH, TOP = 110, 330, 560, 16


def towers(plan: Plan) -> str:
    """An SVG of the blocks in their order, first at the bottom; nothing where every block stays one of its own."""
    depth, runs, phrases = len(plan.layers), plan.made_of(), plan.describe()
    if len(runs) == depth:
        return ""
    base = TOP + STEP * depth
    place = {number: level for level, run in enumerate(runs) for number in run}
    shapes = []
    for number, phrase in enumerate(phrases):
        y, level = base - STEP * (number + 1), place.get(number)
        gone = "" if level is not None else ' stroke-dasharray="3 3"'
        words = f"{number}" if level is not None else f"{number}, dropped"
        shapes.append(_block(LEFT, y, WIDE, f"block {number}: {phrase or 'as it was'}", gone))
        shapes.append(f'<text x="{LEFT - 8}" y="{y + BLOCK - 3}" text-anchor="end">{words}</text>')
        if level is not None:
            middle, end = y + BLOCK / 2, base - STEP * (level + 1) + BLOCK / 2
            shapes.append(f'<path class="axis" d="M{LEFT + WIDE} {middle}L{RIGHT} {end}"/>')
    for level, run in enumerate(runs):
        y, wide = base - STEP * (level + 1), round(WIDE * (1 + 0.4 * (len(run) - 1)))
        words = " + ".join(map(str, run))
        shapes.append(_block(RIGHT, y, wide, f"made of {words}", ""))
        if len(run) > 1:
            shapes.append(f'<text x="{RIGHT + wide + 8}" y="{y + BLOCK - 3}">{words} side by side</text>')
    told = f"{depth} blocks become {len(runs)}"
    return f"""<h3>{told}</h3>
    <div class="plot towers">
    <svg viewBox="0 0 {WIDTH} {base + 8}" role="img" aria-label="{told}: towers of blocks before and after">
      {"".join(shapes)}
    </svg></div>"""


def _block(x: int, y: int, width: int, title: str, dashes: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{BLOCK}" rx="2" fill="none" stroke="currentColor"{dashes}>'
        f"<title>{escape(title)}</title></rect>"
    )
