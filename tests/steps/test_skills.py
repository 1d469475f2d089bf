"""evaluate on generated exercises and tasks: a model that copies by construction beside a random one."""

import json
from dataclasses import replace
from importlib import util

import pytest
from transformers import AutoTokenizer

import headwise as hw
from headwise.data.texts import own_texts
from headwise.runtime.cache import write_spec
from tests.calls import evaluate
from tests.data.test_skills import TEMPLATE
from tests.runtime.specs import random_spec
from tests.skilled import copier
from tests.steps.test_evaluate import headwise, save
from tests.tiny import tiny
from tests.tokens import EVERY_BYTE, save_tokenizer

SIZES = {"max_position_embeddings": 1024, "vocab_size": EVERY_BYTE, "attention_bias": False}
CONFIG = hw.EvaluateConfig(tokens=512, context=128, speed=False, skills=True, skills_at=(512, 768))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save_tokenizer(folder, EVERY_BYTE)
    return AutoTokenizer.from_pretrained(folder)


def skills(scores):
    return {skill.name: skill for skill in scores.skills}


@pytest.fixture(scope="module")
def both(tokenizer):
    models = {"random": tiny("llama", **SIZES), "copier": copier(**SIZES), "again": tiny("llama", **SIZES)}
    return hw.evaluate(models, tokenizer, config=CONFIG)


def test_who_copies_finds_needles_and_who_does_not_guesses(both):
    plain, able, again = map(skills, both.models)
    for name in ("needle", "needle, 512 tokens", "needle, 768 tokens", "needle, 50% deep", "copying, 32 tokens"):
        assert able[name].right == 1 and plain[name].right < 0.35
        assert able[name].nats < 0.1 < plain[name].nats
        assert able[name].right_difference.low > 0.5 and able[name].nats_difference.high < 0
        assert plain[name].right_difference is None
        assert again[name].right_difference.mean == 0 == again[name].nats_difference.mean
        assert again[name].right_difference.low < 0 < again[name].right_difference.high
    assert able["sums"].right < 0.5 and able["sums"].chance == pytest.approx(1 / 7)
    assert (plain["needle"].trials, plain["needle"].decisions) == (16, 80)
    assert (plain["needle, 10% deep"].trials, plain["needle, 512 tokens, 10% deep"].decisions) == (16, 8)
    assert both.settings["seed"] == 0 and not any(name.startswith("chat") for name in plain)


def test_a_model_of_other_tokens_is_not_compared(tokenizer, tmp_path):
    save_tokenizer(tmp_path, EVERY_BYTE)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["t"], vocab["h"] = vocab["h"], vocab["t"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    model, other = tiny("llama", **SIZES), AutoTokenizer.from_pretrained(tmp_path)
    scores = hw.evaluate({"one": (model, tokenizer), "two": (model, other)}, config=CONFIG)
    assert all(skill.right_difference is None for skill in scores.models[1].skills)
    assert "two is asked in tokens of its own: its skills are not compared." in scores.notes


def test_chat_is_written_and_skills_go_through_the_packed_cache(tmp_path):
    for name in ("dense", "packed"):
        model = tiny("llama", **SIZES)
        save(model, tmp_path / name)
        save_tokenizer(tmp_path / name, EVERY_BYTE)
        (tmp_path / name / "chat_template.jinja").write_text(TEMPLATE)
    write_spec(tmp_path / "packed" / "cache.safetensors", coded_for(tmp_path / "packed"))
    names = [str(tmp_path / name) for name in ("dense", "packed")]
    scores = evaluate(names, tokens=512, context=128, speed=False, skills=True, skills_at=(512,))
    dense, packed = map(skills, scores.models)
    for name in ("chat, ends its turn", "chat, keeps the form"):
        assert dense[name].decisions == 24 and dense[name].nats is None and packed[name].right_difference is not None
    assert abs(packed["needle"].nats_difference.mean) > 1e-4
    assert dense["copying"].nats != packed["copying"].nats
    assert scores.models[0].parts and "Skills, share right (seed 0;" in str(scores)


def coded_for(folder):
    from headwise.checkpoints.fingerprint import fingerprint

    return replace(random_spec(), fingerprint=fingerprint(hw.open(str(folder), device="cpu")))


def test_models_that_write_no_text_are_told_so(tmp_path):
    save(tiny("bert"), tmp_path / "bert")
    for asked in ({"skills": True}, {"tasks": "piqa"}):
        with pytest.raises(hw.InputError, match=r"are for models that write text \(...ForCausalLM\); .* is a Bert"):
            evaluate([str(tmp_path / "bert")], **asked)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    save(tiny("llama", **SIZES), tmp_path / "model")
    save_tokenizer(tmp_path / "model", EVERY_BYTE)
    options = ("--tokens", 512, "--context", 128, "--no-speed", "--skills", "--skills-at", 512, "--seed", 3)
    out = tmp_path / "scores.json"
    code, table, _ = headwise(monkeypatch, capsys, tmp_path / "model", tmp_path / "model", *options, "-o", out)
    assert code == 0 and "Skills, share right (seed 3;" in table and "needle, 90% deep" in table
    assert hw.Scores.load(out).models[1].skills[0].right_difference.mean == 0


def test_lengths_of_haystacks_are_checked(tokenizer):
    model = tiny("llama", **SIZES)
    for length, sentence in ((2048, "was made for 1,024 tokens"), (64, "the shortest is 128")):
        config = hw.EvaluateConfig(tokens=512, context=128, speed=False, skills=True, skills_at=(length,))
        with pytest.raises(hw.InputError, match=sentence):
            hw.evaluate({"model": model}, tokenizer, text=own_texts()[0], config=config)


def test_tasks_without_the_harness_say_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setattr("headwise.steps.evaluate.tasks.find_spec", lambda name: None)
    with pytest.raises(hw.InputError, match=r'pip install "headwise\[eval\]"'):
        hw.evaluate({"m": tiny("llama", **SIZES)}, tokenizer, config=hw.EvaluateConfig(tasks="piqa"))
    assert util.find_spec("lm_eval") is not None


@pytest.mark.slow
def test_tasks_are_those_of_the_harness_and_see_the_packed_cache(tokenizer, tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("abc abc " * 20, "hello")))
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/text.jsonl\ntest_split: test\n"
    (tmp_path / "rolling.yaml").write_text(
        f'task: rolling\n{head}output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{{{text}}}}"\n'
        "metric_list:\n  - metric: byte_perplexity\n"
    )
    (tmp_path / "writing.yaml").write_text(
        f'task: writing\n{head}output_type: generate_until\ndoc_to_text: "{{{{text}}}}"\ndoc_to_target: "b"\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match\n'
    )
    for name in ("dense", "packed"):
        save(tiny("llama", **SIZES), tmp_path / name)
        save_tokenizer(tmp_path / name, EVERY_BYTE)
    write_spec(tmp_path / "packed" / "cache.safetensors", coded_for(tmp_path / "packed"))
    names = [str(tmp_path / name) for name in ("dense", "packed")]
    tasks = f"{tmp_path}/rolling.yaml,{tmp_path}/writing.yaml"
    dense, packed = evaluate(names, tokens=512, context=128, speed=False, tasks=tasks, task_limit=2).models
    assert [(task.task, task.metric) for task in dense.tasks] == [
        ("rolling", "byte_perplexity"),
        ("writing", "exact_match"),
    ]
    assert dense.tasks[0].value > 1 and dense.tasks[0].value != packed.tasks[0].value
    with pytest.raises(hw.InputError, match="knows no task 'no_such_task'"):
        evaluate(names, tasks="no_such_task")
