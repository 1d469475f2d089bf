"""SmolLM2, whole and reduced, in the real llama.cpp: the same tokens in, the same tokens out, the cache as promised."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwise as hw
from headwise.data.texts import EVALUATION_TEXT
from headwise.records import LayerPlan, Plan
from headwise.steps.demo import demo_model
from tests.commands import headwise
from tests.serving.llama_cpp import LlamaCpp, library_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library_file() is None, reason="xllamacpp is not installed: make slow does it"),
]
CONTEXT = 512
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was",
    "Water boils at a temperature of",
    "In 1969, the first",
)
SPACES = "naïve  spaces\n\nnew\ttab, 123 apples — and <|im_start|>user\nHi!<|im_end|>"


def plan_of(kind, shape):
    layers = [LayerPlan.full(layer) for layer in shape.layers]
    if kind == "uniform":
        layers = [LayerPlan(9, 3, 60, 60, rope_pairs=(tuple(range(30)),) * 3)] * len(layers)
    if kind == "heads":
        layers[7] = LayerPlan(0, 0, 0, 0)
        layers[20] = LayerPlan(6, 2, 64, 64, kept_heads=(0, 1, 2, 6, 7, 8))
    return Plan.make(shape, layers)


@pytest.fixture(scope="module", params=["dense", "uniform", "heads"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    source = str(demo_model())
    if request.param != "dense":
        model = hw.open(source)
        small = hw.compress(model, plan_of(request.param, hw.shape_of(model)))
        source = folder / "model"
        hw.save(small, source, tokenizer=AutoTokenizer.from_pretrained(str(demo_model())))
    done = headwise("export", source, "--gguf", folder / "m.gguf", "--json")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(source), LlamaCpp(folder / "m.gguf", CONTEXT), json.loads(done.stdout)


def test_text_becomes_the_same_tokens(exported):
    _, tokenizer, served, _ = exported
    for text in (*PROMPTS, SPACES, EVALUATION_TEXT.read_text(encoding="utf-8")[:4000]):
        assert served.tokens(text) == tokenizer(text).input_ids


def test_the_same_greedy_tokens(exported):
    model, tokenizer, served, _ = exported
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :].tolist()
        assert served.greedy(ids.input_ids[0].tolist(), len(tokens)) == tokens


def test_the_same_perplexity_and_the_cache_as_predicted(exported):
    model, tokenizer, served, report = exported
    ids = tokenizer(EVALUATION_TEXT.read_text(encoding="utf-8")[:8000]).input_ids[:CONTEXT]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    losses = [cross_entropy(logits[:-1], torch.tensor(ids[1:])).item() for logits in (expected, served.logits(ids))]
    assert losses[1] == pytest.approx(losses[0], abs=0.01)
    assert served.cache_bytes == pytest.approx(CONTEXT * report["kv_bytes_per_token"], rel=0.01)
