"""How far one distribution over classes is from another."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

ROWS_AT_ONCE = 128  # that are taken to float32 probabilities: a vocabulary is wide
LEAST = 1e-9  # of probability that is told from nothing
WORST = 700.0  # nats: no larger perplexity is a number


def perplexity(nats: float) -> float:
    """Of a mean loss in nats."""
    return math.exp(min(nats, WORST))


def divergences(wanted_NC: Tensor, found_NC: Tensor) -> Tensor:
    """KL(wanted || found) of each row of logits, (N,); never negative, however the rounding falls."""
    parts = []
    for wanted, found in zip(wanted_NC.split(ROWS_AT_ONCE), found_NC.split(ROWS_AT_ONCE), strict=True):
        now, before = (logits.float().log_softmax(-1) for logits in (found, wanted))
        parts.append(kl_div(now, before, log_target=True, reduction="none").sum(-1))
    return torch.cat(parts).clamp(min=0.0)


def mean_divergence(wanted_NC: Tensor, found_NC: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(wanted || found) of rows of logits at a temperature, times its square; the mean, with a gradient for found.

    The gradient is made on the way and in the dtype of the logits, so that only one more tensor of their size is held.
    """
    return _MeanDivergence.apply(wanted_NC, found_NC, temperature)


class _MeanDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted_NC: Tensor, found_NC: Tensor, temperature: float) -> Tensor:
        gradient = torch.empty_like(found_NC)
        total = torch.zeros((), device=found_NC.device)
        parts = (tensor.split(ROWS_AT_ONCE) for tensor in (wanted_NC, found_NC, gradient))
        for wanted, found, slope in zip(*parts, strict=True):
            before = (wanted.float() / temperature).log_softmax(-1)
            now = (found.float() / temperature).log_softmax(-1)
            likely = before.exp()
            total += torch.dot(likely.flatten(), (before - now).flatten())
            slope.copy_(now.exp_().sub_(likely))
        ctx.save_for_backward(gradient)
        ctx.factor = temperature / len(found_NC)
        return total * temperature**2 / len(found_NC)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.saved_tensors[0] * (outer[0] * ctx.factor), None


def most_likely(logits_NC: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest classes of each row and their log-probabilities: what is worth keeping of a wide row."""
    classes, logs = [], []
    for rows in logits_NC.split(ROWS_AT_ONCE):
        best = (rows.float() / temperature).log_softmax(-1).topk(k, dim=-1)
        classes.append(best.indices.int())
        logs.append(best.values)
    return torch.cat(classes), torch.cat(logs)


def mean_divergence_of_likely(
    classes_NK: Tensor, logs_NK: Tensor, found_NC: Tensor, temperature: float = 1.0
) -> Tensor:
    """`mean_divergence` from rows of which only the likeliest classes are known; the rest counts as one class."""
    likely_NK, classes_NK = logs_NK.float().exp(), classes_NK.long()
    now_NK = (found_NC.float() / temperature).log_softmax(-1).gather(-1, classes_NK)
    rest_N, now_rest_N = ((1 - part.sum(-1)).clamp(min=LEAST) for part in (likely_NK, now_NK.exp()))
    known_N = (likely_NK * (logs_NK.float() - now_NK)).sum(-1)
    return (known_N + rest_N * (rest_N.log() - now_rest_N.log())).mean() * temperature**2
