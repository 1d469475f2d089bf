"""KL divergences between rows of logits, a wide vocabulary at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

ROWS_AT_ONCE = 128  # that are taken to float32 probabilities: a vocabulary is wide
LEAST = 1e-9  # the smallest probability of the rest: its logarithm stays finite
WORST = 700.0  # nats: no larger perplexity is a number


def perplexity(nats: float) -> float:
    """Of a mean loss in nats."""
    return math.exp(min(nats, WORST))


def divergences(baseline_NC: Tensor, logits_NC: Tensor) -> Tensor:
    """KL(baseline || model) of each row of their logits, (N,); never negative, however the rounding falls."""
    parts = []
    for baseline, logits in zip(baseline_NC.split(ROWS_AT_ONCE), logits_NC.split(ROWS_AT_ONCE), strict=True):
        log_q, log_p = (rows.float().log_softmax(-1) for rows in (logits, baseline))
        parts.append(kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1))
    return torch.cat(parts).clamp(min=0.0)


def mean_divergence(baseline_NC: Tensor, logits_NC: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(baseline || model) of rows of logits at a temperature, times its square: the mean, with a gradient.

    The gradient is computed in the forward pass and in the dtype of the logits: one more tensor of their size.
    """
    return _MeanDivergence.apply(baseline_NC, logits_NC, temperature)


class _MeanDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, baseline_NC: Tensor, logits_NC: Tensor, temperature: float) -> Tensor:
        gradient = torch.empty_like(logits_NC)
        total = torch.zeros((), device=logits_NC.device)
        parts = (tensor.split(ROWS_AT_ONCE) for tensor in (baseline_NC, logits_NC, gradient))
        for baseline, logits, slope in zip(*parts, strict=True):
            log_p = (baseline.float() / temperature).log_softmax(-1)
            log_q = (logits.float() / temperature).log_softmax(-1)
            p = log_p.exp()
            total += torch.dot(p.flatten(), (log_p - log_q).flatten())
            slope.copy_(log_q.exp_().sub_(p))
        ctx.save_for_backward(gradient)
        ctx.factor = temperature / len(logits_NC)
        return total * temperature**2 / len(logits_NC)

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
    classes_NK: Tensor, logs_NK: Tensor, logits_NC: Tensor, temperature: float = 1.0
) -> Tensor:
    """`mean_divergence` from a baseline of which only the likeliest classes are known; the rest counts as one class."""
    p_NK, classes_NK = logs_NK.float().exp(), classes_NK.long()
    log_q_NK = (logits_NC.float() / temperature).log_softmax(-1).gather(-1, classes_NK)
    p_rest_N, q_rest_N = ((1 - part.sum(-1)).clamp(min=LEAST) for part in (p_NK, log_q_NK.exp()))
    likely_N = (p_NK * (logs_NK.float() - log_q_NK)).sum(-1)
    return (likely_N + p_rest_N * (p_rest_N.log() - q_rest_N.log())).mean() * temperature**2
