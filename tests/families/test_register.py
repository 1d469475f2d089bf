"""A family that is added at run time is taken everywhere, and what is saved of it opens everywhere."""

import pytest
import torch
import transformers

import headwise as hw
from headwise.files.errors import InputError
from headwise.records.cost import cost_of
from headwise.reduction.build import build_reduced
from headwise.runtime.reopen import cache_bytes
from tests.tiny import ROPED
from tests.tokens import save_tokenizer

SIZES = {name: value for name, value in ROPED.items() if name != "head_dim"}
BLOCKS = hw.Stack("layers", attention="self_attn", out="self_attn.o_proj", norms=("input_layernorm",))
GRANITE = hw.Family(name="granite", model_types=("granite",), stacks=(BLOCKS,), rope_list=True)


pytestmark = pytest.mark.usefixtures("families_as_before")


@pytest.fixture
def granite():
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**SIZES, attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.0)
    return transformers.GraniteForCausalLM(config).eval()


def test_a_registered_family_is_measured_reduced_saved_and_opened(granite, tmp_path):
    with pytest.raises(InputError, match="does not know the architecture 'granite'"):
        hw.shape_of(granite)
    hw.register_family(GRANITE)
    shape = hw.shape_of(granite)
    ids = torch.arange(3, 23)[None]
    output = granite(ids)
    assert shape.family == "granite"
    assert shape.total_parameters() == sum(parameter.numel() for parameter in granite.parameters())
    assert cache_bytes(output.past_key_values) == cost_of(shape, 20, dtype="fp32").kv_bytes
    same = build_reduced(granite, hw.Plan.full(shape), form="per-layer")
    torch.testing.assert_close(same(ids).logits, output.logits)

    layers = (hw.LayerPlan(4, 2, 4, 6), hw.LayerPlan(0, 0, 0, 0), hw.LayerPlan.full(shape.layers[2]))
    small = hw.compress(granite, hw.Plan.make(shape, layers))
    report = hw.save(small, tmp_path / "out")  # opened again in a process that has not registered anything
    assert report["class"] == "HeadwiseGraniteForCausalLM" and report["missing"] == []
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again(ids).logits, small(ids).logits)
    assert hw.plan_of(again) == hw.plan_of(small)


def test_it_opens_from_a_folder_once_it_is_registered(granite, tmp_path):
    granite.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(InputError, match="does not know the architecture 'granite'"):
        hw.open(tmp_path)
    hw.register_family(GRANITE)
    assert hw.shape_of(hw.open(tmp_path)) == hw.shape_of(granite)


def test_a_family_that_is_known_stays_as_it_is():
    hw.register_family(GRANITE)
    hw.register_family(GRANITE)
    other = hw.Family(name="stone", model_types=("granite",), stacks=(BLOCKS,))
    with pytest.raises(InputError, match="has a family granite for granite already"):
        hw.register_family(other)
    with pytest.raises(InputError, match="has a family llama for llama, mistral"):
        hw.register_family(hw.Family(name="llama", model_types=("granite2",), stacks=(BLOCKS,)))
    with pytest.raises(InputError, match="must name its `model_types`"):
        hw.register_family(hw.Family(name="none", model_types=(), stacks=()))
