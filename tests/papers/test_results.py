"""The committed verdicts are those of the committed outcomes and of today's checks."""

import shutil
from pathlib import Path

import pytest

from headwise.papers.catalogue import PAPERS, module_of
from headwise.papers.kit.grid import Job, run_grids
from headwise.records.papers import Findings

RESULTS = Path(__file__).parents[2] / "results" / "papers"
DONE = sorted((path.parent.name, path.name.removesuffix(".full.json")) for path in RESULTS.glob("*/*.full.json"))


@pytest.mark.parametrize(("paper", "experiment"), DONE, ids="/".join)
def test_verdicts_follow_from_outcomes(paper, experiment, tmp_path):
    jobs = Job.all(paper, experiment, module_of(paper, experiment).Settings.grid("full", None))
    files = {job.path(RESULTS) for job in jobs}
    assert files == set((RESULTS / paper / experiment).iterdir())
    shutil.copytree(RESULTS / paper / experiment, tmp_path / paper / experiment)
    (findings,) = run_grids([(paper, experiment)], tmp_path, size="full", progress=lambda *_: None)
    committed = Findings.load(RESULTS, paper, experiment, ["full"])
    assert findings.verdicts == committed.verdicts
    assert {verdict.claim for verdict in findings.verdicts} == {
        claim.name for claim in PAPERS[paper].claims if claim.experiment == experiment
    }
