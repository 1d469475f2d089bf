import json

import pytest

from headwise.records import InputError
from headwise.records.scores import ModelScores, PartScores, Rate, Scores, Speed
from headwise.records.skills import Difference, SkillScores, TaskScores

FIRST = ModelScores(
    "a/model",
    "LlamaForCausalLM",
    "bf16",
    100,
    40,
    loss=3.0,
    perplexity=20.0,
    cache_bytes_per_token=512.0,
    speed=(Speed(64, Rate(10.0, 1.0, 1.0, 1.0), Rate(5.0, 1.0, 1.0, 1.0)),),
)
SECOND = ModelScores(
    "b/model",
    "ViTModel",
    "fp32",
    90,
    30,
    loss_increase=0.05,
    loss_increase_error=0.01,
    kl=0.1,
    kl_error=0.02,
    kl_p99=1.5,
    same_top=0.9,
    agreement=0.9,
    agreement_p5=0.8,
    accuracy=0.5,
    speed=(Speed(64, Rate(10.0, 1.1, 0.9, 1.2)),),
    parts=(PartScores("tokens 1 to 64", 64, 3.0, 0.1, loss_increase=0.05, kl_error=0.01, last=64),),
    skills=(
        SkillScores("sums", "", "", 40, 40, 0.5, 1 / 7, 2.0, Difference(-0.1, -0.2, 0.1), Difference(0.3, 0.1, 0.5)),
        SkillScores("copying", "length", "32 tokens", 16, 496, 0.5),
    ),
    tasks=(TaskScores("piqa", "acc", 0.6, 0.01), TaskScores("piqa", "acc_norm", 0.6)),
)
SETTINGS = {"precision": "fp32", "device": "cpu", "threads": 1, "rounds": 5}
SCORES = Scores((FIRST, SECOND), {"name": "text", "tokens": 64}, SETTINGS, {"headwise": "0"}, ("A note.",))


def test_a_file_gives_back_what_was_saved(tmp_path):
    SCORES.save(tmp_path / "scores.json")
    assert Scores.load(tmp_path / "scores.json") == SCORES
    assert json.loads(SCORES.json()) == json.loads((tmp_path / "scores.json").read_text())


def test_files_of_version_1_still_open(tmp_path):
    content = json.loads(Scores((FIRST,)).json())
    new = ("loss_error", "loss_increase", "loss_increase_error", "kl_error", "kl_p99", "same_top", "skills", "tasks")
    content["version"] = 1
    content["models"] = [{name: value for name, value in content["models"][0].items() if name not in new}]
    (tmp_path / "scores.json").write_text(json.dumps(content))
    assert Scores.load(tmp_path / "scores.json").models == (FIRST,)


def test_rates_are_compared_round_by_round_and_do_not_contradict_themselves():
    first = [2.0, 12.0, 16.0]
    rate = Rate.of(120, seconds=[2.0, 4.0, 8.0], first=first)
    assert rate == Rate(tokens_per_second=20.0, ratio=2.0, lowest=1.0, highest=3.0)
    assert rate.tokens_per_second == rate.ratio * Rate.of(120, first, first).tokens_per_second


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content.update(headwise="plan"), "expected a headwise scores, found a headwise plan"),
        (lambda content: content.update(version=9), "pip install -U headwise"),
        (lambda content: content.update(model=[]), "unknown field 'model'"),
        (lambda content: content.pop("notes"), "the field 'notes' is missing"),
        (lambda content: content["models"][0].update(kl="small"), "models 0, kl: expected a number"),
        (lambda content: content["models"][1].update(parameters=1.5), "models 1, parameters: expected a whole number"),
        (lambda content: content["models"][1].update(klx=1), "unknown field 'klx'"),
        (lambda content: content["models"][1]["skills"][0].update(right="all"), "skills 0, right: expected a number"),
        (lambda content: content["models"][1]["skills"][0]["nats_difference"].pop("low"), "the field 'low' is missing"),
        (lambda content: content["models"][1]["tasks"][1].pop("metric"), "tasks 1: the field 'metric' is missing"),
        (lambda content: content["models"][1]["parts"][0].update(last=0), "parts 0, last: expected"),
        (lambda content: content["models"][0]["speed"][0].pop("prefill"), "speed 0: the field 'prefill' is missing"),
        (lambda content: content["models"][0]["speed"][0]["decode"].update(ratio=None), "ratio: expected a number"),
        (lambda content: content["models"][1].update(speed=[]), "expected models that were timed at the same lengths"),
        (lambda content: content.update(models=[]), "expected models that were timed at the same lengths"),
        (lambda content: content["text"].pop("tokens"), "text: the field 'tokens' is missing"),
        (lambda content: content["settings"].update(threads="two"), "threads: expected a whole number"),
        (lambda content: content.update(notes=[3]), "notes 0: expected text, found 3"),
    ],
)
def test_wrong_files_say_what_is_wrong(change, sentence, tmp_path):
    content = json.loads(SCORES.json())
    change(content)
    (tmp_path / "scores.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        Scores.load(tmp_path / "scores.json")
    assert sentence in str(error.value)
