"""From a budget to shapes of one size: the usual one, what models in use and papers do, and which to try first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from headwise.files.errors import InputError
from headwise.records.blueprint import BUILDABLE, Images, Text
from headwise.records.cost import cost_of
from headwise.records.design import DTYPE, Candidate, Design, Request
from headwise.records.plan import Plan
from headwise.steps.design.drafts import Draft, finished
from headwise.steps.design.evidence import measured, recommend
from headwise.steps.design.ideas import Idea, deep_thin, early_heads, enough_heads, leaner, rank_width, shared
from headwise.steps.design.predict import condition, missing_heads, rank_share, tradeoff
from headwise.steps.design.usual import mlp_ratio, usual_draft

USUAL = "textbook"
IDEAS: dict[str, tuple[str, Callable[[Request, Draft], Idea]]] = {
    "lean-width": (
        "Paper depth, attention as wide as before",
        lambda request, draft: leaner(request, draft, "width"),
    ),
    "lean-head-dim": (
        "Paper depth, heads as wide as before",
        lambda request, draft: leaner(request, draft, "head_dim"),
    ),
    "grouped": ("Models in use (SmolLM2, Qwen3)", shared),
    "deep-thin": ("Models in use (MobileLLM, SmolLM2)", deep_thin),
    "early-heads": ("Paper allocation", early_heads),
    "rank-width": ("Paper rank", rank_width),
    "enough-heads": ("Paper heads", enough_heads),
}
DEFAULTS = {"vocab": 8192, "context": 1024, "image-size": 224, "patch-size": 16, "channels": 3, "labels": 1000}
DIGITS = 4


def design(request: Request) -> Design:
    """Candidate shapes for ``request``, each as close to its parameters as whole widths allow, and a recommendation.

    Recommended is what trainings speak for, see `headwise.steps.design.evidence`: no formula decides.
    """
    usual = usual_draft(request)
    plan = _plan(request, usual)
    candidates = [Candidate(USUAL, _usual_words(request, plan), plan, measured(USUAL, plan))]
    left_out: dict[str, str] = {}
    for name, (source, idea) in IDEAS.items():
        try:
            found = idea(request, usual)
            plan = _plan(request, found.draft)
        except InputError as error:
            left_out[name] = str(error)
            continue
        same = next((each.name for each in candidates if each.plan == plan), None)
        if same is None:
            candidates.append(Candidate(name, f"{source}: {found.change}.", plan, measured(name, plan)))
        else:
            left_out[name] = f"The same as {same}."
    return Design(request, tuple(candidates), *recommend(candidates), left_out)


def read_ends(family: str, text: Mapping[str, int | None], images: Mapping[str, int | None]) -> Text | Images:
    """What a model of ``family`` reads, from the options that are given for text and for images."""
    reads = BUILDABLE[family].reads
    own, other = (text, images) if reads is Text else (images, text)
    surplus = [f"--{name}" for name, value in other.items() if value is not None]
    if surplus:
        raise InputError(f"A {family} model reads {reads.__name__.lower()}: leave out {', '.join(surplus)}.")
    filled = [DEFAULTS[name] if value is None else value for name, value in own.items()]
    return Text(*filled, tied=True) if reads is Text else Images(*filled)


def _plan(request: Request, draft: Draft) -> Plan:
    """The plan of ``draft`` with what it costs and what the papers predict for it."""
    plan = finished(request, draft)
    tokens, first = request.reads.tokens, draft.layers[0]
    cost = cost_of(plan.shape_to_build(), tokens, dtype=DTYPE)
    missing = missing_heads(tokens, first, request.intrinsic_dim)
    predicted = {
        "parameters": cost.total_parameters,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "prefill_flops": cost.prefill_flops,
        "decode_flops": cost.decode_flops,
        "rank_share": [round(rank_share(request.reads, heads.head_dim), DIGITS) for heads in draft.layers],
        "condition": round(condition(tokens, draft.layers), DIGITS),
        "tradeoff_error": round(tradeoff(request.reads, request.lags, first), DIGITS),
        "lookup_exponent": None if missing is None else round(missing.exponent, DIGITS),
    }
    return replace(plan, predicted=predicted)


def _usual_words(request: Request, plan: Plan) -> str:
    first, ratio = plan.shape_to_build().layers[0], plan.require_blueprint().mlp / plan.width
    shared = "" if first.kv_heads == first.heads else f" on {first.kv_heads} for keys and values"
    return (
        f"The usual shape at this size: {len(plan.layers)} layers of width {plan.width}, {first.heads} heads of "
        f"{first.qk_dim}{shared}, an MLP {ratio:.2f} times as wide (usual: {mlp_ratio(request.family):.2f})."
    )
