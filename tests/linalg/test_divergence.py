"""KL divergences with gradients: against plain autograd, and from the likeliest classes alone."""

import pytest
import torch
from torch.nn.functional import kl_div

from headwise.linalg.divergence import divergences, mean_divergence, mean_divergence_of_likely, most_likely


def plain(baseline, logits, temperature):
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (logits, baseline))
    return kl_div(log_q, log_p, log_target=True, reduction="batchmean") * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("rows", [1, 300])
def test_value_and_gradient_are_those_of_autograd(rows, temperature):
    torch.manual_seed(0)
    baseline, logits = torch.randn(rows, 11), torch.randn(rows, 11, requires_grad=True)
    expected = plain(baseline, logits, temperature)
    (slope,) = torch.autograd.grad(3 * expected, logits)
    value = mean_divergence(baseline, logits, temperature)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * value, logits)[0], slope)


def test_the_mean_is_the_sum_over_rows():
    baseline, logits = torch.randn(200, 7), torch.randn(200, 7)
    assert mean_divergence(baseline, logits).item() == pytest.approx(
        divergences(baseline, logits).mean().item(), rel=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_classes_but_one_tell_all(temperature):
    torch.manual_seed(1)
    baseline, logits = torch.randn(50, 9), torch.randn(50, 9, requires_grad=True)
    expected = plain(baseline, logits, temperature)
    value = mean_divergence_of_likely(*most_likely(baseline, 8, temperature), logits, temperature)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    slopes = (torch.autograd.grad(loss, logits)[0] for loss in (value, expected))
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-5)


def test_few_classes_tell_less_but_never_more():
    torch.manual_seed(2)
    baseline, logits = 3 * torch.randn(50, 40), 3 * torch.randn(50, 40)
    known = [mean_divergence_of_likely(*most_likely(baseline, k), logits).item() for k in (1, 5, 20, 39)]
    assert known == sorted(known) and known[-1] <= plain(baseline, logits, 1.0).item() + 1e-5
    assert mean_divergence_of_likely(*most_likely(baseline, 5), baseline).item() == pytest.approx(0, abs=1e-6)
