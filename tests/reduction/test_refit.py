"""Refitted students: nearer to their teacher in every family, and untouched where nothing was cut."""

import pytest
import torch

from headwise.data.calibration import Batch
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.reduction.build import build_reduced, settle_plan
from headwise.reduction.widths.refit import refit_model
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import measure_distance
from headwise.tracing.stream import Stream
from tests.tiny import REDUCIBLE, tiny

STACKED = tuple(name for name in REDUCIBLE if name != "whisper")
NORMED = tuple(name for name in STACKED if name.startswith("gemma3"))  # norms behind queries and outputs


def halved(model, form="per-layer", values=True):
    layers = []
    for layer in shape_of(model).layers:
        pairs = layer.rotary // 4
        free = (layer.qk_dim - layer.rotary + 1) // 2
        qk_dim = layer.qk_dim if layer.norm == "affine" else 2 * pairs + free
        layers.append(LayerPlan(layer.heads, layer.kv_heads, qk_dim, layer.v_dim // 2 if values else layer.v_dim))
    return settle_plan(model, Plan.make(shape_of(model), tuple(layers)), form)


def batches_of(model, count=6, tokens=16):
    return [example_inputs(model, tokens, seed) for seed in range(count)]


def distance(model, student, batches):
    return measure_distance(model, student, [Batch(batch, 0, ()) for batch in batches]).divergence


@pytest.mark.parametrize("name", STACKED)
@torch.no_grad()
def test_a_stream_gives_what_the_model_gives(name):
    model = tiny(name)
    batches = batches_of(model, 2)
    stream, seen = Stream(model, batches), []
    handle = stream.blocks[-1].register_forward_hook(
        lambda module, args, output: seen.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    for batch in batches:
        model(**batch)
    handle.remove()
    for block in range(len(stream.blocks)):
        stream.hidden = [stream.run(block, n) for n in range(len(batches))]
    for expected, found in zip(seen, stream.hidden, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", REDUCIBLE)
@torch.no_grad()
def test_refitting_brings_a_student_nearer(name):
    model = tiny(name)
    # Gemma 2 has a norm behind its outputs: only queries can be fitted, so only those are cut.
    batches, plan = batches_of(model), halved(model, values=name != "gemma2")
    before = distance(model, build_reduced(model, plan), batches)
    student = build_reduced(model, plan, share=True)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    refit_model(model, student, plan, batches)
    after = distance(model, student, batches)
    assert after == before if name in NORMED else after < before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_every_piece_changes_what_it_names_and_nothing_else():
    model = tiny("llama")
    batches, plan = batches_of(model), halved(model)
    plain = build_reduced(model, plan).state_dict()
    for pieces, names in ((("queries",), {"q_proj"}), (("temperature",), {"q_proj"}), (("outputs",), {"o_proj"})):
        student = build_reduced(model, plan)
        refit_model(model, student, plan, batches, pieces)
        changed = {
            key.split(".")[-2] for key, value in student.state_dict().items() if not torch.equal(value, plain[key])
        }
        assert changed == names


@torch.no_grad()
def test_stock_and_per_layer_students_get_the_same_weights():
    model = tiny("llama")
    batches, plan = batches_of(model), halved(model, "stock")
    outputs = []
    for form in ("stock", "per-layer"):
        student = build_reduced(model, plan, form=form)
        refit_model(model, student, plan, batches)
        outputs.append(student(**batches[0]).logits)
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_dropped_blocks_removed_attention_and_removed_heads_are_made_up_for():
    model = tiny("llama")
    shape = shape_of(model)
    layers = [LayerPlan.full(layer) for layer in shape.layers]
    kept = tuple(range(shape.layers[0].heads // shape.layers[0].kv_heads))
    layers[0] = LayerPlan(len(kept), 1, 4, 4, kept_heads=kept)
    layers[1] = LayerPlan(0, 0, 0, 0)
    plan = settle_plan(model, Plan.make(shape, tuple(layers)), "per-layer")
    dropped = Plan.make(shape, (LayerPlan.full(shape.layers[0]), LayerPlan(0, 0, 0, 0, dropped=True), *layers[2:]))
    batches = batches_of(model)
    for each in (plan, dropped):
        student = build_reduced(model, each)
        before = distance(model, student, batches)
        refit_model(model, student, each, batches)
        assert distance(model, student, batches) < before


@torch.no_grad()
def test_texts_of_one_token_come_out_nearer_too():
    model = tiny("llama")
    batches, plan = batches_of(model, count=2, tokens=64), halved(model)
    student = build_reduced(model, plan)
    alone = [{"input_ids": batch["input_ids"].view(-1, 1)} for batch in batches]
    before = distance(model, student, alone)
    refit_model(model, student, plan, batches)
    assert distance(model, student, alone) < before


@torch.no_grad()
def test_what_was_not_cut_stays_as_it_was():
    model = tiny("llama")
    plan = Plan.full(shape_of(model))
    student = build_reduced(model, plan)
    refit_model(model, student, plan, batches_of(model))
    for found, expected in zip(student.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
