"""The loop: schedules, checkpoints that go on exactly, and weights split over processes."""

import json
import math
import textwrap
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from headwise.files.errors import Failed
from headwise.training.loop import Schedule, fit, optimizer_of, put_weights, trainable_parameters, trained_weights
from headwise.training.work import METRICS, Work
from tests.commands import python, together


def test_the_learning_rate_warms_up_and_cools_down():
    schedule = Schedule(steps=100, rate=2.0, every=10, tokens=1)
    rates = [schedule.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.4) and rates[4] == rates[5] == 2.0
    assert rates[5:] == sorted(rates[5:], reverse=True) and 0 < rates[-1] < 0.01


def problem():
    """A linear map to learn, and what judges it."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(64, 4)
    y = x @ torch.randn(4, 3)
    model.bias.requires_grad_(False)

    def loss(wrapped, part):
        rows = torch.arange(8 * part, 8 * part + 8) % 64
        return (wrapped(x[rows]) - y[rows]).square().mean()

    def judge(wrapped):
        with torch.no_grad():
            return {"error": (wrapped(x) - y).square().mean().item()}

    return model, loss, judge


SCHEDULE = Schedule(steps=40, rate=0.1, every=10, tokens=8, accumulate=2)


def test_it_learns_keeps_the_best_and_leaves_the_rest_alone(tmp_path):
    model, loss, judge = problem()
    bias, before = model.bias.clone(), judge(model)["error"]
    work = Work(tmp_path, "a")
    fit(Accelerator(cpu=True), model, SCHEDULE, loss, judge, work)
    best = work.best()
    assert best is not None and best.score < 0.1 * before and list(best.tensors) == ["weight"]
    assert torch.equal(model.bias, bias)
    assert sorted(path.name for path in tmp_path.glob("global-*")) == [
        "global-a-00000030.safetensors",
        "global-a-00000040.safetensors",
    ]
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert [line["step"] for line in lines if "scores" in line] == [10, 20, 30, 40]


def test_an_interrupted_run_goes_on_exactly(tmp_path):
    ends = []
    for name, stops in (("whole", ()), ("parts", (17, 31))):
        for stop in (*stops, None):
            model, loss, judge = problem()

            def until(wrapped, part, loss=loss, stop=stop):
                if stop is not None and part == 2 * stop:
                    raise KeyboardInterrupt
                return loss(wrapped, part)

            work = Work(tmp_path / name, "a")
            if stop is None:
                fit(Accelerator(cpu=True), model, SCHEDULE, loss, judge, work)
            else:
                with pytest.raises(KeyboardInterrupt):
                    fit(Accelerator(cpu=True), model, SCHEDULE, until, judge, work)
        ends.append((model.weight, [line for line in work.metrics() if "loss" in line]))
    assert torch.equal(ends[0][0], ends[1][0])
    losses = [[line["loss"] for line in lines] for _, lines in ends]
    assert losses[0] == losses[1]


def test_a_damaged_checkpoint_and_those_of_another_run_are_passed_over(tmp_path):
    work = Work(tmp_path, "a")
    for step in (1, 2, 3):
        work.save("global", step, {"x": torch.full((2,), float(step))})
    (tmp_path / "global-a-00000003.safetensors").write_bytes(b"half")
    assert work.load("global")[0] == 2
    other = Work(tmp_path, "b")
    assert other.load("global") == (0, {})
    other.save("global", 1, {"x": torch.zeros(2)})
    assert other.load("global")[0] == 1 and work.load("global")[0] == 2  # neither forgets the other's
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"run": "a", "stage": "global", "st')
    assert work.metrics() == []


def test_two_runs_in_one_folder_keep_their_best_weights_and_metrics(tmp_path):
    first, second = Work(tmp_path, "a"), Work(tmp_path, "b")
    for work, score in ((first, 1.0), (second, 2.0)):
        work.forget_after("global", 0)
        work.log(stage="global", step=1, loss=score)
        work.offer("global", 1, score, {"x": torch.full((2,), score)})
    second.forget_after("global", 0)
    assert (first.best().score, second.best().score) == (1.0, 2.0)
    assert first.metrics() == [{"stage": "global", "step": 1, "loss": 1.0}]
    assert second.metrics() == []


def test_metrics_are_taken_back_whole_or_not_at_all(tmp_path, monkeypatch):
    work = Work(tmp_path, "a")
    for step in range(1, 6):
        work.log(stage="global", step=step, loss=1.0)
    monkeypatch.setattr(Path, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        work.forget_after("global", 3)
    assert len(work.metrics()) == 5
    monkeypatch.undo()
    work.forget_after("global", 3)
    assert [line["step"] for line in work.metrics()] == [1, 2, 3]


def test_held_out_scores_that_are_no_numbers_stop_it(tmp_path):
    model, loss, _ = problem()
    with pytest.raises(Failed, match=r"The held-out error is not a number at step 10\. A lower learning rate"):
        fit(Accelerator(cpu=True), model, SCHEDULE, loss, lambda wrapped: {"error": math.nan}, Work(tmp_path, "a"))


def test_weights_split_over_processes_are_saved_whole_and_come_back(tmp_path):
    script = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from headwise.training.loop import put_weights, trained_weights

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    whole = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    weights = trained_weights(model)
    if dist.get_rank() == 0:
        assert all(torch.equal(weights[name], whole[name]) for name in whole), weights
    put_weights(model, {name: tensor + 1 for name, tensor in whole.items()})
    weights = trained_weights(model)
    if dist.get_rank() == 0:
        assert all(torch.equal(weights[name], whole[name] + 1) for name in whole)
        print("the same")
    dist.destroy_process_group()
    """
    first, second = together(2, lambda env: python(textwrap.dedent(script), cwd=tmp_path, env=env))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "the same" in first.stdout


def test_tied_weights_are_kept_once_and_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    kept = trained_weights(model)
    assert list(kept) == ["0.weight", "1.weight", "1.bias"]
    put_weights(model, {name: tensor + 1 for name, tensor in kept.items()})
    assert model[2].weight is model[0].weight
    adam = optimizer_of(trainable_parameters(model), (), decay=0.1)
    decays = {parameter.ndim: group["weight_decay"] for group in adam.param_groups for parameter in group["params"]}
    assert decays == {2: 0.1, 1: 0.0}
