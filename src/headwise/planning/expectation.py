"""What a predicted loss increase is worth, by what the checks of a profile measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from headwise.records.profile import Check, Profile


def checks_of(profile: Profile, rounded: bool) -> list[Check]:
    """The checks of a ``profile`` that tell of plans which round the cache, or of those which do not."""
    return [check for check in profile.checks if check.rounded == rounded]


def expected(checks: Sequence[Check], predicted: float) -> float | None:
    """What a prediction is worth: times what cuts measured of their prediction, between the nearest ``checks``.

    Their ratio is interpolated over the logarithm of the prediction, and beyond the first and last one stays as it is
    there. None without checks.
    """
    known = sorted((math.log(check.predicted), check.measured / check.predicted) for check in checks if check.predicted)
    if not known:
        return None
    if predicted <= 0:
        return 0.0
    place = min(max(math.log(predicted), known[0][0]), known[-1][0])
    for (low, first), (high, second) in pairwise(known):
        if low <= place <= high and low < high:
            return predicted * (first + (second - first) * (place - low) / (high - low))
    return predicted * known[0][1]


def expected_agreement(checks: Sequence[Check], predicted: float) -> float | None:
    """The cosine of embeddings to expect: what is missing to 1 grows with the prediction as the checks say."""
    known = [Check(check.predicted, 1 - check.agreement) for check in checks if check.agreement is not None]
    missing = expected(known, predicted)
    return None if missing is None else max(-1.0, 1 - missing)
