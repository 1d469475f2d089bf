"""A wrong model, token or input gets one sentence before anything is run."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headwise.checkpoints.load import open_model
from headwise.checkpoints.save import save_student
from headwise.cli import app
from headwise.data.arrays import read_arrays, read_pictures
from headwise.data.fitness import check_finite, check_inputs, check_tokens
from headwise.data.processors import encode, open_tokenizer
from headwise.data.ready import input_calibration
from headwise.families.sites import sites_of
from headwise.records import InputError, LayerPlan, Plan
from headwise.records.shape import LayerShape
from headwise.reduction.build import build_reduced
from tests.tiny import tiny
from tests.tokens import save_tokenizer

PIXELS = np.random.default_rng(0).standard_normal((4, 3, 12, 12)).astype(np.float32)


def spoil_head(folder):
    """A folder of a decoder with one row of its vocabulary head that is not a number."""
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("command", ["inspect", "evaluate", "compress", "heal"])
def test_a_row_of_the_head_that_is_no_number_is_named(command, tmp_path):
    folder, other, plan = spoil_head(tmp_path / "model"), tmp_path / "other", tmp_path / "plan.json"
    tiny("llama").save_pretrained(other)
    save_tokenizer(other)
    Plan.full(_shape()).save(plan)
    (other / "plan.json").write_bytes(plan.read_bytes())
    arguments = {
        "inspect": [folder, "-o", tmp_path / "out"],
        "evaluate": [other, folder, "--no-speed", "--tokens", 64, "--context", 16],
        "compress": [folder, "--plan", plan, "-o", tmp_path / "out"],
        "heal": [other, "--teacher", folder, "-o", tmp_path / "out"],
    }[command]
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert isinstance(result.exception, InputError), result.exception
    assert "The weights lm_head.weight of" in str(result.exception)
    assert "are not all finite numbers" in str(result.exception)
    assert not (tmp_path / "out").exists()


def _shape():
    from headwise.families.shapes import shape_of

    return shape_of(tiny("llama"))


def test_weights_of_any_kind_are_looked_through():
    model = tiny("bert")
    check_finite(model, "here")
    model.to(torch.bfloat16)
    check_finite(model, "here")
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.bias[3] = torch.inf
    with pytest.raises(InputError, match=r"weights bert\.encoder\.layer\.1\.output\.dense\.bias of here"):
        check_finite(model, "here")


def test_a_tokenizer_with_more_tokens_than_the_model_is_told(tmp_path):
    tiny("llama", vocab_size=50).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox " * 50)
    for command in (["inspect", "-o", str(tmp_path / "out")], ["evaluate", "--no-speed"]):
        result = CliRunner().invoke(
            app, [command[0], str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *command[1:]]
        )
        assert "The tokenizer gives the token" in str(result.exception), result.exception
        assert "the model knows only 0 to 49" in str(result.exception)


def test_tokens_below_zero_are_told_too():
    with pytest.raises(InputError, match="gives the token -1"):
        check_tokens(tiny("llama"), torch.tensor([3, -1]), "It")
    check_tokens(tiny("llama"), torch.tensor([3, 96]), "It")


def test_a_tokenizer_without_a_length_and_one_that_cannot_read(tmp_path):
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": ""}))
    assert encode(open_tokenizer(str(tmp_path)), "word")

    def broken(text, **options):
        raise Exception("WordPiece error:\n missing [UNK]")

    with pytest.raises(InputError, match=r"cannot read this text: WordPiece error: missing \[UNK\]"):
        encode(broken, "word")


def test_configs_that_ask_for_the_world_are_refused(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for change, sentence in (
        ({"num_hidden_layers": 10**9}, "gives num_hidden_layers as 1,000,000,000; a model is opened with up to 2,000"),
        ({"hidden_size": 2**60}, "gives hidden_size as"),
        ({"text_config": {"num_layers": 10**9}}, "gives num_layers as"),
        ({"hidden_size": float("nan")}, "NaN is no finite number"),
    ):
        file.write_text(json.dumps({**config, **change}))
        with pytest.raises(InputError, match=sentence):
            open_model(str(tmp_path))


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


WRONG_ARRAYS = {
    "extra": (
        {"pixel_values": PIXELS, "extra": PIXELS},
        "holds 'extra', which ViTForImageClassification does not read",
    ),
    "an option": ({"pixel_values": PIXELS, "output_attentions": np.ones(4)}, "holds 'output_attentions', which ViT"),
    "labels": ({"pixel_values": PIXELS, "labels": np.zeros(4)}, "holds 'labels', which ViT"),
    "whole numbers": ({"pixel_values": PIXELS.astype(int)}, "expected an array of floating-point numbers"),
    "NaN": ({"pixel_values": np.where(PIXELS > 2, np.nan, PIXELS)}, "NaN or infinite in single precision"),
    "too large": ({"pixel_values": PIXELS.astype(np.float64) * 1e300}, "NaN or infinite in single precision"),
    "another size": ({"pixel_values": PIXELS[..., :7]}, "The model does not take these inputs"),
    "no rows": ({"pixel_values": PIXELS[:0]}, "holds no pixel_values"),
    "a single value": ({"pixel_values": np.array(3.0)}, "expected an array of numbers, found a single value"),
    "complex": ({"pixel_values": PIXELS.astype(np.complex64)}, "found an array of complex64"),
    "text": ({"pixel_values": np.array(["a", "b"])}, "found an array of <U1"),
    "objects": ({"pixel_values": np.array([{}, None], dtype=object)}, "is not a .npz file of plain arrays"),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_arrays_that_a_model_does_not_take_are_refused(case, tmp_path):
    arrays, sentence = WRONG_ARRAYS[case]
    path = save(tmp_path / "inputs.npz", **arrays)
    with pytest.raises(InputError, match=r"inputs\.npz|does not take") as error:
        input_calibration(tiny("vit"), "model", path, 64)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"input_ids": [[1, 2], [3, 99]]}, "input_ids gives the token 99"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 2]]}, "expected 1 for each token that counts"),
        ({"input_ids": [[1, 2], [1, 2]], "attention_mask": [[1, 1], [0, 0]]}, "one that counts in a row"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]}, "different numbers of rows"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 5]]}, "token_type_ids: expected numbers from 0 to 1"),
        ({"input_ids": [[1, 2]], "position_ids": [[0, 64]]}, "position_ids: expected numbers from 0 to 63"),
        ({"input_ids": [[1.0, 2.0]]}, "expected an array of whole numbers"),
    ],
)
def test_inputs_of_text_models_are_checked_row_by_row(inputs, sentence):
    with pytest.raises(InputError, match="given") as error:
        check_inputs(tiny("bert"), {name: torch.tensor(value) for name, value in inputs.items()}, "given")
    assert sentence in str(error.value)


def test_arrays_that_would_not_fit_into_memory_are_not_unpacked(tmp_path, monkeypatch):
    path = save(tmp_path / "inputs.npz", pixel_values=PIXELS)
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(InputError, match="GB of arrays, and this machine has 0 GB"):
        read_arrays(path)


def picture_of(path, width, height):
    """A PNG that claims any size."""
    from PIL import Image

    Image.new("RGB", (4, 4)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    path.write_bytes(content)


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (12_000, 12_000), (0, 0)])
def test_pictures_that_claim_a_size_they_have_not_are_refused(width, height, tmp_path):
    tiny("vit").save_pretrained(tmp_path / "model")
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "pictures").mkdir()
    picture_of(tmp_path / "pictures" / "a.png", width, height)
    with pytest.raises(InputError, match=r"a\.png"):
        read_pictures(str(tmp_path / "model"), tmp_path / "pictures", 8)


def test_a_layer_cannot_turn_more_coordinates_than_it_has():
    with pytest.raises(InputError, match="16 coordinates cannot be rotary in heads of width 8"):
        LayerShape(2, 2, 8, 8, rotary=16)


def test_weights_that_overflow_on_the_way_are_refused(tmp_path):
    model = tiny("llama")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.1.self_attn.q_proj.weight"].mul_(1e30)
    model.save_pretrained(tmp_path / "model")
    save_file(state, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox " * 50)
    given = ["--text", str(tmp_path / "text.txt"), "--tokens", "64", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "model"), *given])
    assert isinstance(result.exception, InputError), result.exception


def test_settings_that_cannot_be_saved_again_are_told_before_any_work(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"pad_token_id": -5}')
    Plan.full(_shape()).save(tmp_path / "plan.json")
    given = [str(tmp_path / "model"), "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["compress", *given])
    assert isinstance(result.exception, InputError), result.exception
    assert "mend its generation_config.json" in str(result.exception)


def test_a_model_that_gives_no_numbers_is_not_saved(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(1e38)
        model.lm_head.weight.mul_(1e3)
    Plan.full(_shape()).save(tmp_path / "plan.json")
    model.save_pretrained(tmp_path / "model")
    given = [str(tmp_path / "model"), "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["compress", *given])
    assert isinstance(result.exception, InputError), result.exception
    assert "gives NaN or infinity" in str(result.exception) and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("reopened_here")
@pytest.mark.parametrize("pair", [-1, 4, 10**6])
def test_pairs_that_a_reduced_model_does_not_have_are_refused(pair, tmp_path):
    shape = _shape()
    change = LayerPlan(4, 2, 4, 4, rope_pairs=((0, 3), (1, 2)))
    plan = Plan.make(shape, (change, *map(LayerPlan.full, shape.layers[1:])))
    save_student(build_reduced(tiny("llama"), plan), tmp_path / "model", plan=plan, source="")
    assert open_model(str(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("rope_pairs"))
    state[name][0, 1] = pair
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="names RoPE pairs that the model does not have"):
        open_model(str(tmp_path / "model"))


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_attention_whose_logits_are_beyond_single_precision_is_refused(size, tmp_path):
    """The model's own kernels give finite outputs all the same; what is measured of the maps would not be."""
    model = tiny("vit")
    with torch.no_grad():
        sites_of(model)[0].block.layernorm_before.bias.fill_(-size)
    model.save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "inputs.npz", pixel_values=PIXELS)
    given = ["--inputs", str(tmp_path / "inputs.npz"), "--tokens", "64", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "model"), *given])
    assert isinstance(result.exception, InputError), result.exception
    assert "its weights are damaged or overflow" in str(result.exception)


