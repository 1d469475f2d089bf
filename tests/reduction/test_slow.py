"""The same claims with more of everything: minutes instead of seconds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from headwise.families.shapes import shape_of
from headwise.records import Plan
from headwise.reduction.build import build_reduced
from headwise.tracing.example import example_inputs
from tests.checkpoints.test_ecosystem import reduced
from tests.plans import plans
from tests.reduction.test_reduced import greedy
from tests.tiny import DECODERS, tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", DECODERS)
def test_every_cache_generates_the_same_tokens_under_a_hundred_plans(name):
    model = tiny(name)
    ids = example_inputs(model, tokens=8)["input_ids"]

    @settings(max_examples=100, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(plan=plans(shape_of(model)))
    def check(plan):
        student = build_reduced(model, plan)
        plain = greedy(student, ids, use_cache=False)
        assert torch.equal(plain, greedy(student, ids))
        assert torch.equal(plain, greedy(student, ids, cache_implementation="static"))

    check()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_compiled_by_inductor(name):
    student = reduced(name)
    inputs = example_inputs(student)
    with torch.no_grad():
        expected = student(**inputs)[0]
        assert torch.allclose(torch.compile(student, fullgraph=True)(**inputs)[0], expected, atol=1e-4)


def test_smollm2_is_unchanged_by_the_full_plan_in_generation():
    from headwise.checkpoints.load import open_model
    from headwise.steps.demo import demo_model

    model = open_model(str(demo_model()))
    student = build_reduced(model, Plan.full(shape_of(model)), form="per-layer")
    ids = torch.arange(1000, 1064)[None]
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
        settings_ = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
        assert torch.equal(model.generate(ids, **settings_), student.generate(ids, **settings_))
