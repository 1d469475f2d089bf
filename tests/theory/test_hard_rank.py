import numpy as np
import pytest

from headwise.files.errors import InputError
from headwise.theory.hard_rank import (
    expected_causal_hard_rank,
    expected_hard_rank,
    expected_winners,
    gaussian_causal_hard_rank,
    gaussian_hard_rank,
    head_dim_for_share,
    softmax_gap,
    softmax_rank_tolerance,
    unit_key_hard_rank,
)


def simulate(winners, repeats=400):
    ranks = np.array([len(np.unique(winners())) for _ in range(repeats)])
    return ranks.mean(), ranks.std() / np.sqrt(repeats)


@pytest.mark.parametrize("n", [16, 50, 200])
def test_uniform_winners(n):
    rng = np.random.default_rng(0)
    mean, error = simulate(lambda: rng.integers(0, n, n))
    assert abs(mean - expected_hard_rank(n)) < 2 * error


@pytest.mark.parametrize("n", [16, 50, 200])
def test_causal_winners(n):
    rng = np.random.default_rng(1)
    mean, error = simulate(lambda: rng.integers(0, np.arange(1, n + 1)))
    assert abs(mean - expected_causal_hard_rank(n)) < 2 * error


def test_values_of_the_notes():
    """Finite-n shares: 0.6439 (16), 0.6358 (50), 0.6340 (100), 0.6330 (200), 0.6323 (1000)."""
    shares = [round(expected_hard_rank(n) / n, 4) for n in (16, 50, 100, 200, 1000)]
    assert shares == [0.6439, 0.6358, 0.634, 0.633, 0.6323]


@pytest.mark.parametrize("head_dim", [8, 16, 64])
@pytest.mark.parametrize("n", [100, 400])
def test_gaussian_queries_and_keys(n, head_dim):
    rng = np.random.default_rng(2)

    def winners():
        return (rng.standard_normal((n, head_dim)) @ rng.standard_normal((head_dim, n))).argmax(axis=1)

    mean, _ = simulate(winners, repeats=60)
    assert abs(mean - gaussian_hard_rank(n, head_dim)) < 0.02 * n


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("n", [64, 256])
def test_gaussian_queries_and_keys_under_a_causal_mask(n, head_dim):
    rng = np.random.default_rng(6)
    future = np.triu(np.ones((n, n), dtype=bool), 1)

    def winners():
        scores = rng.standard_normal((n, head_dim)) @ rng.standard_normal((head_dim, n))
        return np.where(future, -np.inf, scores).argmax(axis=1)

    mean, _ = simulate(winners, repeats=100)
    assert abs(mean - gaussian_causal_hard_rank(n, head_dim)) < 0.012 * n


def test_causal_widths_of_the_notes():
    """Three quarters of the causal limit take 14, 28 and 58 dimensions at 256, 1,024 and 8,192 tokens."""
    for n, width in {256: 14, 1024: 28, 8192: 58}.items():
        less, enough = (gaussian_causal_hard_rank(n, dim) / expected_causal_hard_rank(n) for dim in (width - 1, width))
        assert less < 0.75 <= round(enough, 3)


def test_wide_heads_reach_the_causal_limit_and_long_texts_take_no_longer():
    for n in (1, 2, 50, 4095):
        assert gaussian_causal_hard_rank(n, 1e9) == pytest.approx(expected_causal_hard_rank(n), rel=1e-3)
    one_by_one, in_blocks = (gaussian_causal_hard_rank(n, 32) / n for n in (4095, 4096))
    assert in_blocks == pytest.approx(one_by_one, rel=1e-4)
    assert 0 < gaussian_causal_hard_rank(10**9, 64) < 0.2 * 10**9


def test_uneven_winners():
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.full(50, 0.5))
    mean, error = simulate(lambda: rng.choice(50, 50, p=shares))
    assert abs(mean - expected_winners(shares, 50)) < 3 * error
    assert expected_winners(shares, 50) < expected_hard_rank(50) == pytest.approx(expected_winners([1 / 50] * 50, 50))


@pytest.mark.parametrize(
    ("share", "widths"),
    [
        (0.5, {50: 4.0, 100: 5.9, 200: 8.3, 400: 11.0, 800: 13.6}),
        (0.75, {25: 5.9, 50: 9.4, 100: 14.3, 200: 21.3, 400: 29.3, 800: 37.5}),
        (0.9, {25: 15, 50: 26, 100: 41, 200: 61, 400: 91, 800: 112}),
        (0.95, {25: 28, 50: 53, 100: 80, 200: 121, 400: 150, 800: 244}),
    ],
)
def test_widths_at_which_shares_of_the_limit_were_simulated(share, widths):
    for n, width in widths.items():
        assert head_dim_for_share(n, share) == pytest.approx(width, rel=0.21)


def test_width_for_a_share_gives_that_share():
    for share in (0.2, 0.9, 0.99):
        width = head_dim_for_share(300, share)
        assert gaussian_hard_rank(300, width) / 300 == pytest.approx(share * (1 - 1 / np.e), rel=1e-6)
    with pytest.raises(InputError, match="between 0 and 1"):
        head_dim_for_share(300, 1.0)


def test_saturation_takes_more_than_a_logarithm():
    widths = [head_dim_for_share(n, 0.9) for n in (10**2, 10**4, 10**8)]
    assert widths[1] > 3 * widths[0]
    assert widths[2] > 4 * widths[1]


@pytest.mark.parametrize("head_dim", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("n", [100, 400])
def test_keys_of_equal_norm(n, head_dim):
    rng = np.random.default_rng(4)

    def winners():
        keys = rng.standard_normal((n, head_dim))
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        return (rng.standard_normal((n, head_dim)) @ keys.T).argmax(axis=1)

    mean, _ = simulate(winners, repeats=100)
    assert abs(mean - unit_key_hard_rank(n, head_dim)) < 0.012 * n


@pytest.mark.parametrize("temperature", [0.003, 0.03, 0.3])
def test_softmax_near_its_winner(temperature):
    rng = np.random.default_rng(5)
    n, head_dim = 60, 16
    scores = rng.standard_normal((n, head_dim)) @ rng.standard_normal((head_dim, n)) / np.sqrt(head_dim)
    soft = np.exp((scores - scores.max(axis=1, keepdims=True)) / temperature)
    soft /= soft.sum(axis=1, keepdims=True)
    hard = np.eye(n)[scores.argmax(axis=1)]
    top = np.sort(scores, axis=1)
    gaps = top[:, -1] - top[:, -2]
    assert (np.abs(soft - hard).sum(axis=1) <= softmax_gap(gaps, n, temperature) + 1e-12).all()
    tolerance = softmax_rank_tolerance(gaps, n, temperature)
    assert np.linalg.norm(soft - hard) <= tolerance
    assert (np.linalg.svd(soft, compute_uv=False) > tolerance).sum() <= len(np.unique(scores.argmax(axis=1)))


def test_softmax_gap_is_reached_by_equal_losers():
    scores = np.array([0.0, -1.0, -1.0, -1.0])
    soft = np.exp(scores / 0.5) / np.exp(scores / 0.5).sum()
    assert np.abs(soft - [1, 0, 0, 0]).sum() == pytest.approx(float(softmax_gap(1.0, 4, 0.5)))


def test_tolerance_is_the_distance_itself_for_two_keys():
    gaps = np.array([0.5, 2.0, 3.0])
    loser = 1 / (1 + np.exp(gaps))
    assert softmax_rank_tolerance(gaps, 2, 1.0) == pytest.approx(np.linalg.norm([loser, loser]))
