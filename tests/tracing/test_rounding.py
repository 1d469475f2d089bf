"""Rounded keys and values: block by block as in the whole model, whatever ran before."""

import pytest
import torch

from headwise.families.shapes import shape_of
from headwise.records import Plan
from headwise.reduction.latent.change import Latent
from headwise.reduction.levels import any_codes
from headwise.tracing.rounding import rounding
from headwise.tracing.stream import Stream
from tests.tiny import tiny


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "qwen3", "gpt2"])
@torch.no_grad()
def test_blocks_by_themselves_read_what_the_whole_model_reads(name):
    """Windows of several lengths go through each block in turn: keys are turned back by angles of their own window."""
    model = tiny(name)
    shape = shape_of(model)
    digits = (Latent(("3" * layer.joint_group_width,) * layer.value_groups) for layer in shape.layers)
    codes = any_codes(model, Plan.make(shape, list(digits)))
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 97, size, generator=generator)} for size in ((1, 40), (2, 9), (3, 1))]
    last = []
    with rounding(model, codes):
        stream = Stream(model, batches)
        handle = stream.blocks[-1].register_forward_hook(
            lambda module, args, output: last.append(output if isinstance(output, torch.Tensor) else output[0])
        )
        for batch in batches:
            model(**batch)
        handle.remove()
        for block in range(len(stream.blocks)):
            stream.hidden = [stream.run(block, n) for n in range(len(batches))]
    for expected, own in zip(last, stream.hidden, strict=True):
        torch.testing.assert_close(own, expected)
