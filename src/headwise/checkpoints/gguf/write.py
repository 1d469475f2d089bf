"""A model written as one GGUF file that llama.cpp runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.checkpoints.gguf.blocks import Blocks
from headwise.checkpoints.gguf.package import library
from headwise.checkpoints.gguf.tokens import Vocabulary
from headwise.files.writing import replacing
from headwise.records.settings import GgufPrecision

EMBEDDING = "token_embd.weight"


def write_gguf(blocks: Blocks, words: Vocabulary, path: Path, name: str, precision: GgufPrecision) -> None:
    """Write the model of ``blocks`` with its vocabulary to ``path``, matrices in ``precision``; whole or not at all."""
    gguf = library()
    kinds = {key: _kind(gguf, key, tensor, precision) for key, tensor in blocks.tensors()}
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, blocks.architecture)
        _describe(writer, blocks, name)
        mostly = "ALL_F32" if precision == "f32" else f"MOSTLY_{precision.upper()}"
        writer.add_file_type(gguf.LlamaFileType[mostly])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_words(writer, words)
        for key, tensor in blocks.tensors():
            block, size = gguf.GGML_QUANT_SIZES[kinds[key]]
            writer.add_tensor_info(key, tensor.shape, np.float32, tensor.numel() // block * size, kinds[key])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in blocks.tensors():
            writer.write_tensor_data(gguf.quants.quantize(tensor.contiguous().numpy(), kinds[key]))
        writer.close()


def _kind(gguf: Any, key: str, tensor: Tensor, precision: GgufPrecision) -> Any:
    """How a tensor is stored: vectors whole, embeddings in at least 8 bits, rows that fit no block in 16."""
    kinds = gguf.GGMLQuantizationType
    if tensor.ndim == 1:
        return kinds.F32
    kind = kinds.Q8_0 if key == EMBEDDING and precision == "q4_0" else kinds[precision.upper()]
    return kinds.F16 if tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def _describe(writer: Any, blocks: Blocks, name: str) -> None:
    config = blocks.model.config
    width = blocks.places.width
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(blocks.heads))
    writer.add_head_count(_one_or_list(blocks.heads))
    writer.add_head_count_kv(_one_or_list(blocks.kv_heads))
    writer.add_feed_forward_length(_one_or_list(blocks.channels))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _one_or_list(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts


def _add_words(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores:
        writer.add_token_scores(words.scores)
    if words.merges:
        writer.add_token_merges(words.merges)
    add = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "unk": writer.add_unk_token_id}
    add["pad"] = writer.add_pad_token_id
    for name, number in words.ids.items():
        add[name](number)
    for name, value in words.flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    if words.template:
        writer.add_chat_template(words.template)
