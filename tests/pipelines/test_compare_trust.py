"""Comparisons show what was trained, and do not rest on what somebody has changed."""

import json
from dataclasses import replace

import pytest

from headwise.files.errors import InputError
from headwise.pipelines.compare import compare
from headwise.report.comparisons import rows
from tests.pipelines.test_compare import CONFIG, given, steady  # noqa: F401 - a fixture


def test_tokens_are_those_that_were_learnt_from(given, tmp_path, monkeypatch):  # noqa: F811
    """A tenth more speed is no tenth more of a single step; nor are 100 tokens more than two steps of 64."""
    steady(monkeypatch, 1000.0, 1100.0)
    comparison = compare(*given, tmp_path, seeds=1, config=replace(CONFIG, tokens=100))
    assert {trial.tokens for trial in comparison.trials} == {128} and comparison.tokens == 128
    assert [each.tokens_in_time for each in comparison.contenders] == [128, 128]
    assert {row[4] for row in rows(comparison)} == {"128"}
    losses = {trial.reading: trial.loss for trial in comparison.trials if trial.shape == "other"}
    assert losses["tokens"] == losses["time"]


def test_results_that_were_changed_are_named_and_not_used(given, tmp_path, monkeypatch):  # noqa: F811
    steady(monkeypatch, 1000.0, 1001.0)
    config = replace(CONFIG, tokens=64, evaluations=1)
    whole = compare(*given, tmp_path, seeds=1, config=config)
    for name, field in (("pace.json", "tokens_per_second"), ("tasks/other-tokens-seed0.json", "loss")):
        file = tmp_path / name
        body = json.loads(file.read_text())
        file.write_text(json.dumps({**body, field: [1.0, 2.0] if field == "tokens_per_second" else 0.1}))
        with pytest.raises(InputError, match=f"{name} was changed since headwise compare wrote it; remove it"):
            compare(*given, tmp_path, seeds=1, config=config)
        file.unlink()
        assert compare(*given, tmp_path, seeds=1, config=config).trials == whole.trials
