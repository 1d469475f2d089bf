"""What the papers say, measured again, quick: exact experiments to the figure, the rest to the verdict."""

from dataclasses import replace

import pytest

from headwise.papers.allocation import real
from headwise.papers.catalogue import PAPERS, SIZES, find, module_of
from headwise.papers.kit.grid import measure, run_grids
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, UNREACHED, Findings, Outcome
from tests.papers.test_results import RESULTS
from tests.tiny import instead_of_smollm2

EXACT = (
    ("allocation", "bound"),
    ("allocation", "jacobian"),
    ("heads", "constructions"),
    ("rank", "temperature"),
    ("depth", "gaussian"),
    ("depth", "parameters"),
)
EXPECTED = {
    "bound-curve": HELD,
    "allocation-rule": HELD,
    "selection-term": CONDITIONAL,
    "saturation": CONDITIONAL,
    "small-change": CONDITIONAL,
    "enough-heads": CONDITIONAL,
    "memorising-head": HELD,
    "intrinsic": HELD,
    "lower-bound": UNREACHED,
    "lemma": HELD,
    "theorem": HELD,
    "more-heads": CONDITIONAL,
    "fixed-width": FAILED,
    "counts": CONDITIONAL,
}
TRAINED = {
    "heads": {"transition": HELD, "fixed-width": HELD, "three-look-ups": HELD, "two-layers": HELD, "text": HELD},
    "allocation": {"gram-drop": CONDITIONAL, "trained-saturation": CONDITIONAL, "weighted-start": HELD},
    "rank": {"barrier": HELD, "not-a-limit": FAILED, "key-norms": HELD, "causal": HELD, "trained-rank": FAILED},
    "depth": {"softmax-heads": CONDITIONAL, "jacobian": CONDITIONAL},
}


def silent(done, total, what):
    pass


def test_exact_claims_come_out_as_stated(tmp_path):
    results = run_grids(EXACT, tmp_path, size="quick", progress=silent)
    verdicts = {verdict.claim: verdict for findings in results for verdict in findings.verdicts}
    for claim, status in EXPECTED.items():
        assert verdicts[claim].status == status, verdicts[claim]
    assert "minimum 0.166 at 8 heads" in verdicts["bound-curve"].figure
    slopes = [float(part.rsplit(" ", 1)[1]) for part in verdicts["saturation"].figure.split(": ")[1].split(", ")]
    assert slopes == pytest.approx([-1.0, -0.55, -0.05], abs=0.1)


SHORT = {"steps": 4, "tune": 2, "heal": 2, "repeats": 4}


@pytest.mark.parametrize("names", find("all"), ids="/".join)
def test_a_few_steps_of_every_experiment_are_checked_and_drawn(names, tmp_path, monkeypatch):
    """The line that decides claims, with too little training for any verdict."""
    module, (paper, experiment) = module_of(*names), names
    grid = [
        replace(settings, **{name: most for name, most in SHORT.items() if getattr(settings, name, 0) > most})
        for settings in module.Settings.grid("quick", None)
    ]
    monkeypatch.setattr(module.Settings, "grid", lambda size, seeds: grid)
    monkeypatch.setattr("headwise.papers.kit.grid._on_cores", lambda jobs: map(measure, jobs))
    monkeypatch.setattr(real, "demo_model", lambda: instead_of_smollm2(tmp_path, head_dim=16))
    (findings,) = run_grids([names], tmp_path, size="quick", progress=silent)
    claims = {claim.name for claim in PAPERS[paper].claims if claim.experiment == experiment}
    assert findings.verdicts and {verdict.claim for verdict in findings.verdicts} <= claims
    assert all(verdict.figure for verdict in findings.verdicts if verdict.status != OPEN)
    here, full = (
        [Outcome.load(path).measured.keys() for path in (folder / paper / experiment).iterdir()]
        for folder in (tmp_path, RESULTS)
    )
    assert len(here) == len(grid) and all(names in full for names in here)
    assert Findings.load(tmp_path, paper, experiment, SIZES) == findings


@pytest.mark.slow
@pytest.mark.parametrize("key", PAPERS)
def test_quick_decides_every_claim(key, tmp_path):
    results = run_grids(find(key), tmp_path, size="quick", progress=silent)
    verdicts = {verdict.claim: verdict for findings in results for verdict in findings.verdicts}
    for claim, status in TRAINED[key].items():
        assert verdicts[claim].status == status, verdicts[claim]
    assert all(verdict.figure for verdict in verdicts.values() if verdict.status != OPEN)
