"""Bases to round in, and levels to round to."""

import pytest
import torch

from headwise.linalg.coding import clipped, coding_basis, fit_levels, importance, level_places, paired_basis
from headwise.linalg.spectra import Basis
from headwise.records.packing import NOISE, WIDTHS


def rounded(x_NC, bits):
    offset, scale, cubic = fit_levels(x_NC, bits).half().float().unbind(-1)
    u = level_places(bits)
    levels = offset[:, None] + scale[:, None] * (u + cubic[:, None] * u**3)
    assert (levels.diff(dim=-1) > 0).all()
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    return levels.gather(1, torch.searchsorted(middles.contiguous(), x_NC.T.contiguous())).T


@pytest.mark.parametrize("bits", WIDTHS[1:])
def test_levels_of_normal_numbers_are_nearly_the_best_there_are(bits):
    x = torch.randn(8192, 16, generator=torch.Generator().manual_seed(bits)) * 3 + 5
    error = (rounded(x, bits) - x).square().mean() / x.var()
    assert error < NOISE[bits] * (1.1 if bits < 6 else 1.9)


@pytest.mark.parametrize(("bits", "farther"), [(8, 1.4), (16, 7.5)])
def test_many_levels_reach_farther_than_any_sample(bits, farther):
    """Frequent tokens far from all others, as in first layers: what is cut off of them would be most of the error."""
    x = torch.randn(8192, 4, generator=torch.Generator().manual_seed(0))
    x[:100] += 30
    offset, scale, cubic = fit_levels(x, bits).unbind(-1)
    reach = scale * (1 + cubic)
    assert (reach > farther * (x - offset).abs().amax(0)).all()
    step = 2 * scale / (2**bits - 1)
    assert (step < 0.1).all()


@pytest.mark.parametrize("bits", [4, 6])
def test_levels_find_tokens_apart_from_all_others(bits):
    x = torch.randn(8192, 4, generator=torch.Generator().manual_seed(0))
    x[:400] += 25
    offset, scale, cubic = fit_levels(x, bits).unbind(-1)
    assert ((offset + scale * (1 + cubic)) > 24).all()


def test_levels_follow_heavy_tails():
    x = torch.randn(8192, 4, generator=torch.Generator().manual_seed(0)) ** 3
    normal = fit_levels(torch.randn(8192, 4, generator=torch.Generator().manual_seed(1)), 4)
    offset, scale, cubic = (normal * torch.tensor([1.0, x.std(), 1.0])).unbind(-1)
    levels = offset[:, None] + scale[:, None] * (level_places(4) + cubic[:, None] * level_places(4) ** 3)
    worse = (levels[0][(x[..., None] - levels[0]).abs().argmin(-1)] - x).square().mean()
    assert (rounded(x, 4) - x).square().mean() < 0.5 * worse


def test_no_bits_mean_the_mean():
    x = torch.randn(512, 3) + torch.tensor([1.0, 2.0, 3.0])
    assert torch.allclose(fit_levels(x, 0)[:, 0], x.mean(0))


def test_constant_coordinates_have_levels():
    assert fit_levels(torch.ones(64, 2), 4).isfinite().all()


def test_basis_and_duals_are_inverse_and_coordinates_have_one_variance():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 6, generator=generator, dtype=torch.float64) @ torch.randn(6, 6, generator=generator).double()
    g = torch.randn(4096, 6, generator=generator, dtype=torch.float64) @ torch.randn(6, 6, generator=generator).double()
    source, metric = torch.cov(x.T)[None], (g.T @ g / len(g))[None]
    basis = coding_basis(source, metric)
    assert torch.allclose(basis.directions_NRR @ basis.duals_NRR.mT, torch.eye(6).double())
    z = (x - x.mean(0)) @ basis.duals_NRR[0]
    assert torch.allclose(z.var(0), torch.ones(6).double(), atol=0.1)
    felt = importance(basis, source, metric)[0]
    assert (felt.diff() <= 1e-9 * felt[0] + 0.2 * felt[:-1]).all()  # dearest first, up to the rounding of the metric
    own = importance(Basis(felt[None], *[torch.eye(6).double()[None]] * 2), source, metric)[0]
    assert felt.log().sum() < own.log().sum()  # bits needed at equal loss


def test_beyond_what_weights_make_coordinates_hold_nothing():
    """Eight numbers of three inputs, of which the text shows two: three coordinates hold whatever may come."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    shown = torch.randn(512, 2, generator=generator, dtype=torch.float64) @ weights[:, :2].T
    g = torch.randn(512, 8, generator=generator, dtype=torch.float64)
    source, metric = torch.cov(shown.T)[None], (g.T @ g / 512)[None]
    basis = coding_basis(source, metric, weights_NRD=weights[None])
    unseen = torch.randn(16, 3, generator=generator, dtype=torch.float64) @ weights.T
    z = unseen @ basis.duals_NRR[0]
    assert (z[:, :3] @ basis.directions_NRR[0, :, :3].T - unseen).abs().max() < 1e-6
    blind = coding_basis(source, metric)
    lost = unseen - unseen @ blind.duals_NRR[0, :, :3] @ blind.directions_NRR[0, :, :3].T
    assert lost.abs().max() > 1e-2


def test_pairs_are_turned_onto_their_axes():
    source = torch.tensor([[[2.0, 0.0, 1.5, 0.0], [0.0, 1.0, 0.0, -0.9], [1.5, 0.0, 3.0, 0.0], [0.0, -0.9, 0.0, 1.0]]])
    turn = paired_basis(source)[0]
    turned = turn.T @ source[0].double() @ turn
    assert torch.allclose(turn @ turn.T, torch.eye(4).double())
    assert torch.allclose(turned[[0, 1], [2, 3]], torch.zeros(2).double(), atol=1e-12)
    assert (turned.diagonal()[:2] >= turned.diagonal()[2:]).all()


def test_only_the_longest_gradients_are_clipped():
    g = torch.ones(100, 1, 4)
    g[0] *= 1000
    cut = clipped(g)
    assert cut[0].norm() < 3
    assert torch.equal(cut[1:], g[1:])
