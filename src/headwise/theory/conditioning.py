"""How well conditioned the concatenated outputs of attention heads are.

Paper `depth` (Leaner Transformers: More Heads, Less Depth) argues from Gaussian matrices that more heads condition the
block better. At a fixed total width an independent Gaussian matrix does not know how it is sliced into heads, and at a
fixed head width the number rises with the heads up to a pole where their width meets the number of tokens, and falls
only beyond it. Softmax heads at random initialisation are neither Gaussian nor independent: measured, more heads help
them even at a fixed width, nearly all of it from 1 head to 8, and no formula here predicts that.
"""

import math

SQUARE = 4.65  # exp(1.537): an n x n Gaussian matrix has about 4.65 n (Edelman 1988)


def gaussian_condition(tokens: int, width: int) -> float:
    """Condition number to expect of a ``tokens x width`` matrix of independent Gaussian numbers.

    From the edges of its singular values, ``sqrt(width) +- sqrt(tokens)``; near the pole, where they say infinity, that
    of a square matrix. Theorem 3.2 of the paper is this with ``width = heads * head_dim > tokens``.
    """
    a, b = math.sqrt(max(tokens, width)), math.sqrt(min(tokens, width))
    square = SQUARE * min(tokens, width)
    return square if a == b else min((a + b) / (a - b), square)


def worst_head_count(tokens: int, head_dim: int) -> float:
    """The number of heads of ``head_dim`` at which Gaussian outputs are conditioned worst: ``tokens / head_dim``.

    Fewer heads than this get worse with every head added, the opposite of the paper's claim, and long texts keep
    ordinary models there (64 heads of 32 at 2,048 tokens).
    """
    return tokens / head_dim


def heads_jacobian_condition(heads: int, dim: int, spread: float, failure: float = 0.05) -> float:
    """Bound, true with probability ``1 - failure``, on the condition number of ``dim`` rows ``[J_1 ... J_heads]``.

    ``sqrt((1 + delta) / (1 - delta))`` with ``delta = sqrt(3 spread ln(2 dim / failure) / heads)``: matrix Chernoff
    bounds (Tropp 2012) for ``J J^T = sum J_i J_i^T`` of independent, isotropic heads, ``spread`` the largest
    ``|J_i|^2`` over the mean eigenvalue of ``J_i J_i^T`` (at least ``dim`` over the columns of J_i). A stand-in for the
    paper's theorem on the Jacobian, whose exact statement we could not read. Infinite, so vacuous, for fewer than about
    ``3 spread ln(2 dim / failure)`` heads; and at fixed total width, where ``spread`` grows with the heads, it promises
    no gain at all (measured: best at an intermediate head count).
    """
    delta = math.sqrt(3 * spread * math.log(2 * dim / failure) / heads)
    return math.sqrt((1 + delta) / (1 - delta)) if delta < 1 else math.inf


def attention_jacobian_bound(
    *, inputs: float, queries: float, keys: float, values: float, softmax: float, softmax_slope: float
) -> float:
    """Bound on the condition number of the Jacobian of attention from those of its parts.

    ``k(X)^3 k(Lambda) k(W_V) (k(W_Q) + k(W_K)) + k(X) k(softmax)``, with Lambda (``softmax_slope``) the derivative of
    the softmax; from Spectral Conditioning of Attention (arXiv 2603.07162), by the authors of paper `depth`, as
    transcribed by a reader. A diagnostic: the cube of ``k(X)`` usually makes it astronomical.
    """
    return inputs**3 * softmax_slope * values * (queries + keys) + inputs * softmax
