"""How well conditioned the concatenated outputs of attention heads are.

Paper `depth` (Leaner Transformers: More Heads, Less Depth) argues from Gaussian matrices that more heads condition the
block better. At a fixed total width an independent Gaussian matrix does not know how it is sliced into heads, and at a
fixed head width the number rises with the heads up to a pole where their width meets the number of tokens, and falls
only beyond it.
"""

import math

SQUARE = 4.65  # exp(1.537): an n x n Gaussian matrix has about 4.65 n (Edelman 1988)


def gaussian_condition(tokens: int, width: int) -> float:
    """Condition number to expect of a ``tokens x width`` matrix of independent Gaussian numbers.

    From the edges of its singular values, ``sqrt(width) +- sqrt(tokens)``; near the pole, where they say infinity, that
    of a square matrix.
    """
    a, b = math.sqrt(max(tokens, width)), math.sqrt(min(tokens, width))
    square = SQUARE * min(tokens, width)
    return square if a == b else min((a + b) / (a - b), square)
