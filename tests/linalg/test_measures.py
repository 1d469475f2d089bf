"""Measures of attention against the slow and obvious way of computing each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.linalg.ranks import effective_rank, hard_rank, numerical_rank, singular_values, stable_rank
from headwise.linalg.saturation import jacobian_norms
from headwise.linalg.spectra import dims_holding, moment_root, product_spectrum
from headwise.theory.hard_rank import expected_hard_rank


def rows(count, length, spread, seed, causal=False):
    logits = spread * torch.randn(count, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if causal:
        logits = logits.masked_fill(torch.ones(count, length).triu(1).bool(), -torch.inf)
    return logits.softmax(-1)


def slow_norm(a):
    return torch.linalg.eigvalsh(torch.diag(a) - torch.outer(a, a)).abs().max()


@given(length=st.integers(2, 60), spread=st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]), seed=st.integers(0, 99))
def test_jacobian_norms_are_those_of_the_explicit_matrices(length, spread, seed):
    a = rows(6, length, spread, seed)
    expected = torch.stack([slow_norm(row) for row in a])
    assert torch.allclose(jacobian_norms(a), expected, atol=1e-10)
    assert (jacobian_norms(a) <= a.max(dim=-1).values + 1e-12).all()


def test_jacobian_norms_of_special_rows():
    one_hot, uniform = torch.eye(5)[:1], torch.full((1, 5), 0.2)
    tied = torch.tensor([[0.4, 0.4, 0.1, 0.1, 0.0]])
    found = jacobian_norms(torch.cat((one_hot, uniform, tied)))
    assert torch.allclose(found, torch.tensor([0.0, 0.2, 0.4]), atol=1e-7)
    masked = rows(8, 8, 1.0, 3, causal=True)
    assert torch.allclose(jacobian_norms(masked), torch.stack([slow_norm(row) for row in masked]), atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_ranks_are_those_of_the_svd(spread, causal):
    maps = torch.stack([rows(40, 40, spread, seed, causal) for seed in range(3)])
    s, slow = singular_values(maps), torch.linalg.svdvals(maps)
    assert torch.allclose(s, slow, atol=1e-7)
    for tolerance in (1e-1, 1e-2, 1e-3):
        expected = torch.linalg.matrix_rank(maps, rtol=tolerance)
        assert torch.equal(numerical_rank(s, tolerance), expected)
    share = slow / slow.sum(-1, keepdim=True)
    assert torch.allclose(effective_rank(s), torch.exp(-(share * share.clamp(min=1e-300).log()).sum(-1)), atol=1e-4)
    assert torch.allclose(stable_rank(s), maps.square().sum((1, 2)) / torch.linalg.matrix_norm(maps, 2).square())


def test_hard_rank_of_random_attention_is_as_expected():
    n, repeats = 64, 400
    winners = torch.randint(0, n, (repeats, n), generator=torch.Generator().manual_seed(0))
    ranks = hard_rank(torch.nn.functional.one_hot(winners, n).float()).double()
    assert abs(ranks.mean() - expected_hard_rank(n)) < 2 * ranks.std() / repeats**0.5


@given(seed=st.integers(0, 99), inner=st.integers(1, 6))
def test_product_spectrum_is_that_of_the_product(seed, inner):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(2, n, inner, generator=generator, dtype=torch.float64) for n in (9, 12))
    slow = torch.linalg.svdvals(left @ right.mT)[:, :inner]
    assert torch.allclose(product_spectrum(left, right), slow)


def test_weighted_spectrum_is_that_of_the_real_logits():
    """Weighting both sides by the root of the second moment gives the singular values of the logits on the text."""
    generator = torch.Generator().manual_seed(0)
    text = (
        torch.randn(300, 20, generator=generator, dtype=torch.float64)
        @ torch.randn(20, 20, generator=generator).double()
    )
    w_q, w_k = (torch.randn(20, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    root = moment_root(text.T @ text)
    weighted = product_spectrum((root @ w_q)[None], (root @ w_k)[None])[0]
    logits = (text @ w_q) @ (text @ w_k).T
    assert torch.allclose(weighted, torch.linalg.svdvals(logits)[:5])


def test_moment_root():
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(3, 8, generator=generator)  # fewer samples than dimensions: singular
    c = few.T @ few
    root = moment_root(c)
    assert torch.allclose((root @ root).float(), c, atol=1e-4)
    assert torch.linalg.eigvalsh(moment_root(c, shrinkage=0.1)).min() > 0


def test_dims_holding():
    s = torch.tensor([[2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert dims_holding(s, 0.6).tolist() == [1, 3, 4]
    assert dims_holding(s, 1.0).tolist()[:2] == [3, 4]
