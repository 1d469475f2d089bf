"""Frozen models, lean or fast, give the same gradients as a plain backward pass, for every family."""

import pytest
import torch

from headwise.families.sites import sites_of
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import backward_from_own_output
from headwise.tracing.gradient_checkpointing import checkpointed, frozen, tracked
from headwise.tracing.probe import watching
from tests.tiny import MODELS, tiny


def gradients(model, inputs, through=None):
    """Gradient of the model's loss against itself at the output of every attention, in order of sites."""
    found = {}

    def see(path, attention):
        if torch.is_grad_enabled() and attention.out_BTHV.requires_grad:
            attention.out_BTHV.register_hook(lambda gradient: found.__setitem__(path, gradient))

    model.zero_grad()
    with watching(model, see):
        if through:
            with frozen(model), through(model):
                backward_from_own_output(model(**inputs), seed=3)
        else:
            backward_from_own_output(model(**inputs), seed=3)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_plain_backward_pass(name):
    model = tiny(name)
    model.config.use_cache = False
    inputs = example_inputs(model, tokens=8)
    asking = [parameter.requires_grad for parameter in model.parameters()]
    plain, twice, once = (gradients(model, inputs, how) for how in (None, checkpointed, tracked))
    assert sorted(plain) == sorted(site.path for site in sites_of(model))
    for path, gradient in plain.items():
        assert torch.allclose(twice[path], gradient, atol=1e-5, rtol=1e-3), path
        assert torch.allclose(once[path], gradient, atol=1e-5, rtol=1e-3), path
    assert [parameter.requires_grad for parameter in model.parameters()] == asking


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


def test_models_without_a_head_are_asked_for_their_hidden_state():
    model = tiny("bert").base_model
    inputs = example_inputs(model, tokens=8)
    found = gradients(model, inputs, checkpointed)
    assert len(found) == 3 and all(gradient.abs().sum() > 0 for gradient in found.values())
