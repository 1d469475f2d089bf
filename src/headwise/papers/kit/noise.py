"""How large a difference of means has to be before it counts: twice its standard error, by the spread of seeds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike


def margin(cells: Iterable[ArrayLike], least: float, *, over: int = 1) -> float:
    """For the difference of two means over the seeds of ``over`` cells each; the spread is pooled over all cells.

    Never below ``least``, which stands alone where no cell has a second seed.
    """
    return _twice_error(cells, least, 2 / over)


def paired_margin(differences: Iterable[ArrayLike], least: float) -> float:
    """The same where seeds go together: for the mean of one of the ``differences``."""
    return _twice_error(differences, least, 1.0)


def _twice_error(cells: Iterable[ArrayLike], least: float, share: float) -> float:
    values = [np.asarray(cell) for cell in cells]
    freedom = sum(len(cell) - 1 for cell in values)
    if not freedom:
        return least
    variance = sum(((cell - cell.mean()) ** 2).sum() for cell in values) / freedom
    return max(least, float(2 * np.sqrt(share * variance / min(len(cell) for cell in values))))
