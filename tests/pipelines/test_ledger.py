"""A folder made step by step: nothing is done twice, nothing changed is relied on, nothing of others is touched."""

import itertools
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from headwise.files.errors import InputError
from headwise.files.writing import write_text
from headwise.pipelines.ledger import Ledger


class Killed(BaseException):
    pass


def walk(folder, text="a", made=None):
    """Two steps: a file, and a folder made from it."""
    made = [] if made is None else made
    ledger = Ledger(folder, "run.json")
    ledger.check(("one.txt", "two"))

    def one(place):
        made.append("one")
        write_text(place / "one.txt", text)

    def two(place):
        made.append("two")
        temporary = place / ".two"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "in").mkdir(parents=True)
        (temporary / "weights").write_text(text * 2)
        (temporary / "README.md").write_text("card")
        (temporary / "in" / "side").write_text("side")
        temporary.replace(place / "two")

    first = ledger.do("one", ("one.txt",), text, one)
    ledger.do("two", ("two",), first, two)
    ledger.close()
    return made


def test_a_second_walk_does_nothing_and_a_change_does_what_follows_from_it(tmp_path):
    assert walk(tmp_path) == ["one", "two"]
    assert walk(tmp_path) == []
    assert walk(tmp_path, "b") == ["one", "two"]
    assert (tmp_path / "two" / "weights").read_text() == "bb"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.txt", "run.json", "two"]
    content = json.loads((tmp_path / "run.json").read_text())
    assert set(content["steps"]["two"]["outputs"]) == {"two/README.md", "two/in/side", "two/weights"}


@pytest.mark.parametrize("name", ["one.txt", "two/weights", "two/in/side"])
def test_what_was_changed_is_named_and_stays(tmp_path, name):
    walk(tmp_path)
    (tmp_path / name).write_text("mine")
    for text in "ab":
        with pytest.raises(InputError, match=rf"{name} was changed since this run made it: remove it or give"):
            walk(tmp_path, text)
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    assert "two" in walk(tmp_path) or name == "one.txt"
    assert walk(tmp_path) == []


@pytest.mark.parametrize("name", ["one.txt", "two", "two/more"])
def test_what_is_not_ours_is_named_and_stays(tmp_path, name):
    if name == "two/more":
        walk(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"{name} exists already and was not made by this run: remove it or give"):
        walk(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_hidden_files_of_others_survive_and_cards_may_be_written_into(tmp_path):
    walk(tmp_path)
    (tmp_path / "two" / "README.md").write_text("card with scores")
    assert walk(tmp_path) == []
    (tmp_path / "two" / ".desktop").write_text("mine")
    assert walk(tmp_path) == []
    with pytest.raises(InputError, match="two exists already and was not made by this run"):
        walk(tmp_path, "b")
    assert (tmp_path / "two" / ".desktop").read_text() == "mine"
    (tmp_path / "two" / ".desktop").unlink()
    (tmp_path / "two").rmdir()
    assert walk(tmp_path, "b") == []  # all of it lay ready


def test_a_lost_file_or_an_empty_folder_is_made_again(tmp_path):
    (tmp_path / "two").mkdir()
    walk(tmp_path)
    (tmp_path / "two" / "README.md").unlink()
    assert walk(tmp_path) == ["two"]
    (tmp_path / "one.txt").unlink()
    assert walk(tmp_path) == ["one"]


def files(folder):
    """Without what a write that was cut short has left: a living process, which this one is, keeps its own."""
    return {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}


def test_a_kill_at_any_moment_is_no_dead_end(tmp_path, monkeypatch):
    """Every change of the disk is once the last one."""
    walk(tmp_path / "whole")
    walk(tmp_path / "whole", "b")
    wanted = files(tmp_path / "whole")
    for last in itertools.count(1):
        folder, left = tmp_path / f"killed-{last}", itertools.count(1)
        walk(folder)
        dead = False

        def until(real, *args, _last=last, _left=left, **options):
            nonlocal dead
            if next(_left) > _last or dead:
                dead = True
                raise Killed
            return real(*args, **options)

        with monkeypatch.context() as patched:
            for name in ("replace", "unlink", "rmdir", "mkdir", "write_text"):
                real = getattr(Path, name)
                patched.setattr(
                    Path, name, lambda *args, _real=real, _until=until, **options: _until(_real, *args, **options)
                )
            with suppress(Killed):
                walk(folder, "b")
        walk(folder, "b")
        found = files(folder)
        assert found.keys() == wanted.keys()
        assert all(path.read_bytes() == wanted[name].read_bytes() for name, path in found.items())
        if not dead:
            break
    assert last > 10


def test_a_ledger_of_others_deletes_nothing_outside_its_folder(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    walk(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "run.json").read_text())
    content["steps"]["one"]["outputs"]["../precious.txt"] = "0" * 64
    content["steps"]["one"]["inputs"] = "other"
    (tmp_path / "out" / "run.json").write_text(json.dumps(content))
    walk(tmp_path / "out")
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_file_that_is_no_ledger_is_refused_and_an_older_one_vouches_for_nothing(tmp_path):
    (tmp_path / "run.json").write_text('{"headwise": "plan", "version": 2}')
    with pytest.raises(InputError, match="expected a headwise run, found a headwise plan"):
        walk(tmp_path)
    (tmp_path / "run.json").write_text('{"headwise": "run", "version": 1, "steps": {"one": "abc"}}')
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(InputError, match=r"one\.txt exists already and was not made by this run"):
        walk(tmp_path)