def test_inputs_so_large_that_what_is_held_out_overflows_are_refused(tmp_path):
    tiny("vit").save_pretrained(tmp_path / "model")
    pixels = np.tile(PIXELS, (3, 1, 1, 1))
    pixels[4] *= 1e30  # held out
    np.savez(tmp_path / "inputs.npz", pixel_values=pixels)
    given = ["--inputs", str(tmp_path / "inputs.npz"), "--tokens", "64", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "model"), *given])
    assert isinstance(result.exception, InputError), result.exception


WRONG_REDUCED = {
    "no block": (lambda c: c.pop("headwise"), "the field 'headwise' is missing"),
    "text": (lambda c: c.update(headwise="x"), "expected a JSON object"),
    "no layers": (lambda c: c["headwise"].pop("layers"), "the field 'layers' is missing"),
    "scale in a list": (lambda c: c["headwise"]["layers"][0].update(scale=[0.3]), "scale: expected a number"),
    "slot beyond": (
        lambda c: c["headwise"]["layers"][0].update(slot=10**6),
        "slot: expected a whole number from 0 to 2",
    ),
    "half a head": (lambda c: c["headwise"]["layers"][0].update(heads=0.5), "heads: expected a whole number"),
    "no width": (lambda c: c["headwise"]["layers"][0].update(qk_dim=0), "qk_dim: expected a whole number from 1 on"),
    "odd norm": (lambda c: c["headwise"]["layers"][0].update(norm="odd"), "norm: expected one of"),
}


@pytest.mark.usefixtures("reopened_here")
def test_configs_of_reduced_models_are_read_strictly(tmp_path):
    plan = Plan.full(_shape())
    save_student(build_reduced(tiny("llama"), plan, form="per-layer"), tmp_path / "model", plan=plan, source="")
    file = tmp_path / "model" / "config.json"
    whole = file.read_text()
    assert open_model(str(tmp_path / "model"))
    for change, sentence in WRONG_REDUCED.values():
        content = json.loads(whole)
        change(content)
        file.write_text(json.dumps(content))
        with pytest.raises(InputError, match=sentence):
            open_model(str(tmp_path / "model"))


@pytest.mark.parametrize("token", [-1e308, "x", [None, 0.5], {"a": 1}])
def test_settings_that_name_no_token_are_refused(token, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": token}))
    with pytest.raises(InputError, match=r"generation_config\.json"):
        open_model(str(tmp_path))


def test_a_tokenizer_that_cannot_say_what_is_unknown_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "unk_token": ""}))
    with pytest.raises(InputError, match="The tokenizer of"):
        open_tokenizer(str(tmp_path))
