"""Folders of strangers: whatever they hold, no command runs code of theirs, and none of it gets into an output.

Every piece of code in these folders writes a marker when it runs, and standard input says yes to everything.
"""

import builtins
import io
import json
import pickle
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTImageProcessor
from transformers.integrations import hub_kernels

from headwise import cli
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Text
from headwise.reduction.build import build_reduced
from headwise.runtime import reopen
from tests.tiny import VOCAB, tiny
from tests.tokens import save_tokenizer

OURS = {path.name: path.read_bytes() for path in reopen.OWN_FILES}
AUTO = {
    "AutoConfig": "configuration_x.LlamaConfig",
    "AutoModel": "modeling_x.LlamaModel",
    "AutoModelForCausalLM": "tokenizer_x.LlamaForCausalLM",
    "AutoTokenizer": ["tokenizer_x.Words", "tokenizer_x.Words"],
    "AutoImageProcessor": "processing_x.Images",
    "AutoProcessor": "processing_x.Processor",
}
CODE = """
import transformers
from pathlib import Path
Path({marker!r}).write_text(__file__)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, ViTImageProcessor as Images
from transformers import PreTrainedTokenizerFast as Words, ProcessorMixin as Processor
def generate(*args, **kwargs): ...
"""


class Pickled:
    """Runs when a pickle is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return builtins.exec, (f"open({self.marker!r}, 'a').write('pickle')",)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What the commands need beside a model: an honest model, texts and plans."""
    folder = tmp_path_factory.mktemp("given")
    model = tiny("llama")
    model.save_pretrained(folder / "honest")
    save_tokenizer(folder / "honest")
    letters = random.Random(0).choices(string.ascii_lowercase, k=9000)
    (folder / "text.txt").write_text("".join(letters))
    shape = shape_of(model)
    cut = Plan.make(shape, (LayerPlan(4, 2, 4, 5), *map(LayerPlan.full, shape.layers[1:])))
    cut.save(folder / "cut.json")
    Plan.make(shape, tuple(map(LayerPlan.full, shape.layers))).save(folder / "whole.json")
    build_reduced(model, cut).save_pretrained(folder / "student")
    save_tokenizer(folder / "student")
    shutil.copy(folder / "cut.json", folder / "student" / "plan.json")
    for name, width in {"wide": 48, "narrow": 32}.items():
        blueprint = Blueprint(width, Text(VOCAB, 16, tied=True))
        shape = blueprint.shape("llama", 16, ((2, 2, 8, 8),))
        Plan.make(shape, (LayerPlan(2, 2, 8, 8),), blueprint=blueprint).save(folder / f"{name}.json")
    return folder


