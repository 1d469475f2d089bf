"""How many heads a task needs, and what theory says about having fewer.

Paper `heads` (The Effect of Attention Head Count on Transformer Approximation), Theorem 2, Corollary 1, Conjecture 1.
A task of intrinsic dimension D looks up D extreme values and combines them,
``F0(min_{t in S_1} f_1(x_t), ..., min_{t in S_D} f_D(x_t))`` with ``|S_i| >= T/4``; the model is one attention layer of
``heads`` heads of ``head_dim``, read at a class token, no norms. M counts the weights of its feed-forward parts that an
error eps takes. `headwise.theory.constructions` has the models behind the upper bounds,
`headwise.theory.intrinsic_dimension` a way to measure D.
"""

import math
from dataclasses import dataclass

from headwise.files.errors import InputError

TOKENS_PER_SQUARE = 50
WIDTH_OF_A_LOOKUP = 2
DEEP_READOUT = 4


@dataclass(frozen=True, slots=True)
class LowerBound:
    """``M = Omega((1/eps)^exponent)``, which says nothing unless the exponent is positive."""

    exponent: float

    @property
    def vacuous(self) -> bool:
        """Whether every model satisfies it."""
        return self.exponent <= 0

    @property
    def exponent_of_deep_readout(self) -> float:
        """What remains of the exponent if up to 5 layers follow the attention instead of 2: a quarter."""
        return self.exponent / DEEP_READOUT

    def __str__(self) -> str:
        if self.vacuous:
            return f"vacuous (exponent {self.exponent:.2f} is not positive)"
        return f"at least about (1/error)^{self.exponent:.2f} feed-forward weights"


def heads_needed(intrinsic_dim: int, layers: int = 1) -> int:
    """Heads per layer that ``intrinsic_dim`` look-ups need for a size free of the length: ``ceil(D / layers)``.

    One layer: Theorem 2 (D heads of width 2 suffice, fewer do not once the text is long enough). More layers:
    Conjecture 1 of the paper, ``layers * heads >= D``, with one experiment behind it (two layers, D = 4: two heads) and
    a later paper of the same group in which depth replaces heads (arXiv 2605.17930).
    """
    return math.ceil(intrinsic_dim / layers)


def lower_bound(tokens: int, head_dim: int, heads: int, intrinsic_dim: int) -> LowerBound:
    """Weights needed with fewer heads than look-ups (Theorem 2(2)): ``(T/4 - h - D + 1) / ((n + 1) h + 1) - 1``.

    Assumes weights of size at most 1, an encoder of norm at most 1, two layers after the attention, and for each f_i a
    single non-degenerate minimum, all at different places. Vacuous over most of what the paper measured: with heads of
    8 and D = 4 at three heads up to T = 136, and in its text task throughout. The drop of the error at ``heads = D``
    that is seen in experiments is much sharper than this explains.
    """
    if not 1 <= heads < intrinsic_dim:
        raise InputError(
            f"The bound is about 1 to {intrinsic_dim - 1} heads for {intrinsic_dim} look-ups, not {heads}."
        )
    return LowerBound((tokens / 4 - heads - intrinsic_dim + 1) / ((head_dim + 1) * heads + 1) - 1)


def first_meaningful_length(head_dim: int, heads: int, intrinsic_dim: int) -> int:
    """The shortest text for which `lower_bound` says something: ``4 ((n + 2) h + D) + 1`` tokens."""
    return 4 * ((head_dim + 2) * heads + intrinsic_dim) + 1


def upper_bound_exponent(
    tokens: int, token_dim: int, head_dim: int, heads: int, intrinsic_dim: int, gamma: float = 2.0
) -> float | None:
    """The exponent with which ``M = O((1/eps)^exponent)`` weights suffice, or None where the paper has no construction.

    ``gamma`` if every look-up has a head of width 2 or more (Theorem 2(1)), ``1 + gamma`` if one head is wide enough to
    hold the whole text, ``T d`` (Theorem 2(3)). ``gamma`` says how hard F0 and the f_i themselves are: 2 for a
    finite Barron norm, ``max(token_dim, intrinsic_dim)`` at worst. The constants hide a power of T.
    """
    if heads >= intrinsic_dim and head_dim >= WIDTH_OF_A_LOOKUP:
        return gamma
    return 1 + gamma if head_dim >= tokens * token_dim else None


def length_that_fixes_dimension(first: int, second: int) -> int:
    """Tokens from which no task has both intrinsic dimensions: ``50 (D1^2 + D2^2)`` (Corollary 1; 50 is generous)."""
    return TOKENS_PER_SQUARE * (first**2 + second**2)
