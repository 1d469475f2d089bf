"""Blocks dropped whole: what that costs is measured by running the rest, and plans for fewer layers stay stock."""

from dataclasses import replace

import pytest
import torch

from headwise.checkpoints.profiled import Profile
from headwise.data.calibration import Batch
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records import Plan
from headwise.records.budget import Budget
from headwise.reduction.build import build_reduced
from headwise.reduction.flatten.change import Flatten
from headwise.reduction.mlp.change import Channels
from headwise.reduction.plans import plan_for
from headwise.reduction.removal.change import Removal
from headwise.runtime.modeling_headwise import ReducedModel
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import measure_distance
from headwise.tracing.substitution import TOKENS, some_tokens, substituted
from tests.calls import inspect
from tests.tiny import REDUCIBLE, tiny
from tests.tokens import save_tokenizer

DROPPED = Removal("block")
STACKED = tuple(name for name in REDUCIBLE if name != "whisper")
FLATTENED = tuple(name for name in STACKED if name not in ("gemma2", "gemma3_text", "bert", "roberta", "distilbert"))
PART = {Channels(0): "mlp", DROPPED: "block", Flatten(): "flattened"}


@pytest.mark.parametrize("name", STACKED)
def test_what_is_left_out_costs_what_the_model_without_it_measures(name):
    model = tiny(name)
    shape, batches = shape_of(model), [example_inputs(model, 12, seed) for seed in range(2)]
    count = 1 if "input_ids" not in batches[0] else 2
    losses = substituted(model, batches)
    for number, measured in enumerate(losses):
        assert ("flattened" in measured) == (name in FLATTENED and number < len(shape.layers) - 1)
        for change in filter(lambda change: PART[change] in measured, PART):
            loss = measured[PART[change]]
            plan = Plan.make(shape, [(change,) if i == number else () for i in range(len(shape.layers))])
            reduced = build_reduced(model, plan)
            distance = measure_distance(model, reduced, [Batch(batch, 0, ()) for batch in batches[:count]])
            assert loss == pytest.approx(distance.divergence, rel=1e-3, abs=1e-6)
    assert all("forward" not in block.__dict__ for block in model.modules())


def test_few_tokens_of_long_texts_are_run():
    chosen = some_tokens([{"input_ids": torch.zeros(3, 200, dtype=torch.long)}] * 2)
    assert [tuple(batch["input_ids"].shape) for batch in chosen] == [(1, 200), (1, TOKENS - 200)]


def test_fewer_layers_are_a_stock_model(tmp_path):
    tiny("llama", attention_bias=False).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away from here " * 8)
    inspect(str(tmp_path / "model"), tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=96, lengths=(16, 32))
    profile, model = Profile.load(tmp_path / "run"), tiny("llama", attention_bias=False)
    losses = [layer.values["left_out"][1] for layer in profile.layers]
    plan = plan_for(profile, Budget("layers", 2), uniform=True)
    least = min(range(3), key=losses.__getitem__)
    assert plan.layers == tuple((DROPPED,) if i == least else () for i in range(3))
    assert plan.predicted["loss_increase"] == losses[least]
    assert plan.predicted["expected"] is None
    reduced = build_reduced(model, plan, tensors=profile.tensors)
    assert not isinstance(reduced, ReducedModel) and reduced.config.num_hidden_layers == 2
    assert plan_for(profile, Budget("layers", 3)).layers == ((),) * 3
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").budget["layers"] == 2
    with pytest.raises(InputError, match="at least one layer"):
        Budget("layers", 0)


def test_a_block_that_nobody_misses_goes_under_a_budget_of_parameters(tmp_path):
    model = tiny("llama", attention_bias=False)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away from here " * 8)
    inspect(str(tmp_path / "model"), tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=96, lengths=(16, 32))
    profile = Profile.load(tmp_path / "run")
    losses = ([1.0, 2.0], [1.0, 1e-9], [1.0, 2.0])  # without the MLP, without the block
    measured = [
        replace(layer, values={**layer.values, "left_out": own})
        for layer, own in zip(profile.layers, losses, strict=True)
    ]
    profile = replace(profile, layers=tuple(measured))
    for share, alone in ((0.67, True), (0.5, False)):
        plan = plan_for(profile, Budget("keep_params", share), multiple=4)
        assert plan.layers[1] == (DROPPED,) and bool(plan.layers[0] or plan.layers[2]) != alone
        reduced = build_reduced(model, plan, tensors=profile.tensors)
        assert shape_of(reduced).block_parameters() <= share * profile.shape.block_parameters()
    least = plan_for(profile, Budget("keep_params", 0.05), multiple=4)
    assert any(layer is not None and layer.heads for layer in least.after(profile.shape))
