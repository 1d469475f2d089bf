"""What was trained of the candidates' kinds, and the recommendation that rests on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.records.design import Apart, Candidate, Measured
from headwise.records.plan import Plan

FILE = "results/shapes.json"  # the figures below are its readings
FAMILY, NARROWEST = "llama", 16  # what it has: no shared keys and values, no narrower heads
WHERE = "llamas of 1.5M parameters, context 256, 600,000 tokens, 3 seeds, on one CPU thread each"
TRAINED = {
    "textbook": Measured(FILE, WHERE, tokens=Apart(0.0, 0.0), time=Apart(0.0, 0.0)),
    "lean-width": Measured(FILE, WHERE, tokens=Apart(-0.071, 0.074), time=Apart(-0.103, 0.075)),
    "lean-head-dim": Measured(FILE, WHERE, tokens=Apart(0.422, 0.051), time=Apart(0.476, 0.033)),
}


def measured(name: str, plan: Plan) -> Measured | None:
    """What came out for the candidate ``name``, if ``plan`` is of the kind that was trained."""
    alike = all(layer.heads == layer.kv_heads and layer.qk_dim >= NARROWEST for layer in plan.shape_to_build().layers)
    return TRAINED.get(name) if alike and plan.family == FAMILY else None


def recommend(candidates: Sequence[Candidate]) -> tuple[str, str]:
    """The candidate whose kind did best at equal wall-clock, if better than the usual one, the first; and why."""
    usual = candidates[0]
    best = min(candidates, key=lambda each: each.measured.time.difference if each.measured else 0.0)
    trials = best.measured
    if usual.measured is None or trials is None or not trials.time.better:  # both kinds must be those that were trained
        return usual.name, (
            f"Nothing that was measured speaks for another shape here: {FILE} has {WHERE}, with heads of {NARROWEST} "
            "or more that share no keys and values. Formulas alone decide nothing."
        )
    else_usual = "" if trials.tokens.better else f", so if tokens are scarcer than hours, {usual.name} is as good"
    return best.name, (
        f"Equal wall-clock decides, and there its kind was {trials.time} against {usual.name}; at equal tokens it was "
        f"{trials.tokens}{else_usual}. That was measured once, in {FILE}, on {WHERE}; no other size was. "
        f"{_cache_words(best, usual)}"
    )


def _cache_words(candidate: Candidate, usual: Candidate) -> str:
    own, other = (each.cost.kv_bytes_per_token for each in (candidate, usual))
    change = (
        f"{abs(own / other - 1):.0%} {'smaller' if own < other else 'larger'} than" if own != other else "as large as"
    )
    return f"Its KV cache is {change} that of {usual.name}."
