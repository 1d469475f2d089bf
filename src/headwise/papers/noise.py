"""How large a difference of means has to be before it counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def margin(cells: Iterable[Sequence[float]], least: float) -> float:
    """Twice the standard error of the difference of two cells' means; the spread of seeds is pooled over all cells.

    Never below ``least``, which stands alone where no cell has a second seed.
    """
    values = [np.asarray(cell) for cell in cells]
    freedom = sum(len(cell) - 1 for cell in values)
    if not freedom:
        return least
    variance = sum(((cell - cell.mean()) ** 2).sum() for cell in values) / freedom
    return max(least, float(2 * np.sqrt(2 * variance / min(len(cell) for cell in values))))
