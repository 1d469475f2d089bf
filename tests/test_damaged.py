"""Damaged records, each with the sentence it gets: what a strict reader must notice, and what is made again instead."""

import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file

from headwise.checkpoints.profile_tensors import layer_kinds
from headwise.records import InputError, Plan
from headwise.records.papers import Findings
from headwise.records.profile import Profile
from headwise.records.scores import Scores
from headwise.steps.plan import read_layers
from tests.fuzz.child import run_command
from tests.fuzz.shared import built
from tests.fuzz.world import HEAL, TRAIN

__all__ = ["built"]


def changed(source, target, change):
    """A copy of a JSON file after ``change``."""
    content = json.loads(source.read_text())
    change(content)
    target.write_text(json.dumps(content))
    return target


def values(content, layer=1):
    return content["layers"][layer]["values"]


WRONG_PROFILES = {
    "NaN": (lambda c: values(c)["qk_unit_damage"][0].__setitem__(2, math.nan), "NaN is no finite number"),
    "infinite": (lambda c: values(c)["head_damage"].__setitem__(0, math.inf), "Infinity is no finite number"),
    "too large": (lambda c: values(c)["head_damage"].__setitem__(0, 1e300), "a number beyond 1e+100"),
    "negative": (
        lambda c: values(c)["head_damage"].__setitem__(0, -1.0),
        "head_damage: expected 4 finite numbers from",
    ),
    "text": (
        lambda c: values(c)["v_unit_damage"][1].__setitem__(0, "x"),
        "v_unit_damage: expected 2 x 8 finite numbers",
    ),
    "missing": (lambda c: values(c).pop("qk_unit_damage"), "values: the field 'qk_unit_damage' is missing"),
    "missing on the page": (lambda c: values(c).pop("twin_overlap"), "the field 'twin_overlap' is missing"),
    "unknown": (lambda c: values(c).update(head_damages=[]), "unknown field 'head_damages'"),
    "short": (lambda c: values(c)["qk_unit_damage"][0].pop(), "qk_unit_damage: expected 2 x 4 finite numbers"),
    "long": (lambda c: values(c)["first_token"][0].append(0.1), "first_token: expected 4 x 2 finite numbers"),
    "flat": (lambda c: values(c).update(first_token=[0.1] * 4), "first_token: expected 4 x 2 finite numbers"),
    "null": (lambda c: values(c)["first_token"][0].__setitem__(0, None), "first_token: expected 4 x 2 finite numbers"),
    "a head less": (lambda c: values(c)["effective_rank"].pop(), "effective_rank: expected 4 x 2 finite numbers"),
    "no such twin": (lambda c: values(c)["twin"].__setitem__(0, 4), "twin 0: expected a whole number from 0 to 3"),
    "a layer less": (lambda c: c["layers"].pop(), "2 layers are measured, the model has 3"),
    "no layers": (lambda c: (c["layers"].clear(), c["shape"]["layers"].clear()), "expected at least one layer"),
    "width as text": (lambda c: c["shape"].update(width="32"), "shape, width: expected a whole number"),
    "heads uneven": (lambda c: c["shape"]["layers"][0].update(heads=3), "3 query heads cannot share 2"),
    "rotary too wide": (lambda c: c["shape"]["layers"][0].update(rotary=16), "16 coordinates cannot be rotary"),
    "unknown norm": (lambda c: c["shape"]["layers"][0].update(norm="odd"), "norm: expected one of 'none', 'shared'"),
    "unknown bias": (lambda c: c["shape"]["layers"][0].update(biases="qx"), "biases: expected letters of 'qkvo'"),
    "cache of nothing": (lambda c: c["shape"]["layers"][0].pop("cache"), "the field 'cache' is missing"),
    "half a window": (lambda c: c["shape"]["layers"][0].update(window=0.5), "window: expected a whole number"),
    "lengths as text": (lambda c: c["layers"][0].update(lengths=["16"]), "lengths 0: expected a whole number"),
    "no tokens": (lambda c: c["settings"].pop("tokens"), "settings: the field 'tokens' is missing"),
    "no source": (lambda c: c["model"].pop("source"), "model: the field 'source' is missing"),
    "a note of numbers": (lambda c: c["notes"].append(3), "expected text, found 3"),
    "odd checks": (lambda c: c["checks"][0].update(predicted="x"), "checks 0, predicted: expected a number"),
}


@pytest.mark.parametrize("case", WRONG_PROFILES)
def test_profiles(built, tmp_path, case):
    change, sentence = WRONG_PROFILES[case]
    path = changed(built / "profile-llama" / "profile.json", tmp_path / "profile.json", change)
    with pytest.raises(InputError, match=r"profile\.json") as error:
        Profile.load(path)
    assert sentence in str(error.value)


