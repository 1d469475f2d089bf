"""Training from scratch: a plan of `headwise design` and data in, a model out, in memory or in a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedModel

from headwise.checkpoints.origin import Origin, remember
from headwise.checkpoints.save import write_model
from headwise.data.processors import open_tokenizer
from headwise.data.sources import called, data_of
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_free
from headwise.records.plan import Plan
from headwise.records.settings import TrainConfig
from headwise.steps.train.examples import Examples
from headwise.steps.train.finished import NAME as FINISHED
from headwise.steps.train.finished import asked_for, finished, noted
from headwise.steps.train.fitting import Task, check_plan, fit_plan, read_examples, run_hash, settled
from headwise.training.fresh import fresh_model
from headwise.training.loop import put_weights
from headwise.training.processes import first_then_all, join_processes, shared_folder, use_bf16
from headwise.training.work import Work

if TYPE_CHECKING:
    from accelerate import Accelerator

CURVE = "training.jsonl"  # beside a trained model: its metrics, line by line
GIVEN = "tokenizer-given"  # folder of a tokenizer that is in memory


def train_model(
    plan: Plan, *, data: Any, tokenizer: Any = None, config: TrainConfig | None = None, progress: Progress = silent
) -> PreTrainedModel:
    """A model of the shape that ``plan`` has a blueprint of (see `hw.design`), trained on ``data``, at its best.

    ``data`` is a text, a list of texts, files (`pathlib.Path`; .npz for pictures) or a `datasets.Dataset` with a column
    "text"; the end of it is held out and only measured on. ``tokenizer`` is one in memory or its folder; without it one
    is learnt from the text, and `hw.save` saves it along.

    >>> plan = hw.design(params=100_000, vocab=300, context=16).choose().plan
    >>> model = hw.train(plan, data=text, config=hw.TrainConfig(tokens=512, evaluations=1))
    >>> hw.plan_of(model) == plan
    True
    """
    config, data = config or TrainConfig(), data_of(data)
    check_plan(plan)
    accelerator = join_processes()
    with shared_folder(accelerator) as folder:

        def read() -> Examples:
            place = put_tokenizer(tokenizer, folder)
            return read_examples(plan, data, place, config, folder, progress)

        examples = first_then_all(accelerator, read)
        trained = _fit(plan, examples, config, accelerator, folder, called(data, whole=False), progress, True)
        words = None if not examples.tokenizer else open_tokenizer(examples.tokenizer)
    assert trained is not None  # every process reads the best weights
    words = words if tokenizer is None or isinstance(tokenizer, str | Path) else tokenizer
    return remember(trained.model, Origin(plan, "", {"trained": trained.facts}, trained.files, words))


@locking("output")
def train(
    plan_file: Path,
    data: Sequence[Path],
    output: Path,
    *,
    tokenizer: str | None = None,
    config: TrainConfig | None = None,
    track: str | None = None,
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a model of the plan's shape on files and write it to ``output`` at its best.

    Under ``torchrun`` all processes share each step, and all but the first return nothing. A rerun continues from the
    last checkpoint, which lies beside ``output`` until all is done, and one of a finished training shows its result.
    ``trust_remote_code`` lets ``tokenizer`` run code of its own.
    """
    plan, config = Plan.load(plan_file), config or TrainConfig()
    asked = asked_for(plan, data, tokenizer, config)
    done = finished(output, asked)
    if done is None:
        check_free(output)
    check_plan(plan)
    folder = output.with_name(f"{output.name}.training")
    accelerator = join_processes(track, output.with_name(f"{output.name}.logs"))
    if done is not None:
        return done if accelerator.is_main_process else {}
    trusted = {"trust_remote_code": trust_remote_code}
    examples = first_then_all(
        accelerator, lambda: read_examples(plan, data, tokenizer, config, folder, progress, **trusted)
    )
    name = called(data, whole=False)
    trained = _fit(plan, examples, config, accelerator, folder, name, progress, False, track, trust_remote_code)
    if trained is None:
        return {}
    files = {**trained.files, FINISHED: noted(asked, trained.facts)}
    origin = Origin(plan, examples.tokenizer, {"trained": trained.facts}, files)
    report = write_model(trained.model, output, origin, command=command)
    shutil.rmtree(folder, ignore_errors=True)
    return {**report, **trained.facts, "notes": [*report["notes"], *trained.notes]}


def put_tokenizer(tokenizer: Any, folder: Path) -> str | None:
    """The folder or Hub id of ``tokenizer``; one that is in memory is saved below ``folder``."""
    if tokenizer is None or isinstance(tokenizer, str | Path):
        return None if tokenizer is None else str(tokenizer)
    place = folder / GIVEN
    if not place.exists():
        tokenizer.save_pretrained(place)
    return str(place)


@dataclass(frozen=True, slots=True)
class _Trained:
    """A trained model, what its card says of that, texts to lay beside it, and what a person should know."""

    model: PreTrainedModel
    facts: dict[str, Any]
    files: dict[str, str]
    notes: list[str]


def _fit(
    plan: Plan,
    examples: Examples,
    config: TrainConfig,
    accelerator: Accelerator,
    folder: Path,
    data: str,
    progress: Progress,
    everywhere: bool,
    track: str | None = None,
    trust_remote_code: bool = False,
) -> _Trained | None:
    """A model of ``plan`` that has learnt ``examples``, in the first process or ``everywhere``."""
    config = settled(config, plan, examples)
    half = use_bf16(accelerator, config.precision, plan.width)
    config = replace(config, precision="bf16" if half else "fp32")
    work = Work(folder, run_hash(plan, examples.sha256, config, accelerator.num_processes))
    if track is not None:
        accelerator.init_trackers("headwise-train", config=config.facts())
    task = Task(examples, config, half, accelerator.num_processes, accelerator.process_index)
    fit_plan(accelerator, plan, task, work, progress)
    best = work.best() if everywhere or accelerator.is_main_process else None
    if everywhere:
        accelerator.wait_for_everyone()  # all have read before one removes
    accelerator.end_training()
    if best is None:
        return None
    model = fresh_model(plan)  # a whole one: what was trained may be split over processes
    put_weights(model, best.tensors)
    if examples.tokenizer:
        end = open_tokenizer(examples.tokenizer, trust_remote_code=trust_remote_code).eos_token_id
        model.config.update({"bos_token_id": end, "eos_token_id": end})
        cast(Any, model.generation_config).update(bos_token_id=end, eos_token_id=end)
    lines = work.metrics()
    scores = next(line["scores"] for line in lines if "scores" in line and line["step"] == best.step)
    facts = {**config.facts(), "data": data, "tokens": lines[-1]["tokens"], "best": best.step, "scores": scores}
    files = {CURVE: "".join(json.dumps(line) + "\n" for line in lines)}
    return _Trained(model, facts, files, work.notes)
