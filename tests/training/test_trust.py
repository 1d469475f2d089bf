"""What a resumed training relies on is as it was left, or it is not relied on."""

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from headwise.checkpoints.tensor_files import open_tensors, read_tensors, write_tensors
from headwise.files.errors import InputError
from headwise.training.loop import fit
from headwise.training.processes import NARROW, bf16_suits, join_processes, use_bf16
from headwise.training.work import METRICS, Work
from tests.training.test_loop import SCHEDULE, problem


def edit(path, change=lambda tensors: next(iter(tensors.values())).add_(1)):
    """Change the numbers in a file and leave all that is written about them."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, facts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_sealed_with_their_facts(tmp_path, dtype):
    path, facts = tmp_path / "x.safetensors", {"inputs_hash": "a", "step": "3"}
    tensors = {"x": torch.ones(2, 3, dtype=dtype), "one": torch.tensor(1.0), "none": torch.empty(0, 4)}
    write_tensors(path, tensors, facts)
    read_facts, read = read_tensors(path, "a")
    assert read_facts == facts and all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert read_tensors(path, "b") is None
    edit(path, lambda tensors: tensors["x"].zero_())
    assert read_tensors(path, "a") is None
    with pytest.raises(InputError, match=r"x\.safetensors was changed since headwise wrote it"):
        open_tensors(path)
    write_tensors(path, tensors, facts)
    assert path.read_bytes().count(b'"step\\": \\"3') == 1
    path.write_bytes(path.read_bytes().replace(b'"step\\": \\"3', b'"step\\": \\"4'))
    assert read_tensors(path, "a") is None


def trained(folder, stop=None):
    """Weights and metrics of a run that is interrupted before a step, and the notes of its rerun."""
    model, loss, judge = problem()

    def until(wrapped, part):
        if part == 2 * (stop or -1):
            raise KeyboardInterrupt
        return loss(wrapped, part)

    work = Work(folder, "abcdefgh")
    if stop is None:
        fit(Accelerator(cpu=True), model, SCHEDULE, until, judge, work)
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(Accelerator(cpu=True), model, SCHEDULE, until, judge, work)
    lines = [{name: fact for name, fact in line.items() if name != "tokens_per_second"} for line in work.metrics()]
    return model.weight.detach(), work.best(), lines, work.notes


def rewrite(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


CHANGES = {
    "nothing": lambda folder: None,
    "last checkpoint": lambda folder: edit(max(folder.glob("global-*"))),
    "both checkpoints": lambda folder: [edit(path) for path in folder.glob("global-*")],
    "best weights": lambda folder: edit(next(folder.glob("best-*"))),
    "best weights lost": lambda folder: next(folder.glob("best-*")).unlink(),
    "a loss": lambda folder: rewrite(folder / METRICS, lambda lines: lines[3].update(loss=9.0)),
    "a score": lambda folder: rewrite(
        folder / METRICS, lambda lines: next(line for line in lines if "scores" in line)["scores"].update(error=0.0)
    ),
    "a line lost": lambda folder: rewrite(folder / METRICS, lambda lines: lines.pop(25)),
    "a line torn": lambda folder: (folder / METRICS).write_text((folder / METRICS).read_text()[:-20]),
    "metrics lost": lambda folder: (folder / METRICS).unlink(),
    "metrics of another kind": lambda folder: (folder / METRICS).write_bytes(b"17\n\xff\xfe\n[]\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_changed_in_between_the_end_is_the_same(tmp_path, change):
    weight, best, lines, notes = trained(tmp_path / "whole")
    assert notes == []
    trained(tmp_path / "parts", stop=33)
    CHANGES[change](tmp_path / "parts")
    again, best_again, lines_again, notes = trained(tmp_path / "parts")
    assert torch.equal(again, weight) and lines_again == lines
    assert best_again.step == best.step and torch.equal(best_again.tensors["weight"], best.tensors["weight"])
    assert bool(notes) == (change not in ("nothing", "a line torn")), notes


def test_a_line_that_a_kill_has_torn_does_not_swallow_the_next(tmp_path):
    Work(tmp_path, "a").log(stage="start", step=0, x=1)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"run": "a", "stage": "gl')
    work = Work(tmp_path, "a")
    work.log(stage="global", step=1, x=2)
    assert [line["x"] for line in Work(tmp_path, "a").metrics()] == [1, 2]


def test_precision_is_what_the_machine_is_and_no_stopwatch(monkeypatch):
    accelerator = join_processes()
    assert use_bf16(accelerator, "bf16", 8) and not use_bf16(accelerator, "fp32", 4096)
    for native in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert use_bf16(accelerator, "auto", NARROW) is native
        assert not use_bf16(accelerator, "auto", NARROW - 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not including_emulation)
    assert bf16_suits(torch.device("cuda"), 8)