def test_a_profile_with_holes_where_nothing_was_measured_is_whole(built, tmp_path):
    def change(content):
        values(content)["effective_rank"][0][0] = None
        values(content)["conditioning"][1] = None
        del values(content)["stable_rank"]

    Profile.load(changed(built / "profile-llama" / "profile.json", tmp_path / "profile.json", change))


def test_what_plan_says_of_a_damaged_profile_and_of_layers_no_model_has(built, tmp_path):
    shutil.copytree(built / "profile-llama", tmp_path / "profile")
    file = tmp_path / "profile" / "profile.json"
    changed(file, file, lambda content: values(content)["v_unit_damage"][0].__setitem__(0, math.nan))
    ended = run_command(["plan", "profile", "--keep-kv", "0.5"], tmp_path)
    assert ended.code == 2 and "NaN is no finite number" in ended.stderr and ended.stderr.count("\n") == 1
    with pytest.raises(InputError, match="No model has as many layers as '0-1000000000' names"):
        read_layers("1,0-1000000000")


def spoil(name, change):
    def spoiled(tensors):
        tensors[name] = change(tensors[name])

    return spoiled


def with_nan(tensor):
    tensor.view(-1)[0] = math.nan
    return tensor


WRONG_TENSORS = {
    "missing": (lambda tensors: tensors.pop("1.v_fisher"), "lacks 1 tensors, 1.v_fisher among them"),
    "extra": (spoil("9.v_fisher", lambda _: _), "holds 1 tensors that do not belong there"),
    "NaN": (spoil("1.q_moment", with_nan), "some numbers in 1.q_moment are NaN or infinite"),
    "shorter": (
        spoil("0.k_mean", lambda t: t[:1].clone()),
        "expected 0.k_mean as torch.float32 of shape (2, 8), found",
    ),
    "another type": (spoil("0.k_mean", lambda t: t.double()), "found torch.float64 of (2, 8)"),
    "a batch missing": (
        lambda tensors: tensors.pop(next(n for n in tensors if n.startswith("inputs.0"))),
        "inspect the",
    ),
    "odd tokens": (spoil("inputs.0", lambda t: t + 1000), "gives the token"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_of_a_profile(built, tmp_path, case):
    for name in ("llama", "profile-llama"):
        shutil.copytree(built / name, tmp_path / name)
    shutil.copy2(built / "plan.json", tmp_path)
    file = tmp_path / "profile-llama" / "profile.safetensors"
    change, sentence = WRONG_TENSORS[case]
    with_names = Names(load_file(file))
    change(with_names)
    facts = {"inputs_hash": Profile.load(file.with_suffix(".json")).inputs_hash}
    facts["fingerprint"] = Profile.load(file.with_suffix(".json")).fingerprint
    save_file(dict(with_names), file, facts)  # as versions wrote it that did not seal their files
    ended = run_command(
        ["compress", "llama", "--plan", "plan.json", "--profile", "profile-llama", "-o", "out"], tmp_path
    )
    assert ended.code == 2 and ended.stderr.count("\n") == 1, ended
    assert sentence in ended.stderr, ended.stderr
    assert not (tmp_path / "out").exists()


class Names(dict):
    """Tensors by name, or by the beginning of one; one that is not there is a new one."""

    def _whole(self, name):
        return next((each for each in self if each.startswith(name)), name)

    def __getitem__(self, name):
        return super().get(self._whole(name), next(iter(self.values())).clone())

    def __setitem__(self, name, tensor):
        super().__setitem__(self._whole(name), tensor)


def test_the_names_and_shapes_are_those_that_are_written(built):
    profile = Profile.load(built / "profile-bert" / "profile.json")
    tensors = load_file(built / "profile-bert" / "profile.safetensors")
    for number, layer in enumerate(profile.shape.layers):
        for name, (kind, shape) in layer_kinds(layer).items():
            assert (tensors[f"{number}.{name}"].dtype, tuple(tensors[f"{number}.{name}"].shape)) == (kind, shape)


def test_plans_whose_promises_are_gone(built, tmp_path):
    for change, sentence in (
        (lambda c: c["predicted"].pop("loss_increase"), "predicted: the field 'loss_increase' is missing"),
        (lambda c: c["predicted"].update(kept="half"), "kept: expected a number"),
        (lambda c: c["predicted"].update(kv_bytes_per_token=[1]), "kv_bytes_per_token: expected 2 finite numbers"),
        (lambda c: c["budget"].pop("dtype"), "budget: the field 'dtype' is missing"),
    ):
        with pytest.raises(InputError, match=sentence):
            Plan.load(changed(built / "plan.json", tmp_path / "plan.json", change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c["verdicts"][0].pop("figure"), "verdicts 0: the field 'figure' is missing"),
        (lambda c: c["verdicts"][0].update(status="perhaps"), "status: expected one of 'held'"),
        (lambda c: c["verdicts"][0].update(more=1), "unknown field 'more'"),
        (lambda c: c.update(charts=[3]), "charts 0: the field|expected a JSON object"),
        (lambda c: c["charts"][0]["lines"][0]["x"].pop(), "each point needs both"),
        (lambda c: c["charts"][0]["lines"][0]["y"].__setitem__(0, "x"), "expected a number"),
        (lambda c: c["charts"][0]["lines"][0].pop("name"), "the field 'name' is missing"),
        (lambda c: c.update(seconds=-1), "seconds: expected a finite number from 0 on"),
    ],
)
def test_findings_of_papers(built, tmp_path, change, sentence):
    (tmp_path / "allocation").mkdir()
    source = built / "papers" / "allocation" / "bound.quick.json"
    changed(source, tmp_path / "allocation" / source.name, change)
    with pytest.raises(InputError, match=sentence):
        Findings.load(tmp_path, "allocation", "bound", ["quick"])


def test_outcomes_of_papers(built, tmp_path):
    shutil.copytree(built / "papers", tmp_path / "papers")
    (file,) = (tmp_path / "papers" / "allocation" / "bound").glob("*.json")
    whole = file.read_text()
    for change, sentence in (
        (lambda c: c["settings"].update({next(iter(c["settings"])): 999}), "is the outcome of other settings"),
        (lambda c: c.update(found={}), "holds outcomes that cannot be checked"),
        (lambda c: c.update(found=3), "found: expected a JSON object"),
    ):
        file.write_text(whole)
        changed(file, file, change)
        ended = run_command(["papers", "run", "allocation/bound", "-o", "papers"], tmp_path)
        assert ended.code == 2 and sentence in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_what_a_comparison_rests_on(built, tmp_path):
    for name in ("usual.json", "other.json", "text.txt"):
        shutil.copy2(built / name, tmp_path)
    arguments = ["compare", "usual.json", "other.json", "--data", "text.txt", *TRAIN, "--seeds", "2", "-o", "compared"]
    for name, content in (
        ("pace.json", "3"),
        ("pace.json", "{"),
        ("pace.json", '{"inputs_hash": NaN}'),
        ("tasks/usual-tokens-seed0.json", "[]"),
        ("tasks/usual-tokens-seed0.json", '{"shape": "usual"}'),
    ):
        shutil.rmtree(tmp_path / "compared", ignore_errors=True)
        shutil.copytree(built / "compared", tmp_path / "compared")
        (tmp_path / "compared" / name).write_text(content)
        ended = run_command(arguments, tmp_path)
        assert ended.code == 2 and name in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr


def test_work_that_was_damaged_in_between_is_told_or_done_again(built, tmp_path):
    """Metrics with a bare number, checkpoints that lack a tensor, odd tokens: what a rerun goes on from."""
    for name in ("usual.json", "text.txt", "llama", "reduced"):
        source = built / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    train = ["train", "--plan", "usual.json", "--data", "text.txt", *TRAIN, "-o", "trained"]
    heal = ["heal", "reduced", *HEAL, "-o", "healed"]
    for arguments, work in ((train, "trained.training"), (heal, "healed.healing")):
        for spoiled in (bare_number, no_text, lacking, tokens_beyond):
            shutil.rmtree(tmp_path / work, ignore_errors=True)
            shutil.rmtree(tmp_path / arguments[-1], ignore_errors=True)
            shutil.copytree(built / work, tmp_path / work)
            spoiled(tmp_path / work)
            ended = run_command(arguments, tmp_path)
            assert ended.code in (0, 2) and "Traceback" not in ended.stderr, (spoiled, ended.stderr)


def bare_number(work):
    file = work / "metrics.jsonl"
    file.write_text("3\n" + file.read_text())


def no_text(work):
    file = work / "metrics.jsonl"
    file.write_bytes(b"\xff\xfe\n" + file.read_bytes())


def lacking(work):
    for file in work.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, file)


def tokens_beyond(work):
    for file in work.glob("tokens-*.bin"):
        file.write_bytes(b"\xff\xff" * 100 + b"x")


def test_scores_and_plans_of_the_world_are_whole(built):
    """So that what is refused above is refused for its damage."""
    assert Scores.load(built / "run" / "scores.json").models
    assert Plan.load(built / "plan.json").predicted
    assert Findings.load(built / "papers", "allocation", "bound", ["quick"])
