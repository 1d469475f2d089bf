"""A Llama-type GGUF file as an ordinary transformers model folder.

transformers can open GGUF files, but keeps their weights quantised and runs several times slower; here they are
dequantised once, to float32, with the values the file stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.checkpoints.gguf.package import library
from headwise.data.processors import open_tokenizer
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.writing import new_folder

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@locking("folder", "demo")
def convert_gguf(file: Path, folder: Path) -> None:
    """Write the Llama model in ``file`` to ``folder``: config, float32 safetensors, tokenizer. Whole or not at all."""
    reader = _reader(file)
    with new_folder(folder) as temporary:
        _model(reader).save_pretrained(temporary)
        open_tokenizer(str(file.parent), gguf_file=file.name).save_pretrained(temporary)


def _reader(file: Path) -> Any:
    try:
        reader = library().GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:  # the reader indexes into short files
        raise InputError(f"{file} is not a readable GGUF file: {error}.") from None
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise InputError(f"{file} holds a {architecture!r} model; only Llama-type GGUF files can be converted.")
    return reader


def _model(reader: Any) -> LlamaForCausalLM:
    config = _config(reader)
    state = {}
    for tensor in reader.tensors:
        weight = torch.tensor(library().dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        name = _name(tensor.name)
        if ".q_proj" in name:
            weight = _unpermute(weight, config.num_attention_heads)
        elif ".k_proj" in name:
            weight = _unpermute(weight, cast(int, config.num_key_value_heads))
        state[name] = weight
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model


def _config(reader: Any) -> LlamaConfig:
    def field(name: str, default: Any = None) -> Any:
        entry = reader.fields.get(name)
        return default if entry is None else entry.contents()

    width, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=width,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv", heads),
        head_dim=field("llama.attention.key_length", width // heads),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    return f"{NAMES[parts[0]]}.{parts[1]}"


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp stores the two coordinates of a RoPE pair side by side; transformers half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
