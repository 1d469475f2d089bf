"""What came of a plan, as a section of the page: the model before and after, side by side."""

from __future__ import annotations

from html import escape

from headwise.records.plan import Plan
from headwise.records.scores import Scores
from headwise.report.scores import caption, names, rows


def result_section(scores: Scores, plan: Plan) -> str:
    """The scores as an HTML section."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("", *names(scores)))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows(scores)
    )
    kept = "".join(
        f"<tr><th scope='row'>{index}</th><td>{layer.heads}</td><td>{layer.kv_heads}</td><td>{layer.qk_dim}</td>"
        f"<td>{layer.v_dim}</td></tr>"
        for index, layer in enumerate(plan.layers)
    )
    titles = "".join(f'<th scope="col">{name}</th>' for name in ("layer", "heads", "kv heads", "qk dim", "v dim"))
    return f"""<section id="result" aria-labelledby="result-title">
    <h2 id="result-title">Before and after</h2>
    <table class="scores"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
    <p class="hint">{escape(caption(scores))} {escape(" ".join(scores.notes))}</p>
    <details><summary>What each layer keeps</summary>
    <table class="scores"><thead><tr>{titles}</tr></thead><tbody>{kept}</tbody></table></details>
  </section>"""
