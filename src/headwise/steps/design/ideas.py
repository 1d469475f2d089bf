"""Ideas as changes of the textbook's draft: what models in use do, and what each paper's formula asks for."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.files.errors import InputError
from headwise.records.blueprint import Images
from headwise.records.design import Request
from headwise.steps.design.drafts import Draft
from headwise.steps.design.predict import condition, missing_heads, rank_share, token_dim, tradeoff
from headwise.steps.design.usual import deep_thin_draft, grouped, head_dims
from headwise.theory.heads_needed import heads_needed
from headwise.theory.lean_depth import Kept, Stack, lean
from headwise.theory.tradeoff import HeadGroup

SHARE = 0.75
EARLY = 3  # the first third of the layers: the papers do not say where early ends
MORE_HEADS, KEEP_LAYERS = 2.0, 2 / 3  # within what paper `depth` chose: 1.33 to 2, a third to two thirds


@dataclass(frozen=True, slots=True)
class Idea:
    """A draft, and what was done to come to it and is predicted of it."""

    draft: Draft
    change: str


def leaner(request: Request, draft: Draft, keep: Kept) -> Idea:
    """Paper `depth`: more heads in fewer layers; what that saves goes to the MLP."""
    before, tokens = draft.layers[0], request.reads.tokens
    stack = Stack(len(draft.layers), draft.width, before.heads, before.head_dim, mlp=draft.width)
    slim = lean(stack, more_heads=MORE_HEADS, keep_layers=KEEP_LAYERS, keep=keep)
    after = HeadGroup(slim.heads, slim.head_dim)
    numbers = [condition(tokens, [heads]) for heads in (after, before)]
    return Idea(
        Draft(draft.width, (after,) * slim.layers),
        f"{slim.layers} layers of {_words(after)} instead of {stack.layers} layers of {_words(before)}, condition "
        f"number of their outputs {_versus('.3g', *numbers)}; what is saved widens the MLP",
    )


def shared(request: Request, draft: Draft) -> Idea:
    """Grouped queries in the proportions of models in use; what that saves goes to the MLP."""
    if isinstance(request.reads, Images):
        raise InputError("A vit keeps no cache that shared keys and values would make smaller.")
    (heads, head_dim), layers = draft.layers[0], len(draft.layers)
    heads, group = grouped(heads)
    return Idea(
        Draft(draft.width, (HeadGroup(heads, head_dim),) * layers, sharing=group),
        f"{heads} heads of {head_dim} on {heads // group} for keys and values; what is saved widens the MLP",
    )


def deep_thin(request: Request, draft: Draft) -> Idea:
    """More layers of less width, as small language models in use have them."""
    thin = deep_thin_draft(request)
    if thin.width >= draft.width or len(thin.layers) <= len(draft.layers):
        raise InputError(f"{len(draft.layers)} layers of width {draft.width} are deep and thin already.")
    first = thin.layers[0]
    on = "" if thin.sharing == 1 else f" on {first.heads // thin.sharing} for keys and values"
    return Idea(
        thin,
        f"{len(thin.layers)} layers of width {thin.width} instead of {len(draft.layers)} of {draft.width}, "
        f"{_words(first)}{on}",
    )


def early_heads(request: Request, draft: Draft) -> Idea:
    """Paper `allocation`: the heads that gather the lags best within the width of the first layers' attention."""
    before = draft.layers[0]
    errors = {heads: tradeoff(request.reads, request.lags, heads) for heads in _cuts(draft)}
    after = min(errors, key=lambda heads: (errors[heads], abs(heads.head_dim - before.head_dim)))
    effect = _versus(".2f", errors[after], tradeoff(request.reads, request.lags, before))
    return _early(
        draft, after, f"error of gathering the lags {effect}, for tokens of {token_dim(request.reads)} dimensions"
    )


def rank_width(request: Request, draft: Draft) -> Idea:
    """Paper `rank`: as many heads as reach a share of the rank limit."""
    reads, before = request.reads, draft.layers[0]
    after = next((heads for heads in _cuts(draft) if rank_share(reads, heads.head_dim) >= SHARE), None)
    if after is None:
        raise InputError(
            f"No head of {', '.join(map(str, head_dims(draft.width)))} reaches {SHARE:.0%} of the rank limit at "
            f"{reads.tokens:,} tokens."
        )
    shares = [rank_share(reads, heads.head_dim) for heads in (after, before)]
    return Idea(
        Draft(draft.width, (after,) * len(draft.layers)),
        f"{_words(after)} instead of {_words(before)}, the narrowest that reach {SHARE:.0%} of the rank limit at "
        f"{reads.tokens:,} tokens ({_versus('.0%', *shares)})",
    )


def enough_heads(request: Request, draft: Draft) -> Idea:
    """Paper `heads`: a head for every look-up in the first layers."""
    if request.intrinsic_dim is None:
        raise InputError("Nobody said how many look-ups the task takes (`intrinsic_dim`).")
    before, count = draft.layers[0], heads_needed(request.intrinsic_dim)
    missing = missing_heads(request.reads.tokens, before, count)
    if missing is None:
        raise InputError(f"There are {before.heads} heads for {count} look-ups without it.")
    after = next((heads for heads in reversed(_cuts(draft)) if heads.heads >= count), None)
    if after is None:
        raise InputError(f"Heads of {min(head_dims(draft.width))} or more leave no room for {count}.")
    fewer = "the lower bound for fewer heads says nothing here" if missing.vacuous else f"fewer heads need {missing}"
    return _early(draft, after, f"for {count} look-ups ({fewer})")


def _cuts(draft: Draft) -> list[HeadGroup]:
    """The ways to cut the width of the first layer's attention into heads, the narrowest heads first."""
    inner = draft.layers[0].heads * draft.layers[0].head_dim
    return [HeadGroup(inner // head_dim, head_dim) for head_dim in head_dims(draft.width) if head_dim <= inner]


def _early(draft: Draft, after: HeadGroup, effect: str) -> Idea:
    """``draft`` with other heads in its early layers."""
    count = max(1, len(draft.layers) // EARLY)
    where = "layer 0" if count == 1 else f"layers 0-{count - 1}"
    change = f"{_words(after)} instead of {_words(draft.layers[0])} in {where}, {effect}"
    return Idea(Draft(draft.width, (*[after] * count, *draft.layers[count:])), change)


def _versus(form: str, after: float, before: float) -> str:
    new, old = format(after, form), format(before, form)
    return f"{new} as before" if new == old else f"{new} instead of {old}"


def _words(heads: HeadGroup) -> str:
    return f"{heads.heads} heads of {heads.head_dim}" if heads.heads > 1 else f"1 head of {heads.head_dim}"
