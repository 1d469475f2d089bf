"""What people give instead of a model folder gets one sentence that says what to give."""

import gzip
import json

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import headwise as hw
from headwise.checkpoints.load import open_config, open_model
from headwise.data.texts import read_text, read_texts
from headwise.records import LayerPlan, Plan
from headwise.reduction.build import build_reduced
from tests.tiny import tiny


def adapter(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    return folder


def gguf_folder(folder):
    (folder / "tiny-q4.gguf").write_bytes(b"GGUF")
    return folder


def gguf_file(folder):
    return gguf_folder(folder) / "tiny-q4.gguf"


def weights(folder):
    tiny("llama").save_pretrained(folder)
    return folder / "model.safetensors"


def old_sentence_transformers(folder):
    tiny("bert").save_pretrained(folder / "0_Transformer")
    (folder / "modules.json").write_text("[]")
    return folder


def plan(folder):
    shape = hw.shape_of(tiny("llama"))
    Plan.make(shape, tuple(map(LayerPlan.full, shape.layers))).save(folder / "plan.json")
    return folder / "plan.json"


def nothing(folder):
    return folder


MISTAKES = {
    adapter: ["PEFT adapter of org/base", "merge_and_unload"],
    gguf_folder: ["tiny-q4.gguf is a GGUF file", 'gguf_file="tiny-q4.gguf"'],
    gguf_file: ["tiny-q4.gguf is a GGUF file", "the model it was made from"],
    weights: ["model.safetensors holds weights alone; give the folder"],
    old_sentence_transformers: ["older layout of sentence-transformers", "give ", "/0_Transformer."],
    plan: ["plan.json is a headwise plan; give the folder of a model, or a profile"],
    nothing: ["has no config.json, so it is not a model folder"],
}


@pytest.mark.parametrize("made", MISTAKES, ids=lambda made: made.__name__)
def test_what_is_no_model_folder(made, tmp_path):
    with pytest.raises(hw.InputError) as error:
        open_config(str(made(tmp_path)))
    assert all(part in str(error.value) for part in MISTAKES[made]) and "\n" not in str(error.value)


def test_what_it_says_to_give_opens(tmp_path):
    old_sentence_transformers(tmp_path)
    assert open_model(str(tmp_path / "0_Transformer")).config.model_type == "bert"


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_quantised_weights_are_named(method, tmp_path):
    weights(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": method}}))
    with pytest.raises(hw.InputError, match=f"are quantised by {method}; give the model they were made from"):
        open_model(str(tmp_path))


def test_a_hub_that_cannot_be_reached(monkeypatch):
    def away(*args, **kwargs):
        try:
            raise LocalEntryNotFoundError("outgoing traffic has been disabled")
        except LocalEntryNotFoundError as error:
            raise OSError("We couldn't connect") from error

    monkeypatch.setattr("headwise.checkpoints.load.AutoConfig.from_pretrained", away)
    with pytest.raises(hw.InputError, match=r"the Hub cannot be reached\. .*: hf download org/some-model$"):
        open_config("org/some-model")

    def gone(*args, **kwargs):
        raise OSError("org/some-model is not a valid model identifier")

    monkeypatch.setattr("headwise.checkpoints.load.AutoConfig.from_pretrained", gone)
    with pytest.raises(hw.InputError, match="not a valid model identifier"):
        open_config("org/some-model")


def test_gzipped_text_is_read(tmp_path):
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo\n"))
    assert read_text(str(tmp_path / "text.txt.gz")) == "one\ntwo\n"
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert read_texts([str(tmp_path / "rows.jsonl.gz")])[0].passages == ("one", "two")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"one two three")[:-9])
    with pytest.raises(hw.InputError, match=r"cut\.gz cannot be read as text"):
        read_text(str(tmp_path / "cut.gz"))


def test_a_stock_model_that_cannot_be_says_uniform():
    model = tiny("llama")
    shape = hw.shape_of(model)
    layers = [LayerPlan.full(layer) for layer in shape.layers]
    layers[0] = LayerPlan(0, 0, 0, 0)
    with pytest.raises(hw.InputError, match="use the per-layer format, or make a plan with --uniform"):
        build_reduced(model, Plan.make(shape, tuple(layers)), form="stock")
