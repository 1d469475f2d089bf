"""The smallest model within a bound, found by running real ones on text they were not measured on."""

import math
import random

import pytest
import torch

from headwise.files.errors import InputError
from headwise.records.settings import BoundConfig
from headwise.steps import search
from headwise.steps.search import plan_within
from tests.calls import inspect
from tests.tiny import tiny
from tests.tokens import save_tokenizer

DRAW = random.Random(0)
TEXT = " ".join("".join(DRAW.choices("abcdefghij", k=DRAW.randint(2, 7))) for _ in range(900))


def run_folder(name, tmp_path, text=TEXT):
    tiny(name).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(text)
    texts = [str(tmp_path / "text.txt")]
    inspect(str(tmp_path / "model"), tmp_path / "run", texts=texts, tokens=96, lengths=(16,), context=32, maps=False)
    return tmp_path / "run", texts


@pytest.mark.parametrize(("name", "given"), [("llama", True), ("llama", False), ("bert", False)])
def test_a_looser_bound_gives_a_smaller_model(name, given, tmp_path):
    run, texts = run_folder(name, tmp_path)
    kept = []
    for bound in (1e-4, 1e-1):
        plan, _ = plan_within(run, tmp_path / "plan.json", bound, texts=texts if given else (), multiple=2)
        assert plan.predicted["measured"] <= bound and plan.predicted["unseen"] > 0
        kept.append(plan.predicted["kept"])
    assert kept[1] < kept[0]


def test_nothing_that_was_calibrated_on_is_measured_on(tmp_path):
    from headwise.checkpoints.load import open_model
    from headwise.checkpoints.profile_tensors import profiled_batches
    from headwise.checkpoints.profiled import Profile
    from headwise.data.processors import open_tokenizer
    from headwise.data.texts import read_texts

    run, texts = run_folder("llama", tmp_path)
    profile = Profile.load(run)
    tensors = profile.tensors
    model = open_model(str(tmp_path / "model"))
    source = str(tmp_path / "model")
    unseen = search._unseen(model, profile, source, tensors, open_tokenizer(source), read_texts(texts), False)
    calibrated = {tuple(row) for batch in profiled_batches(tensors) for row in batch.inputs["input_ids"].tolist()}
    measured = torch.cat([batch.inputs["input_ids"].flatten() for batch in unseen]).tolist()
    shown = " ".join(map(str, measured))
    assert measured and not any(" ".join(map(str, row[1:-1])) in shown for row in calibrated)


def test_text_that_was_all_calibrated_on_is_refused(tmp_path):
    run, texts = run_folder("llama", tmp_path, "the quick brown fox jumps over the lazy dog and runs " * 40)
    with pytest.raises(InputError, match="was calibrated on"):
        plan_within(run, None, 0.5, texts=texts, multiple=2)


def test_wrong_options_are_told_and_context_and_dtype_count(tmp_path):
    run, _ = run_folder("llama", tmp_path)
    with pytest.raises(InputError, match="no layer 99 to protect"):
        plan_within(run, None, 0.5, protect=[99])
    plan, _ = plan_within(run, None, 0.5, multiple=2, context=64, dtype="fp32")
    assert (plan.budget["context"], plan.budget["dtype"]) == (64, "fp32")


def test_a_bound_nothing_meets_is_refused(tmp_path, monkeypatch):
    run, texts = run_folder("llama", tmp_path)
    monkeypatch.setattr(search, "_loss_increase", lambda *args: lambda student: 1.0)
    with pytest.raises(InputError, match=r"No cut stays within 0\.5 nats"):
        plan_within(run, None, 0.5, texts=texts, multiple=2)


def test_bounds_are_perplexity_or_nats():
    assert BoundConfig(max_ppl_increase=0.02).nats == pytest.approx(math.log(1.02))
    assert BoundConfig(max_loss_increase=0.02).nats == 0.02
    assert BoundConfig().nats is None
    for wrong in (0.0, -1.0, math.nan, math.inf):
        for name in ("max_loss_increase", "max_ppl_increase"):
            with pytest.raises(InputError, match=f"`{name}` must be more than 0"):
                BoundConfig(**{name: wrong})
