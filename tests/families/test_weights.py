"""The neutral view of the weights says what the model computes: checked against what the probe sees."""

import pytest
import torch

from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.families.weights import read_attention, write_attention
from headwise.records import LayerPlan, Plan
from headwise.reduction.build import build_reduced
from headwise.tracing.example import example_inputs
from headwise.tracing.probe import watching
from tests.tiny import DECODERS, LATENT_MODELS, MODELS, REDUCIBLE, tiny


def observe(model, inputs):
    """Input, q, k, v and output of every attention layer in one forward pass."""
    sites = sites_of(model)
    seen = {site.path: {} for site in sites}
    handles = []
    for site in sites:

        def remember(module, args, kwargs, path=site.path):
            hidden = args[0] if args else kwargs["hidden_states"]
            source = kwargs.get("key_value_states")
            seen[path].update(x=hidden, y=hidden if source is None else source)

        def remember_out(module, args, output, path=site.path):
            seen[path]["out"] = output

        handles += [
            site.module.register_forward_pre_hook(remember, with_kwargs=True),
            site.out.register_forward_hook(remember_out),
        ]
    with torch.no_grad(), watching(model, lambda path, a: seen[path].update(q=a.q_BHTK, k=a.k_BGSK, v=a.v_BGSV)):
        outputs = model(**inputs)
    for handle in handles:
        handle.remove()
    return seen, outputs[0]


@pytest.mark.parametrize("name", MODELS)
def test_probe_sees_every_layer_and_changes_nothing(name):
    model = tiny(name)
    inputs = example_inputs(model, tokens=5)
    with torch.no_grad():
        plain = model(**inputs)[0]
    before = model.config._attn_implementation
    seen, outputs = observe(model, inputs)
    assert torch.allclose(outputs, plain, atol=1e-5)
    assert model.config._attn_implementation == before
    for layer, tensors in zip(shape_of(model).layers, seen.values(), strict=True):
        assert tensors["q"].shape[1::2] == (layer.heads, layer.qk_dim)
        assert tensors["k"].shape[1::2] == (layer.kv_heads, layer.qk_dim)
        assert tensors["v"].shape[1::2] == (layer.kv_heads, layer.v_dim)


@pytest.mark.parametrize("name", REDUCIBLE)
def test_neutral_weights_reproduce_queries_keys_values_and_output(name):
    model = tiny(name)
    seen, _ = observe(model, example_inputs(model, tokens=5))
    for site, layer in zip(sites_of(model), shape_of(model).layers, strict=True):
        weights, tensors = read_attention(site, layer.rotary), seen[site.path]

        def project(w, b, x, norm, module=site.module):
            heads = torch.einsum("btd,hrd->bhtr", x, w)
            heads = heads if b is None else heads + b[:, None]
            return heads if norm is None else getattr(module, norm)(heads)

        norms = site.family.norms if weights.norm_q is not None else (None, None)
        # OPT and Whisper scale their queries before the backend sees them, others after: logits are what counts.
        q = project(weights.w_q_HKD, weights.b_q_HK, tensors["x"], norms[0])
        k = project(weights.w_k_GKD, weights.b_k_GK, tensors["y"], norms[1])
        v = project(weights.w_v_GVD, weights.b_v_GV, tensors["y"], None)
        group = layer.heads // layer.kv_heads
        # At the first position rotary embeddings turn by nothing.
        ratio = tensors["q"][:, :, 0] / q[:, :, 0]
        assert torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-2)
        assert torch.allclose(tensors["k"][:, :, 0], k[:, :, 0], atol=1e-5)
        assert torch.allclose(tensors["v"], v, atol=1e-5)

        logits = tensors["q"] @ tensors["k"].repeat_interleave(group, 1).mT
        logits = logits * (weights.scale / ratio.flatten()[0])
        softcap = getattr(site.module, "attn_logit_softcapping", None)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if layer.cache == "tokens":
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
        mixed = logits.softmax(-1) @ v.repeat_interleave(group, 1)
        out = torch.einsum("bhtv,hvd->btd", mixed, weights.w_o_HVD)
        out = out if weights.b_o_D is None else out + weights.b_o_D
        assert torch.allclose(tensors["out"], out, atol=1e-4)


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_latent_weights_are_right_up_to_the_norm_of_the_latent(name):
    model = tiny(name)
    seen, _ = observe(model, example_inputs(model, tokens=5))
    for site, layer in zip(sites_of(model), shape_of(model).layers, strict=True):
        weights, tensors = read_attention(site, layer.rotary), seen[site.path]
        nope = layer.qk_dim - layer.rotary
        for seen_part, weight in (
            (tensors["v"], weights.w_v_GVD),
            (tensors["k"][..., :nope], weights.w_k_GKD[:, layer.rotary :]),
            (tensors["q"][..., :nope], weights.w_q_HKD[:, layer.rotary :]),
        ):
            linear = torch.einsum("btd,hrd->bhtr", tensors["x"], weight)
            factor = (seen_part * linear).sum((1, 3), keepdim=True) / linear.square().sum((1, 3), keepdim=True)
            assert torch.allclose(seen_part, factor * linear, atol=1e-4)
        rope = torch.einsum("bd,hrd->bhr", tensors["x"][:, 0], weights.w_k_GKD[:, : layer.rotary])
        seen_rope = tensors["k"][:, :, 0, nope:]
        assert torch.allclose(seen_rope.sort(-1).values, rope.sort(-1).values, atol=1e-5)  # V3 may interleave pairs


@pytest.mark.parametrize("name", REDUCIBLE)
def test_writing_what_was_read_changes_nothing(name):
    model, other = tiny(name), tiny(name, seed=1)
    for site, blank, layer in zip(sites_of(model), sites_of(other), shape_of(model).layers, strict=True):
        write_attention(blank, read_attention(site, layer.rotary))
    written = dict(other.named_parameters())
    for site in sites_of(model):
        for name_, parameter in site.module.named_parameters():
            path = next(n for n, m in model.named_modules() if m is site.module)
            assert torch.equal(written[f"{path}.{name_}"], parameter)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gemma2"])
def test_probe_sees_the_true_widths_of_a_student(name):
    model = tiny(name)
    shape = shape_of(model)
    plan = Plan.make(shape, tuple(LayerPlan(layer.heads, 1, 6, 3) for layer in shape.layers))
    student = build_reduced(model, plan)
    seen, _ = observe(student, example_inputs(student, tokens=5))
    assert {(t["q"].shape[-1], t["v"].shape[-1]) for t in seen.values()} == {(6, 3)}
