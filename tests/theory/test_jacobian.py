"""Bounds on softmax Jacobians and on what moving logits does, against the real thing."""

import math

import numpy as np
import pytest

from headwise.theory.jacobian import (
    entry_change_bound,
    gaussian_peak,
    jacobian_bound,
    jacobian_length_bound,
    logit_change_bound,
    peak_bound,
    row_change_bound,
)

LENGTHS = [4, 16, 64, 256]


def softmax(s):
    a = np.exp(s - s.max(axis=-1, keepdims=True))
    return a / a.sum(axis=-1, keepdims=True)


def norms(a):
    return np.linalg.norm(a[..., None] * np.eye(a.shape[-1]) - a[..., None] * a[..., None, :], 2, axis=(-2, -1))


@pytest.mark.parametrize("spread", [0.3, 1, 3, 10])
@pytest.mark.parametrize("length", LENGTHS)
def test_norm_is_below_its_bound(length, spread):
    a = softmax(spread * np.random.default_rng(0).standard_normal((20, length)))
    assert (norms(a) <= jacobian_bound(a) + 1e-12).all()


def test_bound_is_tight_at_both_ends():
    many = softmax(np.random.default_rng(0).standard_normal((5, 256)))
    assert jacobian_bound(many) == pytest.approx(norms(many), rel=0.12)
    one = np.array([1 - 1e-3, 1e-3])
    assert norms(one) == pytest.approx(jacobian_bound(one))


def test_worst_norm_is_a_half_not_a_quarter():
    equal = np.array([0.5, 0.5])
    assert norms(equal) == pytest.approx(0.5) == jacobian_bound(equal)


@pytest.mark.parametrize("length", LENGTHS)
def test_bounded_logits_obey_the_length_law(length):
    logits = 2 * np.random.default_rng(1).uniform(-1, 1, (50, length))
    logits[0], logits[0, 0] = -2, 2
    a = softmax(logits)
    assert norms(a).max() <= jacobian_length_bound(length, 2) <= math.exp(4) / length
    assert a.max() == pytest.approx(peak_bound(length, 2))


def test_length_law_is_one_over_length_in_the_end():
    assert jacobian_length_bound(2**20, 2) / jacobian_length_bound(2**19, 2) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("spread", [0.5, 1, 2, 3])
@pytest.mark.parametrize("length", [*LENGTHS, 1024])
def test_expected_peak_of_normal_logits(length, spread):
    a = softmax(spread * np.random.default_rng(2).standard_normal((2000, length)))
    assert gaussian_peak(length, spread) == pytest.approx(a.max(axis=-1).mean(), rel=0.1)


def test_unbounded_logits_break_the_length_law():
    """Measured log-slopes from L = 4 to 1024: -0.56 at a spread of 1 and -0.06 at 3, instead of -1."""
    slopes = [math.log(gaussian_peak(1024, s) / gaussian_peak(4, s)) / math.log(256) for s in (0.1, 1, 3)]
    assert slopes[0] < -0.9
    assert slopes[1] == pytest.approx(-0.6, abs=0.06)
    assert slopes[2] > -0.2


def test_a_cut_moves_no_logit_further_than_predicted():
    random = np.random.default_rng(3)
    product = random.standard_normal((32, 8)) @ random.standard_normal((8, 32))
    u, s, vt = np.linalg.svd(product)
    rest = (u[:, 5:] * s[5:]) @ vt[5:]
    x, y = random.standard_normal((2, 500, 32))
    change = np.abs(0.3 * np.einsum("ni,ij,nj->n", x, rest, y))
    norm_x, norm_y = (float(np.linalg.norm(t, axis=1).max()) for t in (x, y))
    assert change.max() <= logit_change_bound(s, 5, norm_x, norm_y, 0.3)
    assert 0.3 * abs(u[:, 5] @ rest @ vt[5]) == pytest.approx(logit_change_bound(s, 5, 1, 1, 0.3))
    assert logit_change_bound(s[:8], 8, norm_x, norm_y, 0.3) == 0


@pytest.mark.parametrize("change", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("length", [2, 5, 64])
def test_changes_of_attention_obey_their_bounds(length, change):
    random = np.random.default_rng(4)
    logits = random.uniform(-1.5, 1.5, (400, length))
    before, after = softmax(logits), softmax(logits + change * random.choice([-1, 1], logits.shape))
    assert np.abs(after - before).max() <= entry_change_bound(change, float(before.max()))
    assert np.abs(after - before).max() <= entry_change_bound(change, peak_bound(length, 1.5))
    assert np.abs(after - before).sum(axis=-1).max() <= row_change_bound(change)


@pytest.mark.parametrize("change", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("peak", [0.001, 0.2, 0.9])
def test_bound_on_one_weight_is_reached(peak, change):
    weights = np.linspace(peak / 20000, peak, 20000)
    moved = softmax(np.stack([np.log(weights) + change, np.log1p(-weights) - change], axis=-1))[:, 0]
    assert (moved - weights).max() == pytest.approx(entry_change_bound(change, peak), rel=1e-6)


@pytest.mark.parametrize("length", [2, 64, 1024])
def test_change_of_a_row_does_not_shrink_with_length(length):
    """Single weights change by O(1/L), as the corollary says; their sum does not."""
    up = np.arange(length) < length // 2
    logits = np.where(up, -0.5, 0.5)
    before, after = softmax(logits), softmax(-logits)
    assert np.abs(after - before).sum() == pytest.approx(row_change_bound(1.0))
    assert np.abs(after - before).max() * length == pytest.approx(row_change_bound(1.0))
