"""Readings of a comparison: who is compared with whom, and what can be said."""

import json
from dataclasses import replace

import pytest

from headwise.records.comparison import Comparison, Contender, Trial

FIRST = Contender("usual", 1000, 100.0, 500)
NEAR = Contender("lean", 1015, 120.0, 600)
LARGE = Contender("large", 1100, 100.0, 500)
LOSSES = {
    ("usual", "tokens"): (3.0, 3.1, 3.2),
    ("usual", "time"): (3.0, 3.1, 3.2),
    ("lean", "tokens"): (3.01, 3.095, 3.2),
    ("lean", "time"): (2.8, 2.91, 2.99),
    ("large", "tokens"): (2.5, 2.6, 2.7),
    ("large", "time"): (3.5, 3.62, 3.68),
}


def comparison(seeds=3):
    trials = [
        Trial(shape, seed, reading, 500, loss, loss - 0.1, ((250, loss + 1), (500, loss)))
        for (shape, reading), losses in LOSSES.items()
        for seed, loss in enumerate(losses[:seeds])
    ]
    return Comparison((FIRST, NEAR, LARGE), tuple(trials), 500, tuple(range(seeds)), "text.txt", {"rate": 0.001})


def test_differences_are_paired_by_seed():
    found = comparison().outcome("lean", "time")
    assert found.mean == pytest.approx(2.9)
    assert found.spread == pytest.approx(0.0954, abs=1e-4)
    assert found.difference == pytest.approx(-0.2)
    assert found.error == pytest.approx(0.01 / 3**0.5)
    assert found.margin == pytest.approx(4.303 * 0.01 / 3**0.5)


def test_only_shapes_of_equal_size_are_compared_at_equal_parameters():
    found = comparison()
    assert found.names("parameters") == ["usual", "lean"]
    assert found.names("tokens") == found.names("time") == ["usual", "lean", "large"]
    alone = replace(found, contenders=(FIRST, LARGE))
    assert alone.verdict("parameters") == "No other shape has as many parameters as usual, within 2%."


def test_verdicts_claim_no_more_than_the_seeds_allow():
    found = comparison()
    assert found.verdict("tokens") == (
        "Against usual: lean not told apart (+0.0017 nats +- 0.0190); large better by 0.5000 nats +- 0.0000 "
        "(3 seeds, 95 % intervals)."
    )
    assert "lean better by 0.2000 nats" in found.verdict("time") and "large worse by 0.5" in found.verdict("time")
    one = comparison(seeds=1)
    assert "one seed says nothing of chance" in one.verdict("time") and "lean lower by 0.2000" in one.verdict("time")
    assert one.outcome("lean", "time").margin is None


def test_everything_is_in_the_file(tmp_path):
    found = comparison()
    found.save(tmp_path / "compare.json")
    read = json.loads((tmp_path / "compare.json").read_text())
    assert read["headwise"] == "comparison" and len(read["trials"]) == 18
    assert read["readings"]["time"]["verdict"] == found.verdict("time")
    assert read["readings"]["tokens"]["outcomes"]["large"]["difference"] == pytest.approx(-0.5)
