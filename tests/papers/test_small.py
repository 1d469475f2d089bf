"""The small models of the experiments do what they say."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from headwise.files.errors import InputError
from headwise.papers.allocation.narrow import factors, narrowed, with_constant
from headwise.papers.depth.listops import CLOSE, _value, listops
from headwise.papers.heads import images, text
from headwise.papers.heads.lookups import LookUpModels, Shape, Task
from headwise.papers.kit import cifar
from headwise.papers.kit.data import chapters, characters, patches
from headwise.papers.kit.small import Attention, Heads, Small, uniform
from headwise.papers.kit.small import Shape as SmallShape


@pytest.mark.parametrize("layers", [1, 2])
def test_folding_the_query_is_exact(layers):
    """Against the model as the paper writes it: encoder, class token, heads one by one."""
    models = LookUpModels(Shape(heads=3, head_dim=4, hidden=8, layers=layers), seeds=2)
    x_BTd = torch.randn(5, 6, 4)
    w = {name: weight[1] for name, weight in models.weights.items()}

    def attend(layer, queries, tokens):
        out = []
        for head in torch.arange(12).view(3, 4):
            q, k, v = (w[f"{name}{layer}"][:, head] for name in ("q", "k", "v"))
            logits = (queries @ q) @ (tokens @ k).mT / math.sqrt(4)
            out.append(logits.softmax(-1) @ (tokens @ v))
        return torch.cat(out, dim=-1) @ w[f"o{layer}"]

    tokens = (x_BTd @ w["w_in"] + w["b_in"]).relu() @ w["w_code"] + w["b_code"]
    c = w["class"].T.expand(5, 1, -1)
    c = c + attend(0, c, tokens)
    if layers == 2:
        c = c + attend(1, c, tokens + attend(0, tokens, tokens))
    answers = torch.nn.functional.gelu(c @ w["w_out"] + w["b_out"]) @ w["w_end"] + w["b_end"]
    assert torch.allclose(models(x_BTd)[1], answers[:, 0, 0], atol=1e-5)


def test_seeds_in_one_program_are_independent():
    alone, together = (LookUpModels(Shape(2, 4), seeds) for seeds in (1, 3))
    task = Task.draw(3, 8)
    assert torch.allclose(alone(task.x_BTd[:4])[0], together(task.x_BTd[:4])[0], atol=1e-6)
    assert abs(float(task.y_B[:8000].std()) - 1) < 1e-3


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "alibi", "relative", "none"])
def test_causal_models_do_not_look_ahead(positions):
    shape = SmallShape(16, uniform(2, 2, 4, 8), 32, 10, True, positions, qk_norm=positions == "none")
    model = Small(shape, nn.Linear(3, 16), 5).eval()
    x = torch.randn(2, 10, 3)
    changed = x.clone()
    changed[:, 6:] += 1
    assert torch.allclose(model(x)[:, :6], model(changed)[:, :6], atol=1e-5)
    assert not torch.allclose(model(x)[:, 6:], model(changed)[:, 6:], atol=1e-3)


def test_agents_limit_the_rank_of_maps():
    attention = Attention(SmallShape(16, (), 0, 12, False), Heads(2, 8, 8, agents=3))
    maps = attention.weights(torch.randn(4, 12, 16)).double()
    assert torch.allclose(maps.sum(-1), torch.ones(4, 2, 12, dtype=torch.float64), atol=1e-5)
    assert int(torch.linalg.matrix_rank(maps, rtol=1e-5).max()) == 3


@pytest.mark.parametrize("start", ["svd", "weighted"])
def test_a_cut_to_the_full_width_changes_nothing_and_weighting_helps(start):
    torch.manual_seed(0)
    shape = SmallShape(16, uniform(2, 2, 6, 6), 16, 8, True)
    model = Small(shape, nn.Linear(4, 16), 3).eval()
    inputs = torch.randn(20, 8, 4) * torch.tensor([3.0, 1.0, 0.1, 0.01])
    whole = narrowed(model, inputs, [6, 6], start)
    assert torch.allclose(whole(inputs), model(inputs), atol=1e-4)
    attention, x = model.attentions()[0], model.attention_inputs(inputs)[0]
    left, right = factors(attention)
    seen = with_constant(x)
    q, k = attention.queries_and_keys(x)
    assert torch.allclose((seen @ left[1]) @ (seen @ right[1]).mT, (q @ k.mT)[:, 1], atol=1e-4)


def test_data_is_there_offline():
    assert len(characters().train) > 2 * len(characters().validation) > 200_000
    pieces = chapters(4, 32, 20)
    assert pieces.inputs.shape == (80, 32)
    assert pieces.train == 64
    assert patches(torch.arange(16.0).view(1, 4, 4), 2)[0, 1].tolist() == [2, 3, 6, 7]
    lists = listops(50, 24)
    assert lists.inputs.shape == (50, 24)
    assert int(lists.labels.max()) < 10
    assert int((lists.inputs == CLOSE).sum(1).min()) > 0
    assert [_value(name, [3, 9, 4]) for name in ("MAX", "MIN", "MED", "SM")] == [9, 3, 4, 6]


def test_cifar10_is_kept_once_fetched_and_missed_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cifar.cifar10.cache_clear()

    def offline(*args, **kwargs):
        raise ConnectionError("No route to host.")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(InputError, match=r"cannot be fetched: No route to host\. Go online once"):
        cifar.cifar10(20)

    def part(name, split):
        count = cifar.TEST if split.startswith("test") else cifar.TRAIN
        return {"img": [np.full((32, 32, 3), 255, np.uint8)] * count, "label": [split.startswith("test")] * count}

    monkeypatch.setattr("datasets.load_dataset", part)
    photos = cifar.cifar10(20)
    assert photos.inputs.shape == (2020, 32, 32, 3)
    assert photos.inputs.max() == 1
    assert photos.labels[:20].max() == 0 and photos.labels[photos.train :].min() == 1
    placed = images.on_canvas(photos, 40, 4, 0)
    assert placed.inputs.shape == (2020, 100, 48)
    monkeypatch.setattr("datasets.load_dataset", offline)
    cifar.cifar10.cache_clear()
    assert len(cifar.cifar10(30).labels) == 2030
    cifar.cifar10.cache_clear()


def test_a_query_is_told_from_its_candidates():
    reads = text.Passages(8)
    x_BTW = torch.randn(2, 5, text.WIDTH)
    swapped = x_BTW[:, [3, 1, 2, 0, 4]]
    assert not torch.allclose(reads(x_BTW)[:, 0], reads(swapped)[:, 3])
    assert torch.allclose(reads(x_BTW)[:, 1], reads(swapped)[:, 1])


def test_a_norm_of_queries_and_keys_caps_logits():
    attention = Attention(SmallShape(32, uniform(1, 8, 4, 4), 0, 6, False, qk_norm=True), Heads(8, 4, 4))
    logits = attention.logits(*attention.queries_and_keys(100 * torch.randn(2, 6, 32)))
    assert 1.0 < logits.abs().max() <= 2.0 + 1e-3


@pytest.mark.parametrize(("causal", "qk_norm", "v_dim"), [(True, False, 4), (False, True, 4), (True, True, 3)])
def test_fused_attention_is_that_of_its_maps(causal, qk_norm, v_dim):
    torch.manual_seed(0)
    sizes = Heads(8, 4, v_dim)
    attention = Attention(SmallShape(32, (sizes,), 0, 6, causal, qk_norm=qk_norm), sizes)
    x_BTD = torch.randn(2, 6, 32)
    fused = attention.heads(x_BTD)
    attention.fused = False
    assert torch.allclose(attention.heads(x_BTD), fused, atol=1e-6)
