"""The command line as a user meets it: real processes, real files, and one clear sentence for every wrong input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from tests.commands import headwise as run
from tests.tiny import tiny


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "dense"
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plan(dense, tmp_path_factory):
    shape = shape_of(tiny("llama"))
    layers = [LayerPlan.full(layer) for layer in shape.layers]
    layers[1] = LayerPlan(4, 2, 4, 5)
    layers[2] = LayerPlan(0, 0, 0, 0)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    Plan.make(shape, tuple(layers)).save(path)
    return path


WITHOUT_TORCH = (
    "import sys; from headwise.cli import app; app(sys.argv[1:], standalone_mode=False); "
    "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
)


def test_help_needs_no_torch():
    for code, args in (
        ("import sys, headwise.cli; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)", ()),
        (WITHOUT_TORCH, ("--help",)),
    ):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "compress" in done.stdout


@pytest.mark.parametrize("command", [(sys.executable, "-m", "headwise"), (Path(sys.executable).parent / "headwise",)])
def test_both_ways_to_call_it_and_their_exit_codes(command):
    for args, code, said in (
        (("--help",), 0, "compress"),
        (("--version",), 0, "0.1.0"),
        (("design", "--params", "many"), 2, "headwise: Expected a number such as 200000"),
    ):
        done = subprocess.run([*command, *args], capture_output=True, text=True, check=False)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


def test_design_needs_no_torch_and_writes_the_plan_it_names(tmp_path):
    asked = ["design", "--params", "2M", "--context", "256", "--vocab", "2048"]
    args = [*asked, "-o", str(tmp_path / "plan.json")]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(run(*asked, "--json").stdout)
    plans = {each["name"]: each["plan"] for each in found["candidates"]}
    assert json.loads((tmp_path / "plan.json").read_text()) == plans[found["recommended"]]
    assert f"plan.json: {found['recommended']}" in done.stdout
    assert (tmp_path / "design.html").is_file()
    run(*asked, "--choose", "textbook", "-o", tmp_path / "other.json")
    assert json.loads((tmp_path / "other.json").read_text()) == plans["textbook"]


WRONG_DESIGNS = {
    ("--params", "300k"): "the smallest, 6 layers of width 32, has 305,568",
    ("--params", "30M", "--kv-bytes-per-token", "60"): "the least is one key/value head in each layer, --kv-bytes",
    ("--params", "many"): "Expected a number such as 200000",
    ("--params", "inf"): "Expected a number such as 200000",
    ("--params", "2M", "--lags", "a"): "Expected numbers with commas",
    ("--params", "2M", "--lags", "nan"): "Strengths of lags are numbers from 0 on",
    ("--params", "2M", "--vocab", "0"): "cannot be built with vocab 0",
    ("--params", "2M", "--context", "3"): "3 tokens are too few",
    ("--params", "2M", "--labels", "3"): "A llama model reads text: leave out --labels",
    ("--params", "2M", "--family", "vit", "--context", "99"): "A vit model reads images: leave out --context",
    ("--params", "2M", "--family", "vit", "--kv-bytes-per-token", "9"): "A vit has no KV cache",
    ("--params", "2M", "--family", "vit", "--patch-size", "15"): "cannot be cut into patches of 15",
    ("--params", "2M", "--choose", "best"): "There is no candidate 'best' here; choose one of textbook",
}


@pytest.mark.parametrize("options", WRONG_DESIGNS, ids=" ".join)
def test_designs_that_cannot_be_get_one_sentence_and_no_output(options, tmp_path):
    result = run("design", *options, "-o", tmp_path / "plan.json")
    assert result.returncode == 2, result.stderr
    assert WRONG_DESIGNS[options] in result.stderr
    assert result.stderr.startswith("headwise: ") and result.stderr.count("\n") == 1, result.stderr
    assert not list(tmp_path.iterdir())


def test_cost_prints_the_exact_table(dense):
    result = run("cost", dense, "--context", 1024, "--batch", 2, "--cache-dtype", "fp32")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "layers  heads  kv heads  qk dim  v dim  mlp  parameters  KV / token  KV cache",
        "0-2         4         2       8      8   48     3.168 k       128 B   256 KiB",
        "",
        "attention parameters              9.504 k",
        "all parameters                    29.76 k",
        "KV cache per token                  384 B",
        "KV cache, 1,024 tokens x 2, fp32  768 KiB",
        "FLOPs per input token, mean       249.1 k",
        "FLOPs per new token after 1,024   445.9 k",
    ]


def test_cost_with_a_plan_shows_before_and_after(dense, plan):
    result = run("cost", dense, "--plan", plan)
    assert result.returncode == 0, result.stderr
    assert "8 > 4" in result.stdout
    assert "4 > -" in result.stdout
    found = json.loads(run("cost", dense, "--plan", plan, "--json").stdout)
    assert found["cost_after"]["kv_bytes"] < found["cost"]["kv_bytes"]
    assert found["after"]["layers"][2]["heads"] == 0


def test_cost_of_a_70b_config_reads_no_weights(tmp_path):
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, architectures=["LlamaForCausalLM"], max_position_embeddings=131072,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    result = run("cost", tmp_path / "config.json", "--context", 32768, "--batch", 8, "--json")
    found = json.loads(result.stdout)["cost"]
    assert found["total_parameters"] == 70_553_706_496
    assert found["kv_bytes"] == 80 * 2 * 8 * 128 * 32768 * 8 * 2


def test_compress_writes_a_model_that_opens_and_costs_what_was_planned(dense, plan, tmp_path):
    out = tmp_path / "out"
    result = run("compress", dense, "--plan", plan, "-o", out, fresh=True)
    assert result.returncode == 0, result.stderr
    assert "reopened in a fresh process" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
    before = json.loads(run("cost", dense, "--plan", plan, "--json").stdout)
    after = json.loads(run("cost", out, "--json").stdout)
    assert after["before"] == before["after"]
    assert after["cost"] == before["cost_after"]
    assert "headwise compress" in (out / "README.md").read_text()


def change(path: Path, **fields) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**content, **fields}.items() if v is not None}))


def edit_layer(plan: Path, **fields) -> None:
    content = json.loads(plan.read_text())
    content["layers"][1]["changes"][0].update(fields)
    plan.write_text(json.dumps(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def to_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def header(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)


def not_a_number(model: Path) -> None:
    state = tiny("llama").state_dict()
    state["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def lose_weight(model: Path) -> None:
    state = tiny("llama").state_dict()
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


WRONG = {
    "no such folder": (lambda m, p: m.rename(m.with_name("gone")), "There is no file or folder"),
    "empty folder": (lambda m, p: [f.unlink() for f in m.iterdir()], "has no config.json"),
    "no such plan": (lambda m, p: p.unlink(), "There is no file"),
    "config is not JSON": (lambda m, p: (m / "config.json").write_text("{"), "is damaged or not JSON"),
    "config of nothing": (lambda m, p: change(m / "config.json", model_type=None), "names no model_type"),
    "config without architecture": (
        lambda m, p: change(m / "config.json", architectures=None),
        "names no architecture; add for example",
    ),
    "class unknown": (lambda m, p: change(m / "config.json", architectures=["Llama9"]), "has no class Llama9"),
    "family unknown": (
        lambda m, p: change(m / "config.json", model_type="bloom"),
        "headwise does not know the architecture 'bloom'; it knows bert, deepseek_v2",
    ),
    "heads do not divide": (lambda m, p: change(m / "config.json", num_key_value_heads=3), "can"),
    "negative size": (lambda m, p: change(m / "config.json", hidden_size=-32), "can"),
    "cut weights": (lambda m, p: cut(m / "model.safetensors"), "is damaged or cut short: it should have"),
    "no header": (lambda m, p: (m / "model.safetensors").write_bytes(b"\xff" * 20), "is damaged or cut short"),
    "pickle": (lambda m, p: to_pickle(m), "holds its weights as a pickle (pytorch_model.bin)"),
    "no weights": (lambda m, p: (m / "model.safetensors").unlink(), "holds no weights"),
    "a weight is missing": (lambda m, p: lose_weight(m), "lacks 1 weights its config asks for"),
    "header is no table": (lambda m, p: header(m, b"[]"), "its header makes no sense"),
    "header without offsets": (lambda m, p: header(m, b'{"x": {}}'), "its header makes no sense"),
    "header of other things": (
        lambda m, p: header(m, b'{"x": {"dtype": "Q9", "shape": [0], "data_offsets": [0, 0]}}'),
        "cannot be loaded",
    ),
    "index of nothing": (
        lambda m, p: (
            (m / "model.safetensors").rename(m / "other.safetensors"),
            (m / "model.safetensors.index.json").write_text("{}"),
        ),
        "names no weights",
    ),
    "class is a number": (lambda m, p: change(m / "config.json", architectures=[5]), "names no architecture"),
    "class is not ours": (lambda m, p: change(m / "config.json", architectures=["HeadwiseX"]), "has no class Headwise"),
    "not a number": (lambda m, p: not_a_number(m), "are not all finite numbers"),
    "plan too deep": (lambda m, p: p.write_text("[" * 100_000), "is damaged or not JSON"),
    "misspelt field": (lambda m, p: edit_layer(p, qk_dims=4), "unknown field 'qk_dims'"),
    "plan is not JSON": (lambda m, p: p.write_text("heads: 4"), "is damaged or not JSON"),
    "plan is a profile": (lambda m, p: change(p, headwise="profile"), "found a headwise profile"),
    "plan for another model": (lambda m, p: change(p, width=64), "The plan was made for another model"),
    "heads not divisible": (lambda m, p: edit_layer(p, heads=3), "cannot share 2 key/value heads evenly"),
    "odd rotary width": (lambda m, p: edit_layer(p, qk_dim=5), "an odd rotary width cuts a pair in half"),
    "negative number": (lambda m, p: edit_layer(p, v_dim=-1), "v_dim is -1, it cannot be negative"),
    "wider than the model": (lambda m, p: edit_layer(p, v_dim=99), "v_dim is 99, the model has only 8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_sentence_exit_code_2_and_no_output(case, dense, plan, tmp_path):
    spoil, sentence = WRONG[case]
    model, own_plan = tmp_path / "model", tmp_path / "plan.json"
    model.mkdir()
    for file in dense.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    own_plan.write_bytes(plan.read_bytes())
    spoil(model, own_plan)
    before = sorted(tmp_path.rglob("*"))
    result = run("compress", model, "--plan", own_plan, "-o", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.startswith("headwise: ") and result.stderr.count("\n") == 1, result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_hub_id_that_cannot_be_reached(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": ""}
    result = run("cost", "someone/some-model", env=environment)
    assert result.returncode == 2
    assert "someone/some-model" in result.stderr and "Traceback" not in result.stderr


def test_wrong_options():
    for args in (("cost",), ("cost", "x", "--context", "many"), ("nonsense",)):
        assert run(*args).returncode == 2


@pytest.mark.parametrize("option", [("--context", 0), ("--batch", -1), ("--cache-dtype", "int3")])
def test_impossible_options(dense, option):
    result = run("cost", dense, *option)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


def test_outputs_that_cannot_be_are_refused_before_any_work(dense, plan, tmp_path):
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "file" / "out", tmp_path / "file"):
        result = run("compress", dense, "--plan", plan, "-o", wrong)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    result = run("compress", dense / "config.json", "--plan", plan, "-o", tmp_path / "deep" / "out")
    assert (result.returncode, "without weights" in result.stderr) == (2, True), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_one_stands_in_and_home_are_understood(dense, plan, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "dense").symlink_to(dense)
    environment = {**os.environ, "HOME": str(tmp_path)}
    result = run("compress", "~/dense", "--plan", plan, "-o", ".", cwd=tmp_path / "here", env=environment)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here" / "config.json").is_file()


def test_output_that_exists_is_kept(dense, plan, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    result = run("compress", dense, "--plan", plan, "-o", tmp_path / "out")
    assert (result.returncode, (tmp_path / "out" / "precious").read_text()) == (2, "x")
    assert "exists already" in result.stderr
