"""GGUF files written of reduced models: their arithmetic, written by hand, says what the models say."""

import json

import gguf
import pytest
import torch
from hypothesis import given, settings
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwise.checkpoints.gguf.blocks import blocks_of
from headwise.checkpoints.gguf.run import GgufModel
from headwise.checkpoints.gguf.tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, Vocabulary, vocabulary
from headwise.checkpoints.gguf.write import write_gguf
from headwise.families.shapes import shape_of
from headwise.records import InputError, LayerPlan, Plan
from headwise.reduction.build import build_reduced
from tests.commands import headwise
from tests.plans import plans
from tests.tiny import VOCAB, tiny
from tests.tokens import EVERY_BYTE, save_tokenizer

WORDS = Vocabulary("gpt2", "gpt-2", [f"w{i}" for i in range(VOCAB)], [NORMAL] * VOCAB, merges=["w 0"])
MODEL = tiny("llama")
SHAPE = shape_of(MODEL)
IDS = torch.arange(3, 43).view(2, 20)


def written(model, path, precision="f32"):
    blocks = blocks_of(model)
    write_gguf(blocks, WORDS, path, "tiny", precision)
    return blocks, GgufModel(path)


def said(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf") / "model.gguf"


@given(plans(SHAPE))
@settings(max_examples=15, deadline=None)
def test_any_reduced_llama_says_the_same(file, plan):
    model = build_reduced(MODEL, plan)
    blocks, read = written(model, file)
    torch.testing.assert_close(read.logits(IDS), said(model), atol=1e-4, rtol=0)
    assert blocks.places.width % 2 == 0
    least = sum(layer.cached_per_token for layer in shape_of(model).layers)
    assert blocks.cached_numbers >= least


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_of_any_fixed_kind_are_listed(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 100.0}
    rope |= {} if kind == "default" else {"factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model = tiny("llama", rope_parameters=rope)
    blocks, read = written(model, tmp_path / "m.gguf")
    assert (blocks.factors() is None) == (kind == "default")
    torch.testing.assert_close(read.logits(IDS), said(model), atol=1e-4, rtol=0)


def test_uniform_widths_are_a_smaller_llama(tmp_path):
    pairs = ((0, 2), (0, 2))
    plan = Plan.make(SHAPE, [LayerPlan(4, 2, 4, 4, rope_pairs=pairs)] * 3)
    model = build_reduced(MODEL, plan, form="stock")
    blocks, read = written(model, tmp_path / "m.gguf")
    assert (blocks.architecture, blocks.places.pairs, blocks.cached_numbers) == ("llama", (0, 1), 3 * 2 * 2 * 4)
    torch.testing.assert_close(read.logits(IDS), said(model), atol=1e-4, rtol=0)


def test_removed_attention_and_mlps_are_blocks_of_deci(tmp_path):
    layers = [LayerPlan(0, 0, 0, 0), LayerPlan(2, 1, 8, 8, kept_heads=(0, 1)), LayerPlan.full(SHAPE.layers[2])]
    model = build_reduced(MODEL, Plan.make(SHAPE, layers))
    blocks, read = written(model, tmp_path / "m.gguf")
    assert (blocks.architecture, blocks.heads, blocks.kv_heads) == ("deci", [1, 2, 4], [1, 1, 2])
    torch.testing.assert_close(read.logits(IDS), said(model), atol=1e-4, rtol=0)


def test_quantised_files_are_smaller_and_near(tmp_path):
    model = tiny("llama", hidden_size=64, intermediate_size=64, head_dim=16)
    sizes, errors = [], []
    for precision in ("f32", "f16", "q8_0", "q4_0"):
        _, read = written(model, tmp_path / precision, precision)
        sizes.append((tmp_path / precision).stat().st_size)
        errors.append((read.logits(IDS) - said(model)).abs().max().item())
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert errors[1] < 0.01 < errors[3]


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("gpt2", {}, "Llama- and Mistral-type"),
        ("mistral", {}, "sliding window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "fixed frequencies"),
        ("llama", {"hidden_act": "gelu"}, "SiLU"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(kind, config, words):
    with pytest.raises(InputError, match=words):
        blocks_of(tiny(kind, **config))


def fast(tokenizer, **special):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_bytes_and_scores_of_sentencepiece_like_tokenizers():
    vocab = {"<unk>": 0, "<s>": 1, "<0x41>": 2, "▁": 3, "a": 4, "b": 5, "ab": 6, "▁ab": 7}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("a", "b"), ("▁", "ab")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = vocabulary(fast(tokenizer, unk_token="<unk>", bos_token="<s>"), rows=9)
    assert (words.model, words.tokens[8]) == ("llama", "[PAD8]")
    assert words.types == [UNKNOWN, CONTROL, BYTE, *[NORMAL] * 5, UNUSED]
    assert words.scores[6] > words.scores[7] > words.scores[4]
    assert words.flags == {"add_bos_token": False, "add_eos_token": False, "add_space_prefix": True}


@pytest.mark.parametrize(
    ("before", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            "smollm",
        ),
        (pre_tokenizers.Whitespace(), None),
    ],
)
def test_ways_to_split_text_have_llama_cpps_names(before, name):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = before
    if name is None:
        with pytest.raises(InputError, match="how this tokenizer splits"):
            vocabulary(fast(tokenizer), 3)
    else:
        words = vocabulary(fast(tokenizer), 3)
        assert (words.pre, words.merges) == (name, ["a b"])


def test_the_command_writes_a_file_that_says_what_the_model_says(tmp_path):
    tiny("llama", vocab_size=EVERY_BYTE, max_position_embeddings=512).save_pretrained(tmp_path / "in")
    save_tokenizer(tmp_path / "in", EVERY_BYTE)
    done = headwise("export", tmp_path / "in", "--gguf", "m.gguf", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["divergence"] < 1e-3
    assert report["kv_bytes_per_token"] == report["model_kv_bytes_per_token"]
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["llama.attention.head_count_kv"].contents() == 2
    assert len(fields["tokenizer.ggml.tokens"].contents()) == EVERY_BYTE
    done = headwise("export", tmp_path / "in", "--gguf", tmp_path / "in")
    assert (done.returncode, "is a folder" in done.stderr) == (2, True)
