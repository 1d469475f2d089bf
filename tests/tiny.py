"""Tiny random models of every family, built in code. For exactness only: nothing is claimed about their quality."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPED = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
ENCODER = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
}
LATENT = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "n_group": 1,
    "topk_group": 1,
}
WINDOWED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# name: (config class, model class, config)
MODELS: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**ROPED, "attention_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**ROPED, "sliding_window": 6}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**ROPED, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", ROPED),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**ROPED, "head_dim": 12}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**ROPED, **WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**ROPED, **WINDOWED, "query_pre_attn_scalar": 16}),
    "phi": (
        "PhiConfig",
        "PhiForCausalLM",
        {**{k: v for k, v in ROPED.items() if k != "head_dim"}, "partial_rotary_factor": 0.5},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {k: v for k, v in ROPED.items() if k != "head_dim"}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**ENCODER, "rotary_pct": 0.5, "max_position_embeddings": 128},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **TEXT,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", ENCODER),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **TEXT,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**LATENT, "q_lora_rank": None}),
}
BACKENDS = [
    (name, backend) for name in MODELS for backend in ("eager", "sdpa") if (name, backend) != ("gemma2", "sdpa")
]  # transformers offers Gemma 2 no sdpa: its logits are capped
LATENT_MODELS = ("deepseek_v2", "deepseek_v3")
REDUCIBLE = tuple(name for name in MODELS if name not in LATENT_MODELS)
DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt_neox",
    "gpt2",
    "opt",
)


SMOLLM2 = {  # its heads and layers, but hardly any width
    "hidden_size": 36,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


def instead_of_smollm2(home: Path, **sizes: int) -> Path:
    """Write a tiny model to where headwise keeps SmolLM2-135M below ``home``."""
    from tests.tokens import EVERY_BYTE, save_tokenizer

    folder = home / ".cache" / "headwise" / "SmolLM2-135M-Instruct"
    text = {"max_position_embeddings": 8192, "vocab_size": EVERY_BYTE}
    tiny("llama", attention_bias=False, **text, **sizes).save_pretrained(folder)
    save_tokenizer(folder, EVERY_BYTE)
    return folder


def tiny(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny random model; biases and norms are random too, so that forgetting one shows."""
    config_name, class_name, values = MODELS[name]
    config = getattr(transformers, config_name)(**{**values, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)  # sharper attention than at initialisation
    if name == "gemma2":
        model.set_attn_implementation("eager")  # older versions of transformers run sdpa and forget the cap
    return model.eval()
