"""From a budget to shapes of one size: the usual one, what models in use and papers do, and which to try first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headwise.files.errors import InputError
from headwise.records.blueprint import BUILDABLE, Images, Text
from headwise.records.cost import cost_of
from headwise.records.design import DTYPE, Candidate, Design, Request
from headwise.records.plan import Plan
from headwise.records.settings import DesignConfig
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
TEXT = {"vocab": 8192, "context": 1024}
IMAGES = {"image_size": 224, "patch_size": 16, "channels": 3, "labels": 1000}
DIGITS = 4


def design(
    params: int,
    *,
    family: str = "llama",
    context: int | None = None,
    vocab: int | None = None,
    kv_bytes_per_token: int | None = None,
    image_size: int | None = None,
    patch_size: int | None = None,
    channels: int | None = None,
    labels: int | None = None,
    lags: tuple[float, ...] = (1.0, 0.5, 0.25),
    intrinsic_dim: int | None = None,
) -> Design:
    """Shapes for a model that does not exist yet, all of ``params`` parameters, the usual one first.

    ``family`` is llama or gpt2 (for text: ``context``, ``vocab``) or vit (for images: ``image_size``, ``patch_size``,
    ``channels``, ``labels``). ``kv_bytes_per_token`` limits the KV cache; ``lags`` say how strongly early layers gather
    the last tokens, ``intrinsic_dim`` how many independent look-ups the task takes, if known.

    >>> proposal = hw.design(params=30_000_000, context=1024)
    >>> proposal.candidates[0].name
    'textbook'
    >>> plan = proposal.choose().plan
    >>> plan.shape_to_build().total_parameters() < 31_000_000
    True
    """
    config = DesignConfig(
        params,
        context,
        vocab,
        kv_bytes_per_token,
        image_size,
        patch_size,
        channels,
        labels,
        lags,
        intrinsic_dim,
    )
    return propose(request_of(config, family))


def propose(request: Request) -> Design:
    """Candidate shapes for ``request``, each as close to its parameters as whole widths allow, and a recommendation.

    Recommended is what trainings speak for, see `headwise.steps.design.evidence`: no formula decides.
    """
    usual = usual_draft(request)
    plan = _plan(request, usual)
    candidates = [Candidate(USUAL, _usual_words(request, plan), plan, measured(USUAL, plan))]
    left_out: dict[str, str] = {}
    for name, (source, idea) in IDEAS.items():
        try:
            proposed = idea(request, usual)
            plan = _plan(request, proposed.draft)
        except InputError as error:
            left_out[name] = str(error)
            continue
        same = next((each.name for each in candidates if each.plan == plan), None)
        if same is None:
            candidates.append(Candidate(name, f"{source}: {proposed.change}.", plan, measured(name, plan)))
        else:
            left_out[name] = f"The same as {same}."
    return Design(request, tuple(candidates), *recommend(candidates), left_out)


def request_of(config: DesignConfig, family: str) -> Request:
    """What a model of ``family`` is asked to be."""
    if family not in BUILDABLE:
        raise InputError(f"`family` must be {', '.join(BUILDABLE)}, got {family!r}.")
    reads = BUILDABLE[family].reads
    own, other = (TEXT, IMAGES) if reads is Text else (IMAGES, TEXT)
    surplus = [f"`{name}`" for name in other if getattr(config, name) is not None]
    if surplus:
        raise InputError(f"A {family} model reads {reads.__name__.lower()}: leave out {', '.join(surplus)}.")
    given = {name: getattr(config, name) for name in own}
    filled = [own[name] if value is None else value for name, value in given.items()]
    ends = Text(*filled, tied=True) if reads is Text else Images(*filled)
    return Request(family, config.params, ends, config.kv_bytes_per_token, config.lags, config.intrinsic_dim)


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
