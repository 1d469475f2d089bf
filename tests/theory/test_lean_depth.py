"""Lean shapes against the parameter counts of the notes (in millions, embeddings and biases added where needed)."""

from dataclasses import replace

import pytest

from headwise.files.errors import InputError
from headwise.theory.lean_depth import Stack, lean

VIT_B = Stack(layers=12, width=768, heads=12, head_dim=64, mlp=3072)
VIT_B_OUTSIDE = 1.51
CRAMMED_BERT = Stack(layers=16, width=768, heads=12, head_dim=64, mlp=1536, gated=True)
BERT_OUTSIDE = 32768 * 768 / 1e6
LRA = Stack(layers=2, width=64, heads=2, head_dim=32, mlp=128)


def test_published_models():
    assert VIT_B.weights / 1e6 + VIT_B_OUTSIDE == pytest.approx(86.57, rel=2e-3)
    assert CRAMMED_BERT.weights / 1e6 + BERT_OUTSIDE == pytest.approx(119.6, rel=2e-3)


def test_width_kept():
    bert = lean(CRAMMED_BERT, more_heads=2, keep_layers=10 / 16)
    assert (bert.layers, bert.heads, bert.head_dim, bert.mlp) == (10, 24, 32, 1536)
    assert bert.weights / 1e6 + BERT_OUTSIDE == pytest.approx(84.2, rel=2e-3)
    vit = lean(VIT_B, more_heads=4 / 3, keep_layers=7 / 12, keep_mlp=0.5)
    assert (vit.layers, vit.heads, vit.head_dim, vit.mlp) == (7, 16, 48, 1536)
    assert vit.weights / 1e6 + VIT_B_OUTSIDE == pytest.approx(34.6, rel=3e-3)


def test_head_width_kept():
    vit = lean(VIT_B, more_heads=4 / 3, keep_layers=7 / 12, keep_mlp=0.5, keep="head_dim")
    assert (vit.layers, vit.width, vit.heads, vit.head_dim) == (7, 768, 16, 64)
    assert vit.weights / 1e6 + VIT_B_OUTSIDE == pytest.approx(40, rel=5e-3)
    wider = replace(vit, width=vit.heads * vit.head_dim)
    assert wider.weights / 1e6 + 2.01 == pytest.approx(53.5, rel=3e-3)


def test_long_range_arena_counts_grow_with_heads():
    """ListOps: 2 layers of 2 heads 207 k and of 8 heads 307 k; Text: 365 k and 464 k. Biases make the last percents."""
    wide = lean(LRA, more_heads=4, keep_layers=1, keep="head_dim")
    assert wide.weights - LRA.weights == pytest.approx(307e3 - 207e3, rel=0.03)
    assert wide.weights - LRA.weights == pytest.approx(464e3 - 365e3, rel=0.03)
    assert lean(LRA, more_heads=4, keep_layers=1).weights == LRA.weights


def test_at_least_one_layer_stays():
    assert lean(LRA, more_heads=2, keep_layers=0.1).layers == 1


@pytest.mark.parametrize("more_heads", [0, 5 / 12])
def test_heads_must_divide_the_width(more_heads):
    with pytest.raises(InputError, match="cannot share a width of 768"):
        lean(VIT_B, more_heads=more_heads, keep_layers=1)
