"""The smallest model within a bound, found by running real ones."""

import math

import pytest

from headwise.records.errors import InputError
from headwise.steps import search
from headwise.steps.inspect import inspect
from headwise.steps.search import plan_within, read_bound
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 40


def run_folder(name, tmp_path):
    tiny(name).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    texts = [str(tmp_path / "text.txt")]
    inspect(str(tmp_path / "model"), tmp_path / "run", texts=texts, tokens=96, lengths=(16,), maps=False)
    return tmp_path / "run", texts


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_looser_bound_gives_a_smaller_model(name, tmp_path):
    run, texts = run_folder(name, tmp_path)
    kept = []
    for bound in (1e-4, 1e-1):
        plan, _ = plan_within(run, tmp_path / "plan.json", bound, texts=texts, multiple=2)
        assert plan.predicted["measured"] <= bound
        kept.append(plan.predicted["kept"])
    assert kept[1] < kept[0]


def test_a_bound_nothing_meets_is_refused(tmp_path, monkeypatch):
    run, texts = run_folder("llama", tmp_path)
    monkeypatch.setattr(search, "_damage_on_text", lambda *args: lambda student: 1.0)
    with pytest.raises(InputError, match=r"No cut stays within 0\.5 nats"):
        plan_within(run, None, 0.5, texts=texts, multiple=2)


def test_bounds_are_perplexity_or_nats():
    assert read_bound("2%") == pytest.approx(math.log(1.02))
    assert read_bound("0.02") == 0.02
    for wrong in ("", "%", "two", "-1%", "0", "nan"):
        with pytest.raises(InputError, match="Damage is a percentage"):
            read_bound(wrong)
