"""Measures of attention against the slow and obvious way of computing each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.linalg.ranks import effective_rank, gram_singular_values, hard_rank, numerical_rank, stable_rank
from headwise.linalg.saturation import jacobian_norms
from headwise.linalg.spectra import dims_holding, moment_root, product_spectrum, weighted_basis, weighted_spectrum
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
    norms = jacobian_norms(torch.cat((one_hot, uniform, tied)))
    assert torch.allclose(norms, torch.tensor([0.0, 0.2, 0.4]), atol=1e-7)
    masked = rows(8, 8, 1.0, 3, causal=True)
    assert torch.allclose(jacobian_norms(masked), torch.stack([slow_norm(row) for row in masked]), atol=1e-10)


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-7, 1e-5, 1e-3])
def test_jacobian_norms_of_near_ties_in_float32(gap):
    a = rows(200, 60, 2.0, 0)
    top = a.topk(2)
    a.scatter_(1, top.indices[:, 1:], top.values[:, :1] * (1 - gap))
    a = (a / a.sum(-1, keepdim=True)).float()
    expected = torch.stack([slow_norm(row) for row in a.double()])
    assert torch.allclose(jacobian_norms(a).double(), expected, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_ranks_are_those_of_the_svd(spread, causal):
    maps = torch.stack([rows(40, 40, spread, seed, causal) for seed in range(3)])
    s, slow = gram_singular_values(maps), torch.linalg.svdvals(maps)
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
    ranks = hard_rank(winners, n).double()
    assert abs(ranks.mean() - expected_hard_rank(n)) < 2 * ranks.std() / repeats**0.5


@given(seed=st.integers(0, 99), inner=st.integers(1, 6))
def test_product_spectrum_is_that_of_the_product(seed, inner):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(2, n, inner, generator=generator, dtype=torch.float64) for n in (9, 12))
    slow = torch.linalg.svdvals(left @ right.mT)[:, :inner]
    assert torch.allclose(product_spectrum(left, right), slow)


def queries_and_keys(seed=0, tokens=300, K=5):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(tokens, 20, generator=generator, dtype=torch.float64) @ torch.randn(
        20, 20, generator=generator, dtype=torch.float64
    )
    return (text @ torch.randn(20, K, generator=generator, dtype=torch.float64) + 1 for _ in range(2))


def test_weighted_spectrum_is_that_of_the_real_logits():
    """From K x K second moments alone: the singular values of the logits of all pairs of tokens, keys centred."""
    q, k = queries_and_keys()
    n = len(q)
    centred = k - k.mean(0)
    weighted = weighted_spectrum((q.T @ q / n)[None], (centred.T @ centred / n)[None])[0]
    logits = q @ k.T
    rows_centred = logits - logits.mean(1, keepdim=True)
    assert torch.allclose(weighted, torch.linalg.svdvals(rows_centred / n)[:5])


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_weighted_basis_cuts_best(kept):
    """Keeping its first directions leaves the error of the best rank-r approximation of the logits (Eckart-Young)."""
    q, k = queries_and_keys()
    basis = weighted_basis((q.T @ q)[None], (k.T @ k)[None])
    directions, duals = basis.directions_NRR[0], basis.duals_NRR[0]
    assert torch.allclose(directions @ duals.T, torch.eye(5, dtype=torch.float64), atol=1e-9)
    projector = directions[:, :kept] @ duals[:, :kept].T
    error = torch.linalg.matrix_norm(q @ k.T - q @ (k @ projector.T).T)
    best = torch.linalg.svdvals(q @ k.T)[kept:].square().sum().sqrt()
    assert torch.allclose(error, best)


def test_moment_root_of_few_samples_and_of_none():
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(3, 8, generator=generator)  # fewer samples than dimensions: singular
    c = torch.stack((few.T @ few, torch.zeros(8, 8)))
    root, inverse = moment_root(c)
    assert torch.allclose((root @ root).float(), c, atol=1e-4)
    assert root.isfinite().all() and inverse.isfinite().all()
    assert torch.allclose(root @ inverse, torch.eye(8, dtype=torch.float64).expand(2, 8, 8), atol=1e-6)


def test_dims_holding():
    s = torch.tensor([[2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert dims_holding(s, 0.6).tolist() == [1, 3, 4]
    assert dims_holding(s, 1.0).tolist()[:2] == [3, 4]
