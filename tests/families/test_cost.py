"""Cost arithmetic against the models themselves: parameters, bytes of real caches, operations torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.checkpoints.load import empty_model
from headwise.checkpoints.verify import predicted_cache
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.records import cost_of
from headwise.runtime.reopen import cache_bytes
from headwise.tracing.example import example_inputs
from tests.tiny import DECODERS, LATENT_MODELS, MODELS, tiny

CACHING = (*DECODERS, *LATENT_MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name):
    model = tiny(name)
    shape = shape_of(model)
    assert shape.total_parameters() == sum(p.numel() for p in model.parameters())
    modules = [module for site in sites_of(model) for module in (site.module, site.out)]
    attention = {id(p): p.numel() for module in modules for p in module.parameters()}
    assert shape.attention_parameters() == sum(attention.values())
    assert shape_of(empty_model(type(model), model.config)) == shape


@pytest.mark.parametrize("name", MODELS)
def test_cache_bytes_are_those_of_a_real_cache(name):
    model = tiny(name)
    inputs = example_inputs(model, tokens=13)
    with torch.no_grad():
        output = model(**inputs)
    measured = cache_bytes(output.get("past_key_values"))
    assert measured == predicted_cache(model, inputs)
    assert (measured > 0) == (name in (*CACHING, "whisper"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cache_bytes_follow_the_dtype(dtype):
    model = tiny("llama").to(dtype)
    inputs = example_inputs(model)
    with torch.no_grad():
        assert cache_bytes(model(**inputs).past_key_values) == predicted_cache(model, inputs)


@pytest.mark.parametrize("name", CACHING)
def test_decode_flops_are_those_torch_counts(name):
    model = tiny(name, **({"sliding_window": None} if name == "mistral" else {}))
    if "layer_types" in MODELS[name][2]:
        model = tiny(name, layer_types=["full_attention"] * 3)
    model.set_attn_implementation("eager")
    if name in LATENT_MODELS:
        model.set_experts_implementation("eager")  # torch does not count grouped products
    ids = example_inputs(model, tokens=11)["input_ids"][:1]
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(ids[:, -1:], past_key_values=cache, use_cache=True)
    predicted = cost_of(shape_of(model), context=10).decode_flops
    counted = counter.get_total_flops()
    rotary = 2 * sum(
        buffer.numel() for n, buffer in model.named_buffers() if n.endswith("inv_freq") and "orig" not in n
    )
    # Some families compute their rotary angles as a matrix product.
    assert counted - predicted in (0, rotary)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_encoder_flops_are_those_torch_counts(name):
    model = tiny(name)
    model.set_attn_implementation("eager")
    inputs = example_inputs(model, tokens=12)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    once = sum(
        2 * module.weight.numel() * inputs["input_ids"].shape[0]
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "classifier" in path
    )
    cost = cost_of(shape_of(model), context=12)
    assert counter.get_total_flops() - once == cost.prefill_flops * inputs["input_ids"].numel()
    assert cost.decode_flops == 0


def test_causal_prefill_is_the_sum_of_its_decodes():
    """What the mean per input token says times the tokens is what decoding them one by one costs."""
    shape = shape_of(tiny("gemma2"))  # windows in some layers
    total = sum(cost_of(shape, context).decode_flops for context in range(1, 40))
    first = cost_of(shape, 1).prefill_flops
    assert cost_of(shape, 40).prefill_flops * 40 == pytest.approx(first + total, abs=40 * len(shape.layers))


def test_windows_stop_the_cache_from_growing():
    shape = shape_of(tiny("mistral"))
    assert cost_of(shape, 5).kv_bytes < cost_of(shape, 6).kv_bytes * 1.21
    assert cost_of(shape, 6).kv_bytes == cost_of(shape, 600).kv_bytes
