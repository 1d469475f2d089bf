"""Each paper's idea as a change of a draft, and the one draft that takes over what its own formula favours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwise.records.design import Request
from headwise.records.errors import InputError
from headwise.steps.design.drafts import Draft
from headwise.steps.design.predict import condition, missing_heads, rank_share, token_dim, tradeoff
from headwise.theory.hard_rank import head_dim_for_share
from headwise.theory.heads_needed import WIDTH_OF_A_LOOKUP, heads_needed
from headwise.theory.lean_depth import Kept, Stack, lean
from headwise.theory.tradeoff import HeadGroup, allocate

SHARE = 0.75
EARLY = 3  # the first third of the layers: the papers do not say where early ends
MULTIPLE = 8
MORE_HEADS, KEEP_LAYERS = 2.0, 2 / 3  # within what paper `depth` chose: 1.33 to 2, a third to two thirds


@dataclass(frozen=True, slots=True)
class Idea:
    """A draft, what was done to come to it and what that is predicted to do, and whether the prediction is a gain."""

    draft: Draft
    change: str
    gain: bool


def early_heads(request: Request, draft: Draft) -> Idea:
    """Paper `allocation`: the exact allocator shares the width of the first layers' attention among the lags."""
    before, dim = draft.layers[0], token_dim(request.reads)
    inner = before.heads * before.head_dim
    widest = max(group.head_dim for group in allocate(inner, dim, request.lags).groups)
    if not widest:
        raise InputError(f"Attention {inner} wide fetches no token of {dim} dimensions.")
    head_dim = min(inner, 2 * math.ceil(widest / 2))  # RoPE turns pairs
    after = HeadGroup(inner // head_dim, head_dim)
    errors = [tradeoff(request.reads, request.lags, heads) for heads in (after, before)]
    change = f"error of gathering the lags {_versus('.2f', *errors)}, for tokens of {dim} dimensions"
    return _early(draft, after, change, gain=errors[0] < errors[1])


def enough_heads(request: Request, draft: Draft) -> Idea:
    """Paper `heads`: a head for every look-up in the first layers."""
    before, count = draft.layers[0], heads_needed(request.intrinsic_dim)
    inner = before.heads * before.head_dim
    missing = missing_heads(request.reads.tokens, before, count)
    if missing is None:
        raise InputError(f"There are {before.heads} heads for {count} look-ups without it.")
    head_dim = inner // count // WIDTH_OF_A_LOOKUP * WIDTH_OF_A_LOOKUP
    if not head_dim:
        raise InputError(f"Attention {inner} wide has no room for {count} heads of {WIDTH_OF_A_LOOKUP}.")
    fewer = "the lower bound for fewer heads says nothing here" if missing.vacuous else f"fewer heads need {missing}"
    return _early(draft, HeadGroup(count, head_dim), f"for {count} look-ups ({fewer})", gain=not missing.vacuous)


def rank_width(request: Request, draft: Draft, first: int = 0) -> Idea:
    """Paper `rank`: from layer ``first`` on, as many heads as reach a share of the rank limit."""
    tokens, before = request.reads.tokens, draft.layers[-1]
    inner = before.heads * before.head_dim
    head_dim = MULTIPLE * math.ceil(head_dim_for_share(tokens, SHARE) / MULTIPLE)
    if head_dim > inner:
        raise InputError(
            f"A head of {head_dim}, for {SHARE:.0%} of the rank limit, is wider than all attention, {inner}."
        )
    after = HeadGroup(inner // head_dim, head_dim)
    shares = [rank_share(tokens, heads.head_dim) for heads in (after, before)]
    layers = (*draft.layers[:first], *[after] * (len(draft.layers) - first))
    return Idea(
        Draft(draft.width, layers),
        f"{_words(after)} instead of {_words(before)} in {_range(first, len(layers))}, just wide enough for "
        f"{SHARE:.0%} of the rank limit at {tokens:,} tokens ({_versus('.0%', *shares)})",
        gain=after.heads > before.heads or shares[1] < SHARE,
    )


def leaner(request: Request, draft: Draft, keep: Kept) -> Idea:
    """Paper `depth`: more heads in fewer layers; what that saves goes to the MLP."""
    before, tokens = draft.layers[0], request.reads.tokens
    stack = Stack(len(draft.layers), draft.width, before.heads, before.head_dim, mlp=draft.width)
    found = lean(stack, more_heads=MORE_HEADS, keep_layers=KEEP_LAYERS, keep=keep)
    after = HeadGroup(found.heads, found.head_dim)
    numbers = [condition(tokens, [heads]) for heads in (after, before)]
    return Idea(
        Draft(draft.width, (after,) * found.layers),
        f"{found.layers} layers of {_words(after)} instead of {stack.layers} layers of {_words(before)}, condition "
        f"number of their outputs {_versus('.3g', *numbers)}; what is saved widens the MLP",
        gain=numbers[0] < numbers[1],
    )


def combined(request: Request, usual: Draft) -> Idea:
    """The usual draft with every idea that its own formula predicts a gain for, unless the lags are gathered worse.

    Depth comes first, for it settles how many layers there are and how wide their attention is (by the convention that
    keeps heads as wide as they are; the other leaves the condition number as it is). Then the later layers go by the
    rank, the early ones by the lags and the look-ups.
    """
    ideas: Sequence[Callable[[Draft], Idea]] = (
        lambda draft: leaner(request, draft, "head_dim"),
        lambda draft: rank_width(request, draft, _early_layers(draft)),
        lambda draft: early_heads(request, draft),
        lambda draft: enough_heads(request, draft),
    )
    draft, changes = usual, []
    allowed = tradeoff(request.reads, request.lags, usual.layers[0])
    for idea in ideas:
        try:
            found = idea(draft)
        except InputError:
            continue
        if found.gain and tradeoff(request.reads, request.lags, found.draft.layers[0]) <= allowed:
            draft = found.draft
            changes.append(found.change)
    return Idea(draft, "; ".join(changes), gain=draft != usual)


def _early(draft: Draft, after: HeadGroup, effect: str, gain: bool) -> Idea:
    """``draft`` with other heads in its early layers."""
    count = _early_layers(draft)
    change = f"{_words(after)} instead of {_words(draft.layers[0])} in {_range(0, count)}, {effect}"
    return Idea(Draft(draft.width, (*[after] * count, *draft.layers[count:])), change, gain)


def _early_layers(draft: Draft) -> int:
    return max(1, len(draft.layers) // EARLY)


def _versus(form: str, after: float, before: float) -> str:
    new, old = format(after, form), format(before, form)
    return f"{new} as before" if new == old else f"{new} instead of {old}"


def _words(heads: HeadGroup) -> str:
    return f"{heads.heads} heads of {heads.head_dim}" if heads.heads > 1 else f"1 head of {heads.head_dim}"


def _range(first: int, end: int) -> str:
    return f"layer {first}" if end - first == 1 else f"layers {first}-{end - 1}"
