import json
from dataclasses import replace

import pytest

from headwise.files.reading import read_record
from headwise.files.writing import new_folder, write_text
from headwise.records import InputError, LayerPlan, LayerShape, ModelShape, Plan

SHAPE = ModelShape("llama", 32, (LayerShape(4, 2, 8, 8, rotary=8),) * 3, 100, 50)
PLAN = Plan.make(
    SHAPE,
    (
        LayerPlan(2, 1, 4, 3, rope_pairs=((0, 3),), kept_heads=(2, 3)),
        LayerPlan(0, 0, 0, 0),
        replace(LayerPlan.full(SHAPE.layers[2]), dropped=True),
    ),
    budget={"keep_kv": 0.5},
)


def first_change(plan, layer=0):
    return plan["layers"][layer]["changes"][0]


def test_plan_round_trips(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda plan: plan.pop("headwise"), "expected a headwise plan, found some other JSON file"),
        (lambda plan: plan.update(headwise="profile"), "expected a headwise plan, found a headwise profile"),
        (lambda plan: plan.update(version=99), "this headwise reads up to 3"),
        (lambda plan: plan.update(version="new"), "expected a version number"),
        (lambda plan: plan.pop("layers"), "the field 'layers' is missing"),
        (lambda plan: plan.update(width="wide"), "width: expected a whole number, found the text 'wide'"),
        (lambda plan: plan.update(layers=3), "layers: expected a list, found 3"),
        (lambda plan: plan["layers"][0].pop("changes"), "layers 0: the field 'changes' is missing"),
        (lambda plan: first_change(plan).pop("heads"), "layers 0, changes 0: the field 'heads' is missing"),
        (lambda plan: first_change(plan).update(heads=True), "layers 0, changes 0, heads: expected a whole number"),
        (lambda plan: first_change(plan).update(rope_pairs=[["x"]]), "rope_pairs 0 0: expected a whole number"),
        (lambda plan: first_change(plan).pop("kind"), "layers 0, changes 0: the field 'kind' is missing"),
        (lambda plan: first_change(plan).update(kind="wish"), "changes 0: There is no kind of reduction called 'wish'"),
        (lambda plan: first_change(plan, 1).update(part="norm"), "part: expected one of 'attention', 'block'"),
        (lambda plan: first_change(plan, 1).update(heads=0), "unknown field 'heads'; known are part"),
        (lambda plan: plan["layers"][0].update(heads=2), "layers 0: unknown field 'heads'; known are changes"),
        (lambda plan: plan.update(before=[[1, 2]]), "expected the four numbers"),
        (lambda plan: plan.update(layers=[7]), "layers 0: expected a JSON object, found 7"),
    ],
)
def test_damaged_plans_say_what_is_wrong(tmp_path, damage, sentence):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"plan\.json") as error:
        Plan.load(path)
    assert sentence in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"PK\x03\x04"])
def test_foreign_files_are_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_record(path, "plan", 1)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="There is no file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        Plan.load(tmp_path)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "plan.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "out") as folder:
        (folder / "whole").write_text("x")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["whole"]
    with pytest.raises(InputError, match="exists already"), new_folder(tmp_path / "out"):
        pass
