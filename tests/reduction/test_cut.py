"""Cutting loses nothing where there is nothing to lose: models made low-rank on purpose come back the same."""

from dataclasses import replace

import pytest
import torch

from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.families.weights import read_attention, write_attention
from headwise.records import LayerPlan, Plan
from headwise.reduction.build import build_reduced
from headwise.tracing.example import example_inputs
from tests.tiny import REDUCIBLE, tiny


def edit(model, change):
    """Replace the attention weights of every layer of ``model`` by what ``change`` makes of them."""
    with torch.no_grad():
        for site, layer in zip(sites_of(model), shape_of(model).layers, strict=True):
            write_attention(site, change(read_attention(site, layer.rotary), layer))
    return shape_of(model)


def agree(model, plan):
    inputs = example_inputs(model)
    with torch.no_grad():
        before, after = model(**inputs)[0], build_reduced(model, plan)(**inputs)[0]
    assert torch.allclose(before, after, atol=2e-5), (before - after).abs().max()


def low_rank(w_NRD, b_NR, rank, seed):
    """Weights and bias of ``rank``, in directions that are no coordinates."""
    basis = torch.linalg.qr(torch.randn(w_NRD.shape[1], rank, generator=torch.Generator().manual_seed(seed))).Q
    keep = basis @ basis.T
    return keep @ w_NRD, None if b_NR is None else b_NR @ keep


@pytest.mark.parametrize("name", REDUCIBLE)
def test_values_of_low_rank_are_cut_for_free(name):
    model = tiny(name)

    def change(weights, layer):
        w_v, b_v = low_rank(weights.w_v_GVD, weights.b_v_GV, 3, seed=1)
        return replace(weights, w_v_GVD=w_v, b_v_GV=b_v)

    shape = edit(model, change)
    layers = tuple(replace(LayerPlan.full(layer), v_dim=3) for layer in shape.layers)
    agree(model, Plan.make(shape, layers))


FULL_ROTARY = ["llama", "mistral", "qwen2", "gemma", "gemma2", "phi3"]
PARTIAL_ROTARY = ["phi", "gpt_neox"]
NORMED = ["qwen3", "gemma3_text"]


@pytest.mark.parametrize("name", [name for name in REDUCIBLE if name not in FULL_ROTARY + NORMED])
def test_free_query_key_dimensions_of_low_rank_are_cut_for_free(name):
    """Without rotary positions all of them, with partial ones those that do not turn."""
    model = tiny(name)

    def change(weights, layer):
        w_k, w_free = weights.w_k_GKD.clone(), weights.w_k_GKD[:, layer.rotary :]
        b_free = None if weights.b_k_GK is None else weights.b_k_GK[:, layer.rotary :]
        w_k[:, layer.rotary :], b_new = low_rank(w_free, b_free, 2, seed=2)
        b_k = None if b_free is None else torch.cat((weights.b_k_GK[:, : layer.rotary], b_new), dim=1)
        return replace(weights, w_k_GKD=w_k, b_k_GK=b_k)

    shape = edit(model, change)
    layers = tuple(replace(LayerPlan.full(layer), qk_dim=layer.rotary + 2) for layer in shape.layers)
    agree(model, Plan.make(shape, layers))


@pytest.mark.parametrize(
    ("name", "named"),
    # Without names, partial rotary models lose free dimensions first.
    [(name, True) for name in FULL_ROTARY + PARTIAL_ROTARY] + [(name, False) for name in FULL_ROTARY],
)
def test_silent_rope_pairs_are_cut_for_free(name, named):
    """Each key/value head has its own two silent pairs, and they are found without being named."""
    model = tiny(name)
    half = shape_of(model).layers[0].rotary // 2
    silent = [{g % half, (g + 1) % half} for g in range(shape_of(model).layers[0].kv_heads)]

    def change(weights, layer):
        w_k = weights.w_k_GKD.clone()
        b_k = None if weights.b_k_GK is None else weights.b_k_GK.clone()
        for group, pairs in enumerate(silent):
            for pair in pairs:
                for tensor in (w_k, b_k):
                    if tensor is not None:
                        tensor[group, [pair, pair + half]] = 0
        return replace(weights, w_k_GKD=w_k, b_k_GK=b_k)

    shape = edit(model, change)
    kept = tuple(tuple(pair for pair in range(half) if pair not in gone) for gone in silent)
    layers = tuple(
        replace(LayerPlan.full(layer), qk_dim=layer.qk_dim - 4, rope_pairs=kept if named else None)
        for layer in shape.layers
    )
    agree(model, Plan.make(shape, layers))


@pytest.mark.parametrize("name", REDUCIBLE)
def test_heads_that_say_nothing_are_removed_for_free(name):
    model = tiny(name)

    def change(weights, layer):
        w_o = weights.w_o_HVD.clone()
        per_group = layer.heads // layer.kv_heads
        w_o[per_group:] = 0
        return replace(weights, w_o_HVD=w_o)

    shape = edit(model, change)
    layers = tuple(LayerPlan(layer.heads // layer.kv_heads, 1, layer.qk_dim, layer.v_dim) for layer in shape.layers)
    agree(model, Plan.make(shape, layers))
    reverse = tuple(replace(change, kept_heads=tuple(reversed(range(change.heads)))) for change in layers)
    agree(model, Plan.make(shape, reverse))


@pytest.mark.parametrize("name", REDUCIBLE)
def test_equal_key_value_heads_are_merged_for_free(name):
    model = tiny(name)

    def change(weights, layer):
        equal = {
            field: None if tensor is None else tensor[:1].expand_as(tensor).clone()
            for field, tensor in (
                ("w_k_GKD", weights.w_k_GKD),
                ("w_v_GVD", weights.w_v_GVD),
                ("b_k_GK", weights.b_k_GK),
                ("b_v_GV", weights.b_v_GV),
            )
        }
        return replace(weights, **equal)

    shape = edit(model, change)
    layers = tuple(replace(LayerPlan.full(layer), kv_heads=1) for layer in shape.layers)
    agree(model, Plan.make(shape, layers))
