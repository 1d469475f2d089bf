"""The cache of latent attention (MLA) rounded: plans against the same bits for every coordinate, on two small models.

    python benchmarks/latent_attention.py [--steps 400] [--seed 0] [-o results/latent_attention.json]

DeepSeek V2 and V3 as transformers writes them, three layers of 4 heads, a latent of 32 and a rotary key of 8, learn
from random weights a text of 16 tokens in which 85 % of the tokens follow from the last one and the one three places
back. "uniform" gives each coordinate as many bits in the coordinates of the profile, "own" in the model's own; plans
get the very bytes of these. "cut" keeps 16 bits of some coordinates of the latent and nothing of the others. Bytes are
counted at 4,096 tokens against bf16; every query reads rounded latents, its own among them. Losses are excess nats over
the dense model on text that is new to both, with one standard error over batches; the profile saw other text than
either. KL is that from the dense model on the held-out part of the profile's text.

Time is that of one new token in float32 on two threads, batch 1, against `DynamicCache` token by token in turn, medians
of eight: two layers as wide in their attention as those of DeepSeek V2 Lite (16 heads, latent of 512, rotary key of
64), with random weights and 4 bits for every coordinate; neither changes time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from bits import commit
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

import headwise as hw
from headwise.checkpoints.packed import codes_of
from headwise.files.writing import replacing
from headwise.records import Plan, cost_of
from headwise.records.budget import Budget
from headwise.records.shape import ModelShape
from headwise.reduction.bits.change import Bits
from headwise.reduction.levels import any_codes
from headwise.reduction.plans import plan_for
from headwise.runtime.cache import CacheSpec, PackedCache
from headwise.tracing.fisher import measure_distance
from headwise.tracing.rounding import rounding

FIRST, SYMBOLS, USUAL, BACK = 3, 16, 0.85, 3
BATCH, TOKENS, RATE = 16, 64, 3e-3
MEASURED, HELD_OUT = 6, 20  # batches
AT = 4096  # tokens in the cache, for bytes
ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SIZES = {
    "vocab_size": FIRST + SYMBOLS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
MODELS = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
WIDE = {
    **SIZES,
    **EXPERTS,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 8192,
}
CONTEXTS, STEPS, THREADS = (1024, 4096), 8, 2
Batches = list[dict[str, Tensor]]


def text(batches: int, seed: int) -> Batches:
    """Batches of the language described above; ``seed`` draws the text, its rules are always the same."""
    rules = torch.randint(FIRST, FIRST + SYMBOLS, (SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(7))
    generator, drawn = torch.Generator().manual_seed(seed), []
    for _ in range(batches):
        ids = torch.randint(FIRST, FIRST + SYMBOLS, (BATCH, TOKENS), generator=generator)
        usual = torch.rand(BATCH, TOKENS, generator=generator) < USUAL
        for t in range(BACK, TOKENS):
            ids[:, t] = ids[:, t].where(~usual[:, t], rules[ids[:, t - 1] - FIRST, ids[:, t - BACK] - FIRST])
        drawn.append({"input_ids": ids})
    return drawn


def trained(name: str, steps: int, seed: int) -> Any:
    """A small model that has learnt the language."""
    config_class, model_class = MODELS[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**SIZES, **ATTENTION, **EXPERTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for batch in text(steps, seed + 1):
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def losses(model: Any, codes: CacheSpec | None, batches: Batches) -> Tensor:
    """The loss of each batch."""
    with rounding(model, codes):
        return torch.stack([model(**batch, labels=batch["input_ids"]).loss for batch in batches])


def uniform(shape: ModelShape, digit: str) -> Plan:
    """As many bits for every coordinate."""
    widths = [(layer.cached.qk_dim, layer.cached.v_dim) for layer in shape.layers]
    return Plan.make(shape, [Bits((digit * K,), (digit * V,)) for K, V in widths])


def cut(profile: hw.Profile, rank: int) -> Plan:
    """All of the shared key and so many coordinates of the latent, those felt most (which come first)."""
    widths = [(layer.cached.qk_dim, layer.cached.v_dim) for layer in profile.shape.layers]
    return Plan.make(profile.shape, [Bits(("g" * K,), ("g" * rank + "0" * (V - rank),)) for K, V in widths])


def without_bases(profile: hw.Profile) -> hw.Profile:
    """A profile that leaves every cache in the model's own coordinates."""
    kept = {name: tensor for name, tensor in profile.tensors.items() if "_code_" not in name}
    return replace(profile, tensors=kept)


def measure(model: Any, profile: hw.Profile, batches: Batches) -> Sequence[dict[str, Any]]:
    """Every row of one model."""
    dense, shape = losses(model, None, batches), hw.shape_of(model)
    rows = []

    def row(label: str, plan: Plan, measured: hw.Profile = profile) -> float:
        small = hw.compress(model, plan, measured)
        codes = codes_of(small)
        share = cost_of(hw.shape_of(small), AT).kv_bytes / cost_of(shape, AT).kv_bytes
        excess = losses(small, codes, batches) - dense
        with rounding(small, codes):
            divergence = measure_distance(model, small, profile.held_out()).divergence
        error = excess.std().item() / len(excess) ** 0.5
        measured_loss = {"excess": excess.mean().item(), "error": error, "kl": divergence}
        rows.append({"cache": label, "bytes": share, **measured_loss, "predicted": plan.predicted.get("loss_increase")})
        print(json.dumps(rows[-1]), flush=True)
        return share

    for digit in "432":
        row(f"own, {digit} bits", uniform(shape, digit), without_bases(profile))
        share = row(f"uniform, {digit} bits", uniform(shape, digit))
        row("plan", plan_for(profile, Budget("keep_kv", share, AT), cache="mixed"))
    for share in (0.25, 0.125):
        row("plan", plan_for(profile, Budget("keep_kv", share, AT), cache="mixed"))
    for rank in (24, 16, 8):
        row(f"cut to {rank}", cut(profile, rank))
    return rows


@torch.inference_mode()
def decoding(context: int) -> dict[str, Any]:
    """Seconds of one new token after so many, with a packed cache and with a dense one."""
    torch.manual_seed(0)
    model: Any = DeepseekV2ForCausalLM(DeepseekV2Config(**WIDE)).eval()
    codes = any_codes(model, uniform(hw.shape_of(model), "4"))
    if codes is None:
        raise RuntimeError("The plan does not round the cache.")
    ids = torch.randint(FIRST, FIRST + SYMBOLS, (1, context))
    caches = {"packed": PackedCache(model, codes), "dense": DynamicCache(config=model.config)}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for cache in caches.values():
        model(ids, past_key_values=cache, logits_to_keep=1)
    for _ in range(STEPS):
        for name, cache in caches.items():
            start = time.perf_counter()
            model(ids[:, :1], past_key_values=cache)
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    return {"context": context, **seconds, "ratio": seconds["packed"] / seconds["dense"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/latent_attention.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    times = [decoding(context) for context in CONTEXTS]
    print(json.dumps(times), flush=True)
    models = []
    for name in MODELS:
        model = trained(name, args.steps, args.seed)
        profile = hw.inspect(
            model, inputs=text(MEASURED, 1000), config=hw.InspectConfig(tokens=4096, maps=False), checks=False
        )
        batches = text(HELD_OUT, 5000)
        loss = losses(model, None, batches).mean().item()
        models.append({"model": name, "loss": loss, "rows": measure(model, profile, batches)})
    facts = {
        "steps": args.steps,
        "seed": args.seed,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }
    with replacing(args.output) as temporary:
        temporary.write_text(json.dumps({**facts, "models": models, "times": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
