"""Fingerprints: one for the same weights whatever they are stored in, another for any other weights."""

import pytest
import torch

from headwise.checkpoints.fingerprint import files_fingerprint, fingerprint, located
from headwise.checkpoints.load import open_model
from tests.tiny import MODELS, tiny
from tests.tokens import save_tokenizer


@pytest.mark.parametrize("name", MODELS)
def test_every_family_keeps_its_own_through_a_file_and_a_cast(name, tmp_path):
    model = tiny(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    own = fingerprint(model)
    assert fingerprint(open_model(str(tmp_path))) == own == fingerprint(model.float())
    assert fingerprint(tiny(name, seed=1)) != own


def test_a_change_of_any_tensor_of_any_size_shows():
    model = tiny("llama", hidden_size=64, intermediate_size=512)
    own, seen = fingerprint(model), {fingerprint(model)}
    for parameter in model.parameters():
        before = parameter.data
        parameter.data = before + 1e-3 * before.abs().mean()
        seen.add(fingerprint(model))
        parameter.data = before
    assert len(seen) == 1 + len(list(model.parameters())) and fingerprint(model) == own


def test_tied_weights_count_once_and_names_count():
    tied, loose = tiny("qwen2"), tiny("qwen2", tie_word_embeddings=False)
    assert fingerprint(tied) != fingerprint(loose)
    model = tiny("llama")
    own = fingerprint(model)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    assert fingerprint(model) != own


def test_what_lies_beside_the_weights_is_told_by_its_contents(tmp_path):
    for name in ("one", "two"):
        tiny("llama").save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    own = files_fingerprint(str(tmp_path / "one"))
    assert files_fingerprint(str(tmp_path / "two")) == own
    (tmp_path / "two" / "README.md").write_text("a card")
    (tmp_path / "two" / "model.safetensors").touch()
    assert files_fingerprint(str(tmp_path / "two")) == own
    words = tmp_path / "two" / "tokenizer.json"
    words.write_text(words.read_text().replace("<pad>", "<map>"))
    assert files_fingerprint(str(tmp_path / "two")) != own


def test_local_folders_are_remembered_wherever_one_stands(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert located("model") == str(tmp_path / "model")
    assert located("owner/model") == "owner/model"
