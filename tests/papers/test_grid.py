"""Grids of settings: what is finished stays finished, the same seed gives the same numbers, errors are sentences."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from headwise.files.errors import InputError
from headwise.papers.catalogue import PAPERS, SIZES, find, module_of
from headwise.papers.kit.grid import Job, measure, run_grids
from headwise.records.papers import Findings, Outcome, outcome_path
from headwise.report.page.papers import render_papers
from headwise.report.papers import markdown, rows
from tests.commands import headwise, start

ALL = find("all")
EXACT = [("allocation", "bound"), ("depth", "parameters")]


def silent(done, total, what):
    pass


@pytest.mark.parametrize("names", ALL, ids="/".join)
def test_every_experiment_has_the_same_names_and_plain_settings(names):
    module = module_of(*names)
    for size in SIZES:
        grid = module.Settings.grid(size, None)
        recipe = getattr(module, "RECIPE", 1)
        paths = {outcome_path(Path(), *names, recipe, json.loads(json.dumps(asdict(settings)))) for settings in grid}
        assert len(paths) == len(grid) > 0
        assert paths == {job.path(Path()) for job in Job.all(*names, grid)}
    assert all(callable(getattr(module, name)) for name in ("run", "check", "draw"))


def test_claims_have_names_of_their_own_and_are_decided_or_say_why_not():
    for paper in PAPERS.values():
        assert len({claim.name for claim in paper.claims}) == len(paper.claims)
        for claim in paper.claims:
            assert bool(claim.experiment) != bool(claim.reason)


def test_a_finished_setting_is_never_repeated(tmp_path, monkeypatch):
    ran = []

    def one_by_one(jobs):
        for job in jobs:
            ran.append(job)
            yield measure(job)

    monkeypatch.setattr("headwise.papers.kit.grid._on_cores", one_by_one)
    generator = one_by_one(Job.all("depth", "gaussian", _gaussian()[:3]))
    for outcome in generator:
        outcome.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert len(before) == 3
    results = run_grids([("depth", "gaussian")], tmp_path, size="quick", progress=silent)
    assert len(ran) == len(_gaussian()) == results[0].settings
    assert all(path.read_bytes() == text for path, text in before.items())
    run_grids([("depth", "gaussian")], tmp_path, size="quick", progress=silent)
    assert len(ran) == len(_gaussian())
    monkeypatch.setattr(module_of("depth", "gaussian"), "RECIPE", 2, raising=False)
    run_grids([("depth", "gaussian")], tmp_path, size="quick", progress=silent)
    assert len(ran) == 2 * len(_gaussian())  # done in another way, so done again


WAITS = """
import time, headwise.records.papers as papers
save, saved = papers.Outcome.save, []
def wait_after_two(self, folder):
    saved.append(save(self, folder))
    if len(saved) == 2:
        print("two", flush=True)
        time.sleep(600)
papers.Outcome.save = wait_after_two
"""


def test_a_killed_run_leaves_no_worker_and_continues(tmp_path):
    command = ["papers", "run", "depth/softmax", "-o", tmp_path]
    run = start(*command, first=WAITS)
    outcomes = tmp_path / "depth" / "softmax"
    assert run.stdout.readline() == "two\n" and len(list(outcomes.glob("*.json"))) == 2
    workers = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=120)[1]
    before = {path: path.read_bytes() for path in outcomes.glob("*.json")}
    assert not (tmp_path / "depth" / "softmax.quick.json").exists()
    assert headwise(*command).returncode == 0
    assert len(list(outcomes.iterdir())) == len(module_of("depth", "softmax").Settings.grid("quick", None))
    assert all(path.read_bytes() == text for path, text in before.items())


def _gaussian():
    return module_of("depth", "gaussian").Settings.grid("quick", None)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (("heads", "retrieval"), {"table": 5, "heads": 2, "tokens": 8, "seeds": 2, "steps": 3}),
        (("allocation", "ngram"), {"arm": "sinusoidal, q/k norm", "heads": 4, "length": 8, "batch": 4, "steps": 3}),
        (("allocation", "ngram"), {"arm": "relative, dropout", "heads": 4, "length": 8, "batch": 4, "steps": 3}),
        (("rank", "forced"), {"task": "reversal", "limit": 2, "head_dim": 4, "steps": 2}),
    ],
)
def test_the_same_settings_give_the_same_numbers(names, settings):
    first, second = (measure(Job(*names, 1, settings)).measured for _ in range(2))
    assert first == second


def test_settings_run_in_other_processes_and_are_shown(tmp_path):
    results = run_grids(EXACT, tmp_path, size="quick", progress=silent)
    outcomes = [Outcome.load(path) for path in tmp_path.glob("*/*/*.json")]
    assert {outcome.experiment for outcome in outcomes} == {"bound", "parameters"}
    assert {verdict.status for findings in results for verdict in findings.verdicts} >= {
        "held",
        "held under conditions",
    }
    loaded = {name: Findings.load(tmp_path, "allocation", name, SIZES) for name in PAPERS["allocation"].experiments}
    assert loaded["bound"] == results[0]
    table = rows("allocation", PAPERS["allocation"].claims, loaded)
    titles = {"allocation": "A | B"}
    page, text = render_papers(titles, table), markdown(titles, table)
    assert "0.166 at 8 heads" in page
    assert "0.166 at 8 heads" in text
    assert "out of reach here" in text
    assert page.count("<svg") == 1


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [("head", "There is no paper 'head'; choose one of allocation"), ("heads/x", "Paper heads has no experiment 'x'")],
)
def test_wrong_names_get_a_sentence(wanted, sentence):
    with pytest.raises(InputError, match=sentence):
        find(wanted)


def test_what_one_experiment_lacks_stops_no_other(tmp_path, monkeypatch):
    def one_by_one(jobs):
        yield from map(measure, jobs)

    def lacking(settings):
        raise InputError("No data here.")

    monkeypatch.setattr("headwise.papers.kit.grid._on_cores", one_by_one)
    monkeypatch.setattr(module_of("allocation", "bound"), "run", lacking)
    with pytest.raises(InputError, match="No data here"):
        run_grids(EXACT, tmp_path, size="quick", progress=silent)
    assert Findings.load(tmp_path, "depth", "parameters", SIZES) is not None
    assert Findings.load(tmp_path, "allocation", "bound", SIZES) is None


def test_without_ray_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'pip install "headwise\[ray\]"'):
        run_grids([("allocation", "bound")], tmp_path, size="quick", ray=True, progress=silent)


def test_listing_needs_no_torch(tmp_path):
    code = (
        "import sys; from headwise.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    for command in ("list", "report"):
        arguments = ["papers", command, "-o", str(tmp_path)]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "not run yet" in (tmp_path / "papers.md").read_text(encoding="utf-8")
