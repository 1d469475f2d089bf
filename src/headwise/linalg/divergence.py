"""How far one distribution over classes is from another."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div

ROWS_AT_ONCE = 128  # that are taken to float32 probabilities: a vocabulary is wide


def divergence(wanted_NC: Tensor, found_NC: Tensor) -> float:
    """KL(wanted || found) of rows of logits, summed over the rows."""
    total = 0.0
    for wanted, found in zip(wanted_NC.split(ROWS_AT_ONCE), found_NC.split(ROWS_AT_ONCE), strict=True):
        now, before = (logits.float().log_softmax(-1) for logits in (found, wanted))
        total += kl_div(now, before, log_target=True, reduction="sum").item()
    return total
