"""A plan that changes nothing gives the stock model's outputs, for every family, backend and cache."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from headwise.families.shapes import shape_of
from headwise.records import Plan
from headwise.reduction.build import build_reduced
from headwise.tracing.example import example_inputs
from tests.tiny import BACKENDS, DECODERS, REDUCIBLE, tiny

PAIRS = [pair for pair in BACKENDS if pair[0] in REDUCIBLE]


def pair(name, backend):
    model = tiny(name)
    model.set_attn_implementation(backend)
    student = build_reduced(model, Plan.full(shape_of(model)), form="per-layer")
    student.set_attn_implementation(backend)
    assert type(student) is not type(model)
    return model, student


def caches(model, kind, length):
    if kind == "none":
        return None
    config = model.config
    make = (lambda: DynamicCache(config=config)) if kind == "dynamic" else (lambda: StaticCache(config, length))
    return make()


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_full_plan_is_the_identity(name, backend):
    model, student = pair(name, backend)
    inputs = example_inputs(model)
    with torch.no_grad():
        assert torch.allclose(student(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
@pytest.mark.parametrize(("name", "backend"), [pair for pair in PAIRS if pair[0] in DECODERS])
def test_full_plan_is_the_identity_with_a_cache(name, backend, kind):
    """A prompt in one pass, then token by token, past the windows of those that have one."""
    model, student = pair(name, backend)
    ids = example_inputs(model, tokens=14)["input_ids"]
    logits = []
    with torch.no_grad():
        for each in (model, student):
            if kind == "none":
                logits.append(each(ids, use_cache=False).logits)
                continue
            cache = caches(each, kind, 14)
            steps = [each(ids[:, :9], past_key_values=cache, use_cache=True).logits]
            for position in range(9, 14):
                steps.append(each(ids[:, position : position + 1], past_key_values=cache, use_cache=True).logits)
            logits.append(torch.cat(steps, dim=1))
    assert torch.allclose(*logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_full_plan_is_the_identity_in_an_encoder_decoder_with_a_cache(backend, kind):
    model, student = pair("whisper", backend)
    inputs = example_inputs(model, tokens=10)
    ids = inputs["decoder_input_ids"]
    logits = []
    with torch.no_grad():
        for each in (model, student):
            encoded = each.get_encoder()(inputs["input_features"])
            cache = EncoderDecoderCache(caches(each, kind, 10), caches(each, kind, 20))
            steps = [
                each(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache).logits
                for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:8])
            ]
            logits.append(torch.cat(steps, dim=1))
    assert torch.allclose(*logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", REDUCIBLE)
def test_full_plan_round_trips_through_disk_bit_by_bit(name, tmp_path):
    model = tiny(name)
    student = build_reduced(model, Plan.full(shape_of(model)), form="per-layer")
    student.save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path, attn_implementation=student.config._attn_implementation)
    before, after = student.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    inputs = example_inputs(model)
    with torch.no_grad():
        assert torch.equal(student(**inputs)[0], again.eval()(**inputs)[0])


@pytest.mark.parametrize("name", REDUCIBLE)
def test_student_is_a_copy(name):
    """Training a student must not reach into its teacher."""
    model = tiny(name)
    student = build_reduced(model, Plan.full(shape_of(model)), form="per-layer")
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(parameter.data_ptr() in theirs for parameter in student.parameters())
    assert student.state_dict().keys() >= {k for k in model.state_dict() if ".mlp." in k}
