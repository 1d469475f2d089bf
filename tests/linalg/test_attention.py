"""Statistics of one attention against the slow and obvious way of computing each."""

import pytest
import torch

from headwise.linalg.attention import Attention
from headwise.linalg.coordinates import Layout, key_units
from headwise.linalg.maps import add_conditioning, add_maps, add_overlap, at
from headwise.linalg.masks import add_fisher, block_sums, coherence, key_gradients, value_gradients
from headwise.linalg.spectra import weighted_basis
from headwise.linalg.sums import Sums

B, H, G, T, K, V = 2, 4, 2, 32, 6, 5


def attention(causal=True, mask=None, softcap=None, seed=0, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        spread * torch.randn(B, heads, T, width, generator=generator) for heads, width in ((H, K), (G, K), (G, V))
    )
    seen = Attention(q, k, v, torch.empty(0), K**-0.5, causal, mask, softcap)
    a = seen.logits(slice(None), slice(None)).softmax(-1)
    out = (a @ v.repeat_interleave(H // G, dim=1)).transpose(1, 2)
    return Attention(q, k, v, out, K**-0.5, causal, mask, softcap), a


def test_logits_follow_masks_caps_and_groups():
    window = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=-1)
    mask = ((window >= 0) & (window < 5))[None, None]
    seen, a = attention(mask=mask, softcap=3.0)
    raw = seen.q_BHTK @ seen.k_BGSK.repeat_interleave(2, dim=1).mT * K**-0.5
    expected = (3 * torch.tanh(raw / 3)).masked_fill(~mask, -torch.inf).softmax(-1)
    assert torch.allclose(a, expected, atol=1e-6)
    additive = torch.zeros(1, 1, T, T).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(attention(mask=additive, softcap=3.0)[1], a)
    some = seen.logits(slice(1, 3), torch.tensor([4, 9])).softmax(-1)
    assert torch.allclose(some, a[:, 1:3, [4, 9]], atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_map_statistics_are_those_of_the_straightforward_way(causal):
    seen, a = attention(causal)
    sums, lengths = Sums(), (8, 16, 32) if causal else (T,)
    add_maps(sums, seen, lengths, spectra=True)
    for L in lengths:
        block = a[:, :, L // 2 : L, :L].double() if causal else a.double()
        whole = a[:, :, :L, :L].double()
        norms = torch.linalg.eigvalsh(torch.diag_embed(block) - block[..., None] * block[..., None, :])[..., -1]
        logits = (
            seen.logits(slice(None), slice(None))[:, :, L // 2 : L] if causal else seen.logits(slice(None), slice(None))
        )
        spread = torch.stack([row[row > -torch.inf].std(correction=0) for row in logits.flatten(0, 2)]).view(
            logits.shape[:3]
        )
        s = torch.linalg.svdvals(whole)
        share = s / s.sum(-1, keepdim=True)
        expected = {
            "jacobian_mean": norms.mean((0, 2)),
            "jacobian_p95": norms.quantile(0.95, dim=-1).mean(0),
            "jacobian_bound": block.amax(-1).mean((0, 2)),
            "logit_spread": spread.mean((0, 2)),
            "entropy": -(block * block.clamp(min=1e-300).log()).sum(-1).mean((0, 2)),
            "first_token": block[..., 0].mean((0, 2)),
            "hard_rank": torch.tensor([[len(set(rows.argmax(-1).tolist())) for rows in sample] for sample in whole])
            .double()
            .mean(0),
            "effective_rank": torch.exp(-(share * share.clamp(min=1e-300).log()).sum(-1)).mean(0),
            "stable_rank": (s.square().sum(-1) / s[..., 0].square()).mean(0),
        }
        for name, value in expected.items():
            assert torch.allclose(sums.mean(at(name, L)), value.double(), rtol=1e-3), (name, L)
        for i, tolerance in enumerate((1e-1, 1e-2, 1e-3)):
            ranks = torch.linalg.matrix_rank(whole, rtol=tolerance).double().mean(0)
            assert torch.equal(sums.mean(at("numerical_rank", L))[:, i], ranks)


def test_heads_in_pieces_give_the_same(monkeypatch):
    seen, _ = attention()
    whole, pieces = Sums(), Sums()
    add_maps(whole, seen, (16, 32), spectra=True)
    monkeypatch.setattr("headwise.linalg.maps.MAP_NUMBERS", 1)
    add_maps(pieces, seen, (16, 32), spectra=True)
    assert whole.totals.keys() == pieces.totals.keys()
    assert all(torch.allclose(value, pieces.totals[name]) for name, value in whole.totals.items())


def test_overlap_is_one_minus_total_variation():
    seen, a = attention()
    sums = Sums()
    add_overlap(sums, seen)
    later = a[:, :, T // 2 :]
    expected = 1 - (later[:, :, None] - later[:, None]).abs().sum(-1).mean((0, 3)) / 2
    assert torch.allclose(sums.mean("overlap").float(), expected, atol=1e-5)
    assert torch.allclose(sums.mean("overlap").diagonal(), torch.ones(H, dtype=torch.float64), atol=1e-5)


def test_conditioning_is_that_of_cond():
    seen, _ = attention()
    sums = Sums()
    add_conditioning(sums, seen, (8, 32))
    for L in (8, 32):
        expected = torch.linalg.cond(seen.out_BTHV.flatten(2)[:, :L].double()).log().mean().exp()
        assert torch.allclose(sums.mean(at("conditioning", L)).exp(), expected, rtol=1e-3)


def moments(seen):
    m_q = (seen.q_BHTK.mT @ seen.q_BHTK).double().sum(0).unflatten(0, (G, -1)).sum(1) / (B * T)
    mean = seen.k_BGSK.double().mean((0, 2))
    m_k = (seen.k_BGSK.mT @ seen.k_BGSK).double().sum(0) / (B * T) - mean[:, :, None] * mean[:, None]
    return m_q, m_k, mean


@pytest.mark.parametrize("layout", [Layout.halves(0, 4, K), Layout.neighbours(2, 4, K), Layout.halves(0, 0, K)])
def test_units_add_up_and_project(layout):
    seen, _ = attention()
    m_q, m_k, _ = moments(seen)
    units = key_units(m_q, m_k, layout)
    q, k = torch.randn(3, G, 7, K), torch.randn(3, G, 7, K)
    assert torch.allclose(units.parts(q, k).sum(-1), (q * k).sum(-1), atol=1e-4)
    U = len(units.dims_U)
    everything = torch.ones(G, U, dtype=torch.bool)
    assert torch.allclose(units.projector(everything), torch.eye(K, dtype=torch.float64).expand(G, K, K), atol=1e-6)
    for width in range(K + 1):
        kept = units.strongest(width)
        dims = (kept * units.dims_U).sum(-1)
        assert (dims <= width).all() and (dims >= width - 1).all()
        projector = units.projector(kept)
        assert torch.allclose(projector @ projector, projector, atol=1e-6)
        parts = torch.einsum("ngtk,gkl,ngtl->ngt", q, projector.float(), k)
        assert torch.allclose((units.parts(q, k) * kept[:, None]).sum(-1), parts, atol=1e-4)


def test_mask_gradients_are_those_of_real_masks():
    """Gradients of explicit masks in the computation, by autograd, block by block."""
    seen, _ = attention()
    m_q, m_k, mean = moments(seen)
    units = key_units(m_q, m_k, Layout.halves(0, 4, K))
    gram = torch.eye(V, dtype=torch.float64).expand(G, V, V)
    out_moment = torch.einsum("bthv,bthw->hvw", seen.out_BTHV, seen.out_BTHV).double().unflatten(0, (G, -1)).sum(1)
    basis = weighted_basis(gram, out_moment)
    target, block = torch.randn(B, T, H, V), 8
    U = len(units.dims_U)
    k_mask = torch.ones(B, T // block, G, U, requires_grad=True)
    v_mask = torch.ones(B, T // block, G, V, requires_grad=True)
    h_mask = torch.ones(B, T // block, H, requires_grad=True)

    projectors = torch.stack(
        [units.projector(torch.eye(U, dtype=torch.bool)[u].expand(G, U)) for u in range(U)]
    ).float()
    centred = seen.k_BGSK - mean[:, None].float()
    per_token = k_mask.repeat_interleave(block, dim=1).transpose(1, 2)
    keys = mean[:, None].float() + torch.einsum("bgtu,ugkl,bgtl->bgtk", per_token, projectors, centred)
    keys.retain_grad()
    a = seen.logits(slice(None), slice(None), keys).softmax(-1)
    out = (a @ seen.v_BGSV.repeat_interleave(2, dim=1)).transpose(1, 2)
    directions, duals = basis.directions_NRR.float(), basis.duals_NRR.float()
    grouped = out.unflatten(2, (G, -1))
    masked = torch.einsum(
        "gvc,btgc,gwc,btghw->btghv", directions, v_mask.repeat_interleave(block, dim=1), duals, grouped
    ).flatten(2, 3)
    masked = masked * h_mask.repeat_interleave(block, dim=1)[..., None]
    masked.retain_grad()
    ((masked - target) ** 2).sum().backward()

    qk = key_gradients(seen.k_BGSK, keys.grad, mean, units, block)
    v, heads = value_gradients(seen.out_BTHV, masked.grad, basis, block)

    def by_sample(mask):  # blocks come first, then the batch
        return mask.grad.transpose(0, 1).flatten(0, 1)

    assert torch.allclose(qk, by_sample(k_mask), atol=1e-3, rtol=1e-3)
    assert torch.allclose(v, by_sample(v_mask), atol=1e-3, rtol=1e-3)
    assert torch.allclose(heads[..., 0], by_sample(h_mask), atol=1e-3, rtol=1e-3)
    sums = Sums()
    add_fisher(sums, {"qk": qk, "v": v, "head": heads}, sequences=B, outputs=B * T)
    for kind, samples in (("qk", qk), ("v", v), ("head", heads)):
        fisher = sums.mean(f"{kind}_fisher").diagonal(dim1=-2, dim2=-1)
        assert torch.allclose(fisher, samples.double().square().sum(0) / (B * T))
    whole, _ = value_gradients(seen.out_BTHV, masked.grad, basis, T)
    assert torch.allclose(coherence(sums, "v"), whole.square().sum().double() / v.square().sum(), rtol=1e-4)


def test_block_sums_keep_a_shorter_last_block():
    parts = torch.arange(10.0).view(1, 1, 10, 1)
    assert block_sums(parts, 4).flatten().tolist() == [6.0, 22.0, 17.0]
