"""Seconds to factorise the attention of a model with a billion parameters by its weights alone: no statistics, no text.

    python benchmarks/large_cut.py [-o results/large_cut.json]

Random weights in the shape of Llama 3.2 1B (16 layers, width 2,048, 32 query and 8 key/value heads of 64), cut to 48.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.reduction.reduce import reduce_model

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("results/large_cut.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_1B)).eval()
    shape = shape_of(model)
    plan = Plan.make(shape, tuple(LayerPlan(layer.heads, layer.kv_heads, 48, 48) for layer in shape.layers))
    start = time.perf_counter()
    reduce_model(model, plan, {}, "svd", refit=())
    found = {
        "parameters": shape.total_parameters(),
        "seconds": round(time.perf_counter() - start, 1),
        "seed": 0,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(found))
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
