"""What the papers say, measured again, quick: exact experiments to the figure, the rest to the verdict."""

import pytest

from headwise.papers.catalogue import PAPERS, find
from headwise.papers.grid import run_grids
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, UNREACHED

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
    found = run_grids(EXACT, tmp_path, size="quick", progress=silent)
    verdicts = {verdict.claim: verdict for findings in found for verdict in findings.verdicts}
    for claim, status in EXPECTED.items():
        assert verdicts[claim].status == status, verdicts[claim]
    assert "minimum 0.166 at 8 heads" in verdicts["bound-curve"].figure
    slopes = [float(part.rsplit(" ", 1)[1]) for part in verdicts["saturation"].figure.split(": ")[1].split(", ")]
    assert slopes == pytest.approx([-1.0, -0.55, -0.05], abs=0.1)


@pytest.mark.parametrize("key", PAPERS)
def test_quick_decides_every_claim(key, tmp_path):
    found = run_grids(find(key), tmp_path, size="quick", progress=silent)
    verdicts = {verdict.claim: verdict for findings in found for verdict in findings.verdicts}
    for claim, status in TRAINED[key].items():
        assert verdicts[claim].status == status, verdicts[claim]
    assert all(verdict.figure for verdict in verdicts.values() if verdict.status != OPEN)
