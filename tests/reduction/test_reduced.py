"""Random reduced plans: the student runs, generates the same with every cache, costs what was predicted, reloads."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

from headwise.checkpoints.verify import predicted_cache
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.records import Plan, cost_of
from headwise.reduction.build import build_reduced
from headwise.runtime import modeling_headwise, reopen
from headwise.tracing.example import example_inputs
from tests.plans import plans
from tests.reduction.reopened import reopened_without_headwise
from tests.tiny import DECODERS, REDUCIBLE, tiny

QUICK = settings(max_examples=8, suppress_health_check=list(HealthCheck))


def greedy(model, ids, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None, **options)


def check_generates_alike(small, ids):
    """The same tokens without a cache and with one: dynamic, static, with beams, with padding."""
    plain = greedy(small, ids, use_cache=False)
    assert torch.equal(plain, greedy(small, ids))
    assert torch.equal(plain, greedy(small, ids, cache_implementation="static"))
    beams = {"num_beams": 3, "length_penalty": 0.0}
    assert torch.equal(greedy(small, ids, use_cache=False, **beams), greedy(small, ids, **beams))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    assert torch.equal(small.generate(ids, use_cache=False, **padded), small.generate(ids, **padded))


@pytest.mark.parametrize("name", REDUCIBLE)
def test_student_has_the_planned_shape_and_cost(name):
    model = tiny(name)
    shape = shape_of(model)

    @QUICK
    @given(plan=plans(shape))
    def check(plan):
        student = build_reduced(model, plan)
        planned = shape.planned(plan)
        assert shape_of(student) == planned
        assert planned.total_parameters() == sum(p.numel() for p in student.parameters())
        attention = {
            id(parameter): parameter.numel()
            for site in sites_of(student)
            if not site.removed
            for module in (site.module, site.out)
            for parameter in module.parameters()
        }
        assert planned.attention_parameters() == sum(attention.values())
        inputs = example_inputs(student)
        with torch.no_grad():
            output = student(**inputs)
        assert torch.isfinite(output[0]).all()
        assert reopen.cache_bytes(output.get("past_key_values")) == predicted_cache(student, inputs)

    check()


@pytest.mark.parametrize("name", DECODERS)
def test_every_cache_generates_the_same_tokens(name):
    model = tiny(name)
    ids = example_inputs(model, tokens=8)["input_ids"]

    @QUICK
    @given(plan=plans(shape_of(model)), backend=st.sampled_from(["eager", "sdpa"] if name != "gemma2" else ["eager"]))
    def check(plan, backend):
        student = build_reduced(model, plan)
        student.set_attn_implementation(backend)
        plain = greedy(student, ids, use_cache=False)
        assert torch.equal(plain, greedy(student, ids))
        assert torch.equal(plain, greedy(student, ids, cache_implementation="static"))

    check()


@pytest.mark.parametrize("name", DECODERS)
def test_bytes_of_both_caches_are_as_predicted(name):
    model = tiny(name)
    ids = example_inputs(model, tokens=12)["input_ids"]

    @QUICK
    @given(plan=plans(shape_of(model)), tokens=st.integers(1, 12))
    def check(plan, tokens):
        student = build_reduced(model, plan)
        shape = shape_of(student)
        dynamic, static = DynamicCache(config=student.config), StaticCache(student.config, max_cache_len=16)
        with torch.no_grad():
            for cache in (dynamic, static):
                student(ids[:, :tokens], past_key_values=cache, use_cache=True)
        assert reopen.cache_bytes(dynamic) == cost_of(shape, tokens, batch=2, dtype="fp32").kv_bytes
        # A static cache is allocated for its full length at once; a window limits it to the window.
        kept = sum(layer.cached_per_token * min(16, layer.window or 16) for layer in shape.layers)
        assert reopen.cache_bytes(static) == kept * 2 * 4

    check()


@pytest.mark.parametrize("name", REDUCIBLE)
def test_student_round_trips_through_disk(name, tmp_path):
    model = tiny(name)

    @settings(QUICK, max_examples=3)
    @given(plan=plans(shape_of(model)))
    def check(plan):
        student = build_reduced(model, plan, form="per-layer")
        student.save_pretrained(tmp_path / "model")
        again, info = type(student).from_pretrained(
            tmp_path / "model", output_loading_info=True, attn_implementation=student.config._attn_implementation
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        inputs = example_inputs(student)
        with torch.no_grad():
            assert torch.equal(student(**inputs)[0], again.eval()(**inputs)[0])
        twice = build_reduced(again, Plan.full(shape_of(again)))  # a student can be reduced again
        with torch.no_grad():
            assert torch.equal(student(**inputs)[0], twice(**inputs)[0])

    check()


def test_reduced_models_of_every_family_open_in_a_fresh_process_without_headwise(tmp_path):
    """One process that cannot import headwise opens random reduced models of each family: the same outputs."""
    expected = {}

    def write_some(name, model):
        @settings(QUICK, max_examples=3)
        @given(plan=plans(shape_of(model)))
        def write(plan):
            student = build_reduced(model, plan, form="per-layer")
            inputs = example_inputs(student)
            key = f"{name}-{len(expected)}"
            student.save_pretrained(tmp_path / key)
            save_file({field: value.contiguous() for field, value in inputs.items()}, tmp_path / f"{key}.in")
            with torch.no_grad():
                expected[key] = student(**inputs)[0]

        write()

    for name in REDUCIBLE:
        write_some(name, tiny(name))
    process = reopened_without_headwise(tmp_path, expected)
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    for (name, output), report in zip(expected.items(), reports, strict=True):
        assert report["class"].startswith(modeling_headwise.PREFIX)
        assert report["missing"] == report["unexpected"] == []
        assert torch.allclose(load_file(tmp_path / f"{name}.out")["output"], output, atol=1e-5), name
