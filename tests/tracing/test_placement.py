"""Models run where and in what they are told to, and come back as they were."""

import pytest
import torch

from headwise.files.errors import InputError
from headwise.records.settings import OpenConfig
from headwise.tracing.placement import as_it_was, device_named, place, running
from tests.tiny import tiny


def state(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_as_it_was(own, dtype):
    model = tiny("llama").to(own).train()
    model.model.layers[1].eval()
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    before, values = state(model), [parameter.clone() for parameter in model.parameters()]
    modes, backend = [module.training for module in model.modules()], model.config._attn_implementation
    expected = {"auto": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with running(model, OpenConfig(device="cpu", dtype=dtype)) as placed:
        assert placed is model and not model.training and {each.dtype for each in model.parameters()} == {expected}
    assert state(model) == before and [module.training for module in model.modules()] == modes
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), values, strict=True))
    assert model.model.norm.weight.grad is not None and model.config._attn_implementation == backend


def test_also_after_an_error_and_after_somebody_moved_it():
    model = tiny("llama").to(torch.bfloat16)
    before = state(model)
    with pytest.raises(RuntimeError, match="on the way"), as_it_was(model):
        model.float().requires_grad_(False)
        raise RuntimeError("on the way")
    assert state(model) == before


def test_frequencies_of_rope_keep_their_digits_in_half_precision():
    model = place(tiny("llama"), OpenConfig(device="cpu", dtype="bf16"))
    assert model.dtype == torch.bfloat16 and model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "cuda:x"])
def test_a_device_that_is_not_there_gets_one_sentence(name):
    with pytest.raises(InputError, match=rf"There is no device '{name}' here; `device` may be auto or cpu"):
        device_named(name)
