"""SmolLM2 with other heads in some layers, in the real vLLM: the same tokens and losses, the cache that was promised.

`make serve-test` says in HEADWISE_VLLM which Python has vLLM.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwise as hw
from headwise.records import LayerPlan, Plan
from headwise.steps.demo import demo_model
from tests.serving.test_llama_cpp import PROMPTS

PYTHON = os.environ.get("HEADWISE_VLLM")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="make serve-test has vLLM")]
SCRIPT = Path(__file__).parent / "run_vllm.py"
NEW = 12


def served(folder):
    command = [PYTHON, SCRIPT, folder, str(NEW), *PROMPTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def reduced(kind, folder):
    model = hw.open(str(demo_model()))
    layers = [LayerPlan.full(layer) for layer in hw.shape_of(model).layers]
    if kind == "heads":
        layers[20] = LayerPlan(6, 2, 64, 64, kept_heads=(0, 1, 2, 6, 7, 8))
        layers[25] = LayerPlan(9, 3, 64, 48)
    else:
        layers = [LayerPlan(9, 3, 32, 32, rope_pairs=(tuple(range(0, 32, 2)),) * 3)] * len(layers)
    small = hw.compress(model, Plan.make(hw.shape_of(model), layers))
    hw.save(small, folder, tokenizer=AutoTokenizer.from_pretrained(str(demo_model())))
    return folder


def widest(layer):
    """What vLLM caches of a layer: values are padded to the width of keys."""
    return 2 * layer.kv_heads * max(layer.qk_dim, layer.v_dim)


@pytest.mark.parametrize("kind", ["heads", "uniform"])
def test_vllm_says_what_transformers_says(kind, tmp_path):
    folder = reduced(kind, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answer = served(folder)
    losses = []
    for prompt, result in zip(PROMPTS, answer["results"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert ids[0].tolist() == result["prompt"]
        with torch.inference_mode():
            tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
            expected = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        assert tokens == result["tokens"]
        losses.append((expected.mean().item(), sum(result["loss"]) / len(result["loss"])))
    for ours, theirs in losses:
        assert theirs == pytest.approx(ours, rel=0.01)
    dense = served(demo_model())["cached_tokens"]
    numbers = [sum(map(widest, hw.shape_of(each).layers)) for each in (hw.open(str(demo_model())), model)]
    assert answer["cached_tokens"] / dense == pytest.approx(numbers[0] / numbers[1], rel=0.01)
