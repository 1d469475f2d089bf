"""inspect on models in memory: what the folder gives, bit by bit, and the model is left as it was."""

import numpy as np
import pytest
import torch

from headwise.checkpoints.load import open_model
from headwise.checkpoints.profiled import Profile
from headwise.data.processors import open_tokenizer
from headwise.files.errors import InputError
from headwise.pipelines.profile import inspect, inspect_folder
from headwise.records.settings import InspectConfig, OpenConfig
from headwise.steps.check import check
from tests.commands import headwise
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 20
SMALL = InspectConfig(tokens=96, lengths=(16, 32))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny("llama", head_dim=16).to(torch.bfloat16).save_pretrained(folder / "llama")
    tiny("bert").save_pretrained(folder / "bert")
    tiny("vit").save_pretrained(folder / "vit")
    for name in ("llama", "bert"):
        save_tokenizer(folder / name)
    (folder / "text.txt").write_text(TEXT)
    pictures = np.random.default_rng(0).random((10, 3, 12, 12), dtype=np.float32)
    np.savez(folder / "pictures.npz", pixel_values=pictures)
    return folder


def same(one, other):
    """Whether two profiles hold the same, but for where their inputs came from."""
    facts = ("shape", "settings", "versions", "layers", "checks", "notes")
    assert [getattr(one, name) for name in facts] == [getattr(other, name) for name in facts]
    assert one.model == other.model and one.text["sha256"] == other.text["sha256"]
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return True


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_in_memory_as_in_a_folder(place, tmp_path, name):
    source = str(place / name)
    folder = inspect_folder(source, tmp_path / "run", texts=[str(place / "text.txt")], config=SMALL)
    model, tokenizer = open_model(source).train(), open_tokenizer(source)
    before = {each: tensor.clone() for each, tensor in model.state_dict().items()}
    profile = inspect(model, tokenizer, text=TEXT, config=SMALL)
    assert folder.checks and same(profile, folder) and profile.text["name"] == "1 text"
    assert model.training and all(torch.equal(tensor, before[each]) for each, tensor in model.state_dict().items())
    assert model.dtype == (torch.bfloat16 if name == "llama" else torch.float32)
    unchecked = inspect(model, tokenizer, text=TEXT, config=SMALL, checks=False)
    assert not unchecked.checks and same(check(model, unchecked), folder)
    assert same(inspect(source, text=place / "text.txt", config=SMALL), folder)


def test_pictures_as_batches(place, tmp_path):
    config = InspectConfig(tokens=60)
    folder = inspect_folder(str(place / "vit"), tmp_path / "run", inputs=place / "pictures.npz", config=config)
    pictures = torch.from_numpy(np.load(place / "pictures.npz")["pixel_values"])
    batches = [{"pixel_values": some} for some in pictures.split(3)]
    assert same(inspect(open_model(str(place / "vit")), inputs=batches, config=config), folder)
    assert same(inspect(open_model(str(place / "vit")), text=batches, config=config), folder)


def test_a_profile_owns_its_tensors_and_is_saved_with_them(place, tmp_path):
    source = str(place / "llama")
    profile = inspect(open_model(source), open_tokenizer(source), text=TEXT, config=SMALL, checks=False)
    profile.save(tmp_path / "one")
    again = Profile.load(tmp_path / "one")
    assert again == profile and same(again, profile)
    other = inspect(open_model(source), open_tokenizer(source), text=TEXT[:999], config=SMALL, checks=False)
    other.save(tmp_path / "two")
    (tmp_path / "two" / "profile.json").write_bytes((tmp_path / "one" / "profile.json").read_bytes())
    with pytest.raises(InputError, match="is not of the measurement"):
        Profile.load(tmp_path / "two")


def test_what_is_missing_is_named(place):
    model = open_model(str(place / "llama"))
    with pytest.raises(InputError, match="give its `tokenizer`"):
        inspect(model, text=TEXT)
    with pytest.raises(InputError, match="Give text or inputs, not both"):
        inspect(model, text=TEXT, inputs=[{"input_ids": torch.ones(1, 8, dtype=torch.long)}])
    with pytest.raises(InputError, match="A model is a PreTrainedModel"):
        inspect(3)


def test_half_precision_and_a_wrong_device(place, tmp_path):
    source, texts = str(place / "llama"), [str(place / "text.txt")]
    config = InspectConfig(tokens=96, lengths=(16,), maps=False)
    whole = inspect_folder(source, tmp_path / "whole", texts=texts, config=config)
    options = {"texts": texts, "config": config, "opening": OpenConfig(device="cpu", dtype="bf16")}
    half = inspect_folder(source, tmp_path / "half", **options)
    assert half.settings == {**whole.settings, "dtype": "bf16"} and half.fingerprint == whole.fingerprint
    assert not torch.equal(half.tensors["0.k_mean"], whole.tensors["0.k_mean"])
    torch.testing.assert_close(half.tensors["0.k_mean"], whole.tensors["0.k_mean"], rtol=0.1, atol=0.05)
    assert same(inspect_folder(source, tmp_path / "half", **options), half)
    result = headwise("inspect", place / "llama", "--text", place / "text.txt", "--device", "gpu", "-o", tmp_path / "x")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "There is no device 'gpu' here; --device may be auto or cpu." in result.stderr
    assert not (tmp_path / "x").exists()
