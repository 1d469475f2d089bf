import numpy as np
import pytest

from headwise.theory.hard_rank import expected_causal_hard_rank, expected_hard_rank, gaussian_hard_rank


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
