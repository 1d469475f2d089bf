"""Frozen models, lean or fast, give the same gradients as a plain backward pass, for every family."""

import pytest
import torch

from headwise.families.sites import sites_of
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import backward_from_sampled_labels
from headwise.tracing.gradient_checkpointing import block_inputs_require_grad, frozen, gradient_checkpointing
from headwise.tracing.probe import watching
from tests.tiny import MODELS, tiny


def gradients(model, inputs, through=None):
    """Gradient of the loss of sampled labels at the output of every attention, in order of sites."""
    collected = {}

    def see(path, attention):
        if torch.is_grad_enabled() and attention.out_BTHV.requires_grad:
            attention.out_BTHV.register_hook(lambda gradient: collected.__setitem__(path, gradient))

    model.zero_grad()
    with watching(model, see):
        if through:
            with frozen(model), through(model):
                backward_from_sampled_labels(model(**inputs), seed=3)
        else:
            backward_from_sampled_labels(model(**inputs), seed=3)
    return collected


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_plain_backward_pass(name):
    model = tiny(name)
    model.config.use_cache = False
    inputs = example_inputs(model, tokens=8)
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    contexts = (None, gradient_checkpointing, block_inputs_require_grad)
    plain, twice, once = (gradients(model, inputs, through) for through in contexts)
    assert sorted(plain) == sorted(site.path for site in sites_of(model))
    for path, gradient in plain.items():
        assert torch.allclose(twice[path], gradient, atol=1e-5, rtol=1e-3), path
        assert torch.allclose(once[path], gradient, atol=1e-5, rtol=1e-3), path
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


@pytest.mark.parametrize("name", MODELS)
def test_watched_attention_explains_its_own_output(name):
    """Logits from what was watched (mask, cap, scale, groups) times values are what the layer really gave out."""
    model = tiny(name)

    def see(path, attention):
        a = attention.logits(slice(None), slice(None)).softmax(-1)
        values = attention.v_BGSV.repeat_interleave(attention.heads // attention.v_BGSV.shape[1], dim=1)
        assert torch.allclose((a @ values).transpose(1, 2), attention.out_BTHV, atol=1e-5), path
        seen.append(path)

    seen = []
    with torch.no_grad(), watching(model, see):
        model(**example_inputs(model, tokens=9))
    assert sorted(seen) == sorted(site.path for site in sites_of(model))


def test_models_without_a_head_give_gradients_of_their_hidden_state():
    model = tiny("bert").base_model
    inputs = example_inputs(model, tokens=8)
    by_path = gradients(model, inputs, gradient_checkpointing)
    assert len(by_path) == 3 and all(gradient.abs().sum() > 0 for gradient in by_path.values())
