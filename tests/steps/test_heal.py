"""Healing: every way of learning brings a cut model nearer, none makes it worse, and no work is lost."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headwise.families.load import open_model
from headwise.records.errors import InputError
from headwise.records.healing import Healing
from headwise.records.plan import LayerPlan, Plan
from headwise.steps.compress import compress
from headwise.steps.heal import CURVE, heal
from headwise.families.shapes import shape_of
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = " ".join(f"the {a} {b} jumps over the lazy {c}" for a in "quick brown red".split() for b in "fox cat dog".split() for c in "dog cow hen pig".split()) * 6
QUICK = {"tokens": 2400, "context": 16, "batch": 3, "held_out": 96, "evaluations": 4, "local_tokens": 480, "precision": "fp32"}


def prepared(folder, name="llama"):
    """A tiny model with logits worth learning, and what is left of it after a cut by its weights alone."""
    torch.manual_seed(0)
    model = tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    shape = shape_of(model)
    layers = tuple(LayerPlan(l.heads, l.kv_heads, max(2, l.qk_dim // 2), max(1, l.v_dim // 2)) for l in shape.layers[:2])
    plan = Plan.make(shape, (*layers, *map(LayerPlan.full, shape.layers[2:])))
    plan.save(folder / "plan.json")
    compress(str(folder / "model"), folder / "plan.json", folder / "student")
    return str(folder / "student"), str(folder / "model")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return folder, *prepared(folder)


@pytest.mark.parametrize("train", ["attention", "values", "lora", "all"])
def test_every_way_of_learning_helps(pair, tmp_path, train):
    folder, student, teacher = pair
    found = heal(student, teacher, tmp_path / "healed", texts=[str(folder / "text.txt")], how=Healing(train=train, **QUICK))
    print(train, found["before"], found["after"], found["best"])
    assert found["after"] < 0.95 * found["before"]
    assert (tmp_path / "healed" / CURVE).is_file()
    assert not (tmp_path / "healed.healing").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