@pytest.fixture
def place(given, tmp_path, monkeypatch, reopened_here):
    """A hostile folder: an honest stock model with a plan.json, and all the code there can be beside it."""
    folder = tmp_path / "model"
    shutil.copytree(given / "honest", folder)
    shutil.copy(given / "whole.json", folder / "plan.json")
    (tmp_path / "secret").write_text("{}")
    write_code(tmp_path)
    monkeypatch.setattr("headwise.pipelines.compare.tasks.paces", lambda trainings, device: [1000.0] * len(trainings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_class_stays_marked(monkeypatch):
    """transformers notes on a class of its own that code of a folder has named it; other tests save tokenizers."""
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast._auto_class", None)


def write_code(place):
    folder, code = place / "model", CODE.format(marker=str(place / "marker"))
    names = {
        reference.split(".")[0] for value in AUTO.values() for reference in ([value, value[0]][type(value) is list],)
    }
    for name in (*names, "__init__", "modeling_llama", "tokenizer_json", "vocab", "hubconf"):
        (folder / f"{name}.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    for name in ("tokenizer.pkl", "vocab.bin", "pytorch_model.bin", "merges.pt"):
        (folder / name).write_bytes(pickle.dumps(Pickled(str(place / "marker"))))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").symlink_to(place / "secret")
    (folder / "additional_chat_templates").symlink_to(place)
    (place / "evil.jinja").write_text("x")


def change(path, **fields):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


def headwise(place, *args):
    """Run a command in this process with a standard input that says yes; its exit code and output."""
    output, before = io.StringIO(), (sys.argv, sys.stdin, sys.stdout, sys.stderr)
    sys.argv = ["headwise", *map(str, args)]
    sys.stdin, sys.stdout, sys.stderr = io.StringIO("y\n" * 9), output, output
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
    assert not (place / "marker").exists(), (args, (place / "marker").read_text())
    assert "[y/N]" not in output.getvalue() and "Traceback" not in output.getvalue(), output.getvalue()
    return code, output.getvalue()


def commands(place, given, model="model"):
    """Every command that takes a model, by its name."""
    text, shapes, small = given / "text.txt", (given / "wide.json", given / "narrow.json"), ("--tokens", 256)
    one_step = ("--tokens", 64, "--context", 16, "--evaluations", 1, "--precision", "fp32")
    data = ("--data", text, "--tokens", 64, "--batch", 2, "--precision", "fp32", "--evaluations", 1)
    return {
        "cost": ("cost", model),
        "inspect": ("inspect", model, "--text", text, *small, "--lengths", "16,32", "-o", "inspected"),
        "plan": ("plan", model, "--keep-kv", 0.75, "--text", text),
        "compress": ("compress", model, "--plan", given / "cut.json", "-o", "compressed"),
        "evaluate": ("evaluate", model, "--text", text, *small, "--context", 16, "--no-speed"),
        "heal": ("heal", model, "--teacher", given / "honest", "--text", text, *one_step, "-o", "healed"),
        "teach": ("heal", given / "student", "--teacher", model, "--text", text, *one_step, "-o", "taught"),
        "run": (
            "run",
            model,
            "--text",
            text,
            *small,
            "--eval-text",
            text,
            "--eval-tokens",
            1024,
            "--no-speed",
            "-o",
            "all",
        ),
        "train": ("train", "--plan", given / "wide.json", "--tokenizer", model, *data, "-o", "trained"),
        "compare": ("compare", *shapes, "--tokenizer", model, *data, "--seeds", 1, "-o", "compared"),
    }


def check_outputs(place):
    """Nothing foreign is in any output: no code but ours, no links, no pickles, no field that names code."""
    outputs = [path for path in place.iterdir() if path.name not in ("model", "secret", "evil.jinja", "modules")]
    files = [file for output in outputs for file in (output.rglob("*") if output.is_dir() else (output,))]
    assert files
    for file in files:
        assert not file.is_symlink() and file.suffix not in (".pkl", ".pt", ".jinja", ".lock"), file
        assert file.suffix != ".bin" or file.name.startswith("tokens-"), file
        if file.suffix == ".py":
            assert file.read_bytes() == OURS.get(file.name), file
            assert json.loads((file.parent / "config.json").read_text())["model_type"] == "headwise"
        if file.suffix == ".json":
            assert "_x." not in file.read_text(), file


def name_code(place):
    change(place / "model" / "config.json", auto_map=AUTO, custom_pipelines=AUTO, more={"auto_map": AUTO})


def put_student(place, given):
    """A per-layer model in place of the stock one, with a modelling file that is not ours."""
    shutil.rmtree(place / "model")
    shutil.copytree(given / "student", place / "model")
    write_code(place)
    (place / "model" / "modeling_headwise.py").write_text(CODE.format(marker=str(place / "marker")))


def test_code_beside_a_model_is_neither_run_nor_copied(place, given):
    name_code(place)
    for name, command in commands(place, given).items():
        code, output = headwise(place, *command)
        assert code == 0, (name, output)
    check_outputs(place)
    assert json.loads((place / "healed" / "config.json").read_text())["model_type"] == "llama"
    assert "trust_remote_code" not in (place / "healed" / "README.md").read_text()
    assert "special_tokens_map.json is a link and was not copied" in (place / "compressed" / "README.md").read_text()


def test_a_strangers_modelling_file_gives_way_to_ours(place, given):
    put_student(place, given)
    own = json.loads((place / "model" / "config.json").read_text())["auto_map"]
    change(place / "model" / "config.json", auto_map={**AUTO, **own})
    some = commands(place, given)
    for name in ("cost", "evaluate", "heal"):
        code, output = headwise(place, *some[name])
        assert code == 0, (name, output)
    assert (place / "healed" / "modeling_headwise.py").read_bytes() == OURS["modeling_headwise.py"]
    assert json.loads((place / "healed" / "config.json").read_text())["auto_map"] == own
    check_outputs(place)


def test_a_tokenizer_with_code_is_refused_in_one_sentence(place, given):
    name_code(place)
    for fields in ({"auto_map": AUTO}, {"auto_map": AUTO["AutoTokenizer"], "tokenizer_class": "Words"}):
        change(place / "model" / "tokenizer_config.json", **fields)
        for name, command in commands(place, given).items():
            if name in ("cost", "compress"):
                continue
            code, output = headwise(place, *command)
            assert code == 2, (name, output)
            assert "tokenizer_x.py (Words)" in output and "--trust-remote-code" in output, (name, output)
            assert output.count("\n") == 1, output
    some = commands(place, given)
    code, output = headwise(place, *some["compress"])
    assert code == 0 and "tokenizer_config.json names code, which was not copied along." in output, output
    check_outputs(place)
    put_student(place, given)  # transformers knows no tokenizer of its own for those, and would ask
    change(place / "model" / "tokenizer_config.json", **fields)
    code, output = headwise(place, *some["evaluate"])
    assert code == 2 and "--trust-remote-code" in output, output


def test_trusted_code_runs(place, given):
    change(place / "model" / "tokenizer_config.json", auto_map=AUTO)
    with pytest.raises(AssertionError, match=r"tokenizer_x\.py"):
        headwise(place, *commands(place, given)["evaluate"], "--trust-remote-code")


def test_an_image_processor_with_code_is_refused_in_one_sentence(place, given):
    tiny("vit").save_pretrained(place / "pictures")
    ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(place / "pictures")
    write = place / "pictures" / "preprocessor_config.json"
    change(write, auto_map=AUTO)
    (place / "pictures" / "processing_x.py").write_text(CODE.format(marker=str(place / "marker")))
    (place / "seen").mkdir()
    Image.new("RGB", (12, 12)).save(place / "seen" / "a.png")
    for command in (
        ("inspect", "pictures", "--inputs", "seen", "-o", "out"),
        ("evaluate", "pictures", "--inputs", "seen"),
    ):
        code, output = headwise(place, *command)
        assert code == 2 and "processing_x.py (Images)" in output and "--trust-remote-code" in output, output
    content = json.loads(write.read_text())
    del content["auto_map"], content["image_processor_type"]
    write.write_text(json.dumps(content))
    change(place / "pictures" / "config.json", auto_map=AUTO)
    code, output = headwise(place, "evaluate", "pictures", "--inputs", "seen", "--no-speed", "--tokens", 64)
    assert code in (0, 2), output


def pickle_in_the_index(place):
    state = load_file(place / "model" / "model.safetensors")
    (place / "model" / "model.safetensors").unlink()
    torch.save(state, place / "model" / "w.bin")
    index(place, dict.fromkeys(state, "w.bin"))


def file_outside(place, name="../outside.safetensors"):
    state = load_file(place / "model" / "model.safetensors")
    (place / "model" / "model.safetensors").rename(place / "outside.safetensors")
    index(place, dict.fromkeys(state, name))


def link_outside(place):
    file_outside(place, "w.safetensors")
    (place / "model" / "w.safetensors").symlink_to(place / "outside.safetensors")


def lone_link_outside(place):
    (place / "model" / "model.safetensors").rename(place / "outside.safetensors")
    (place / "model" / "model.safetensors").symlink_to(place / "outside.safetensors")


def index(place, weights):
    content = {"metadata": {"total_size": 1}, "weight_map": weights}
    (place / "model" / "model.safetensors.index.json").write_text(json.dumps(content))


def config(**fields):
    return lambda place: change(place / "model" / "config.json", **fields)


def adapter(place):
    change(place / "model" / "adapter_config.json", base_model_name_or_path="/", peft_type="LORA")
    (place / "model" / "adapter_model.bin").write_bytes(pickle.dumps(Pickled(str(place / "marker"))))


def parts_of_processes(place):
    state = load_file(place / "model" / "model.safetensors")
    save_file(state, place / "model" / "shard-00001-model-00001-of-00001.safetensors")


KERNEL = "evil/kernel"
REFUSED = {
    "pickle in the index": (pickle_in_the_index, "names 'w.bin'"),
    "file outside": (file_outside, "names '../outside.safetensors'"),
    "absolute file": (
        lambda place: file_outside(place, str(place / "outside.safetensors")),
        "only safetensors files of",
    ),
    "link outside": (link_outside, "leads out of its folder"),
    "single link outside": (lone_link_outside, "leads out of its folder"),
    "kernel": (config(attn_implementation=KERNEL), f"attention by '{KERNEL}'"),
    "hidden kernel": (config(_attn_implementation=KERNEL), f"attention by '{KERNEL}'"),
    "paged kernel": (config(attn_implementation=f"paged|{KERNEL}"), KERNEL),
    "kernels by part": (config(attn_implementation={"": KERNEL, "text_config": KERNEL}), KERNEL),
    "kernel by another name": (config(attribute_map={"a": "_attn_implementation"}, a=KERNEL), KERNEL),
    "kernel of a layer": (config(per_layer_config={"0": {"_attn_implementation": KERNEL}}), KERNEL),
    "adapter": (adapter, "holds an adapter"),
    "parts of processes": (parts_of_processes, "as single processes saved them"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "are quantised"),
    "other file": (config(transformers_weights="../outside.safetensors"), "names its weights"),
    "class of another family": (config(architectures=["DetrModel"]), "asks for a DetrModel"),
    "class that does not exist": (config(architectures=["Evil"]), "has no class Evil"),
    "unknown type with code": (config(model_type="evil", auto_map=AUTO), "does not know the architecture 'evil'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_leads_elsewhere_is_refused_in_one_sentence(name, place, given, monkeypatch):
    damage, sentence = REFUSED[name]
    damage(place)
    marker = place / "marker"
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **kwargs: marker.write_text("kernel"))
    some = commands(place, given)
    for each in ("inspect", "plan", "compress", "evaluate", "heal", "teach", "run"):
        code, output = headwise(place, *some[each])
        assert code == 2 and sentence in output and output.count("\n") == 1, (each, output)
    code, output = headwise(place, *some["cost"])  # reads no weights
    assert code == 0 or (code == 2 and sentence in output), output
    assert not [path.name for path in place.iterdir() if path.name.endswith("ed")]


@pytest.mark.parametrize("name", ["auto_map", "tokenizer"])
def test_real_processes_with_yes_on_standard_input(name, place, given):
    """The two ways in which code ran unasked: healing a stock model with an auto_map, a tokenizer that asks [y/N]."""
    if name == "auto_map":
        name_code(place)
    else:
        put_student(place, given)
        change(place / "model" / "tokenizer_config.json", auto_map=AUTO, tokenizer_class="Words")
    done = subprocess.run(
        [sys.executable, "-m", "headwise", *map(str, commands(place, given)["heal"])],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == (0 if name == "auto_map" else 2), done.stderr
    assert not (place / "marker").exists()
    assert "Traceback" not in done.stderr and "[y/N]" not in done.stdout


def hub_cache(place, name):
    """The model folder as the Hub's cache keeps it: links to blobs."""
    repository = place / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, path in enumerate(sorted((place / "model").glob("*.*"))):
        shutil.copyfile(path, repository / "blobs" / f"{number:040d}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040d}")
    return snapshot


@pytest.mark.parametrize("name", ["pickle in the index", "honest"])
def test_models_of_the_hub_are_held_to_the_same(name, place, given, monkeypatch):
    if name != "honest":
        REFUSED[name][0](place)
    snapshot = hub_cache(place, "org/some")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source, folder in (("org/some", "a"), (snapshot, "b")):
        code, output = headwise(place, "compress", source, "--plan", given / "cut.json", "-o", place / folder)
        if name == "honest":
            assert code == 0, output
            copied = place / folder / "tokenizer.json"
            assert not copied.is_symlink() and copied.read_bytes() == (place / "model" / "tokenizer.json").read_bytes()
        else:
            assert code == 2 and REFUSED[name][1] in output, output


def test_a_model_of_the_hub_that_needs_code_of_its_own_is_refused(place, monkeypatch):
    REFUSED["unknown type with code"][0](place)
    hub_cache(place, "org/some")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, output = headwise(place, "cost", "org/some")
    assert code == 2 and "it needs code of its own, which headwise does not run" in output, output
