"""The public names: exactly these, each with a docstring, each function with an example that runs."""

import doctest
import inspect
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

import headwise as hw
from headwise.runtime.cache import write_spec
from tests.runtime.specs import random_spec
from tests.tiny import tiny
from tests.tokens import EVERY_BYTE, save_tokenizer

FUNCTIONS = [
    *("inspect", "plan", "compress", "heal", "evaluate", "save", "open", "run", "design", "train", "compare", "cost"),
    *("plan_of", "register_family", "shape_of", "watching", "read_attention", "write_attention", "sites_of"),
    "cache",
]
CLASSES = [
    *(
        "Profile",
        "Plan",
        "Change",
        "LayerPlan",
        "Scores",
        "Cost",
        "ModelShape",
        "LayerShape",
        "Family",
        "Stack",
        "InputError",
        "RunConfig",
    ),
    *("HealConfig", "TrainConfig", "OpenConfig", "TrustConfig", "ReadConfig", "InspectConfig", "BudgetConfig"),
    *("BoundConfig", "CacheConfig", "PlanConfig", "CompressConfig", "EvaluateConfig", "CostConfig", "DesignConfig"),
]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from here. " * 40


def test_dir_shows_exactly_the_public_names():
    assert dir(hw) == sorted([*FUNCTIONS, *CLASSES])
    assert sorted(hw.__all__) == dir(hw)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_is(name):
    text = inspect.getdoc(getattr(hw, name))
    assert text and not text.startswith(f"{name}(")  # as a dataclass writes it itself


def test_importing_headwise_does_not_import_torch():
    code = "import sys, headwise as hw; hw.Plan, hw.design, hw.register_family; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What examples may use: a model, its tokenizer, its folder, texts, and what the first steps make of them."""
    folder = tmp_path_factory.mktemp("world")
    tiny("llama", vocab_size=EVERY_BYTE, attention_bias=False).save_pretrained(folder / "model")
    save_tokenizer(folder / "model", EVERY_BYTE)
    source = str(folder / "model")
    (folder / "coded").mkdir()
    write_spec(folder / "coded" / "cache.safetensors", random_spec())
    model, tokenizer = hw.open(source, device="cpu"), AutoTokenizer.from_pretrained(source)
    config = hw.InspectConfig(tokens=256, lengths=(16,), maps=False)
    profile = hw.inspect(model, tokenizer, text=TEXT, config=config, checks=False)
    plan = hw.plan(profile, keep_kv=0.5, config=hw.PlanConfig(multiple_of=2))
    return {
        "hw": hw,
        "model": model,
        "tokenizer": tokenizer,
        "source": source,
        "coded": folder / "coded",
        "text": TEXT,
        "texts": TEXT.split(". ")[:-1],
        "held_out": TEXT[::-1],
        "profile": profile,
        "plan": plan,
        "small": hw.compress(model, plan, profile),
    }


@pytest.mark.usefixtures("reopened_here", "families_as_before")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_that_runs(name, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(hw, name))
    assert text and ">>> " in text
    example = doctest.DocTestParser().get_doctest(text, {**world, "folder": tmp_path}, name, None, 0)
    failures = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_what_left_the_public_names_says_so():
    for name in ("save_student", "open_model", "cost_of"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(hw, name)
