"""Candidate shapes as one HTML file that opens anywhere, offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from headwise.files.writing import write_text
from headwise.records.blueprint import Text
from headwise.records.design import Candidate, Design, Request
from headwise.records.shape import LayerShape
from headwise.report.costs import count, size
from headwise.report.designs import COLUMNS, HINT, reasons, rows
from headwise.report.page.template import filled, table

WIDTH, LEFT, RIGHT = 560, 110, 80
ROW, BAR, GAP = 26, 9, 2
MANY_HEADS = 160  # lines between more of them would run together
Parts = Sequence[tuple[str, int]]


def write_design_page(design: Design, path: Path) -> None:
    """Write ``design`` as a self-contained page."""
    write_text(path, render_design(design))


def render_design(design: Design) -> str:
    """The page as text."""
    widest = max(layer.heads * layer.qk_dim for candidate in design.candidates for layer in candidate.shape.layers)
    parts = {
        "TITLE": escape(f"{design.request.family}, {count(design.request.parameters)} parameters"),
        "SENTENCE": escape(f"Recommended: {design.recommended}. {design.because}"),
        "FACTS": escape(_facts(design.request)),
        "TABLE": _table(design),
        "HINT": escape(HINT),
        "REASONS": _reasons(design),
        "LAYERS": "".join(_layers(candidate, widest) for candidate in design.candidates),
        "SPLIT": _bars([(candidate.name, _split(candidate)) for candidate in design.candidates], count),
        "CACHE": _cache(design),
        "FIRST": "candidates",
        "SOURCE": "the JSON that <code>headwise design --json</code> prints",
    }
    return filled("design", parts)


def _facts(request: Request) -> str:
    reads = request.reads
    ends = (
        f"vocabulary {reads.vocab:,}, context {reads.context:,}"
        if isinstance(reads, Text)
        else f"images of {reads.size} in patches of {reads.patch}, {reads.channels} channels, {reads.labels:,} labels"
    )
    cache = "" if request.kv_bytes_per_token is None else f", at most {request.kv_bytes_per_token:,} KV bytes per token"
    lags = ", ".join(f"{lag:g}" for lag in request.lags)
    lookups = "" if request.intrinsic_dim is None else f"; {request.intrinsic_dim} look-ups"
    return f"At most {request.parameters:,} parameters{cache}; {ends}; lags {lags}{lookups}."


def _table(design: Design) -> str:
    marked = [(each.name == design.recommended, row) for each in design.candidates for row in rows(each)]
    return table(COLUMNS, [row for _, row in marked], [mark for mark, _ in marked])


def _reasons(design: Design) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(why)}</dd>" for name, why in reasons(design))


def _layers(candidate: Candidate, widest: int) -> str:
    """Attention layers of one candidate as bars cut into heads."""
    layers = candidate.shape.layers
    bars = "".join(_bar(index, layer, WIDTH / widest) for index, layer in enumerate(layers))
    return f"""<figure><figcaption>{escape(candidate.name)}</figcaption><div class="plot">
    <svg viewBox="0 0 {WIDTH} {len(layers) * (BAR + GAP)}" role="img"
      aria-label="Heads of the {len(layers)} layers of {escape(candidate.name)}">{bars}</svg></div></figure>"""


def _bar(index: int, layer: LayerShape, scale: float) -> str:
    top, wide = index * (BAR + GAP), layer.heads * layer.qk_dim * scale
    cuts = range(1, layer.heads) if layer.heads <= MANY_HEADS else ()
    lines = "".join(f"M{cut * layer.qk_dim * scale:.1f} {top}v{BAR}" for cut in cuts)
    return (
        f"<g><title>layer {index}: {layer.heads} heads of {layer.qk_dim}, {layer.kv_heads} for keys and values</title>"
        f'<rect class="attention" x="0" y="{top}" width="{wide:.1f}" height="{BAR}"/>'
        f'<path class="cut" d="{lines}"/></g>'
    )


def _split(candidate: Candidate) -> Parts:
    shape = candidate.shape
    attention = shape.attention_parameters()
    rest = shape.total_parameters() - attention - shape.outside_parameters
    return (("ends", shape.outside_parameters), ("attention", attention), ("rest", rest))


def _cache(design: Design) -> str:
    """KV bytes of one token, for models that have a cache."""
    cached = [(candidate.name, [("attention", candidate.cost.kv_bytes_per_token)]) for candidate in design.candidates]
    if not any(parts[0][1] for _, parts in cached):
        return ""
    return f"""<section aria-labelledby="cache-title">
    <h2 id="cache-title">KV cache of one token</h2>
    <div class="plot bars">{_bars(cached, size)}</div>
    <p class="hint">In 16 bit.</p>
  </section>"""


def _bars(named: Sequence[tuple[str, Parts]], show: Callable[[int], str]) -> str:
    """One bar for each name, made of its parts, with the sum behind it."""
    most = max(sum(value for _, value in parts) for _, parts in named)
    drawn = []
    for index, (name, parts) in enumerate(named):
        x, top = float(LEFT), index * ROW
        drawn.append(f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(name)}</text>')
        for kind, value in parts:
            wide = value / most * (WIDTH - LEFT - RIGHT)
            drawn.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{top + 5}" width="{wide:.1f}" height="{ROW - 9}">'
                f"<title>{escape(name)}: {show(value)}</title></rect>"
            )
            x += wide
        total = show(sum(value for _, value in parts))
        drawn.append(f'<text x="{x + 8:.1f}" y="{top + 17}">{total}</text>')
    label = "; ".join(f"{name} {show(sum(value for _, value in parts))}" for name, parts in named)
    return (
        f'<svg viewBox="0 0 {WIDTH} {len(named) * ROW}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'
    )
