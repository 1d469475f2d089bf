"""A model's scores on tasks of lm-evaluation-harness, in this process, through its packed cache if it has one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from headwise.files.errors import InputError
from headwise.records.skills import TaskScores
from headwise.runtime.cache import PackedCache
from headwise.steps.evaluate.measures import Ready
from headwise.tracing.rounding import rounding

BATCH = 4
NO_METRICS = ("alias", "sample_len", "sample_count", "name")


def read_tasks(tasks: str) -> list[str]:
    """The names (or .yaml files) of tasks, checked: lm-evaluation-harness is there and knows them."""
    if find_spec("lm_eval") is None:
        raise InputError('Tasks are those of lm-evaluation-harness: pip install "headwise[eval]".')
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 - slow, and not always there

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InputError("`tasks` names no task of lm-evaluation-harness.")
    known = TaskManager()
    for name in names:
        if not name.endswith(".yaml") and not known.match_tasks([name]):
            raise InputError(f"lm-evaluation-harness knows no task {name!r}: `lm_eval ls tasks` lists them.")
    return names


def task_scores(ready: Ready, tokenizer: Any, tasks: list[str], limit: int | None) -> tuple[TaskScores, ...]:
    """Every metric of every task, on the first ``limit`` examples of each (None: on all)."""
    from lm_eval.evaluator import simple_evaluate  # noqa: PLC0415
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    try:
        results = simple_evaluate(
            model=_harness(ready, tokenizer),
            tasks=tasks,  # pyrefly: ignore[bad-argument-type]
            task_manager=TaskManager(),
            limit=limit,
            log_samples=False,
            bootstrap_iters=0,
        )
    except (OSError, ValueError, KeyError) as error:  # data that cannot be fetched, or a task that is not one
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"The tasks {', '.join(tasks)} could not be run: {reason}") from error
    assert results is not None, "this process is the only one"
    return tuple(score for task, values in results["results"].items() for score in _metrics(task, values))


def _metrics(task: str, values: dict[str, Any]) -> list[TaskScores]:
    """Metrics are named ``acc,none``, their standard errors ``acc_stderr,none``."""
    scores = []
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if metric in NO_METRICS or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered in ("", "none") else f"{metric}, {filtered}"
        scores.append(TaskScores(task, name, float(value), float(error) if isinstance(error, int | float) else None))
    return scores


def _harness(ready: Ready, tokenizer: Any) -> Any:
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    class Harness(HFLM):
        """The model as lm-evaluation-harness runs it, with its keys and values rounded as its cache rounds them."""

        def _model_call(self, *args: Any, **kwargs: Any) -> Any:
            with rounding(ready.model, ready.codes):
                return super()._model_call(*args, **kwargs)

        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            if ready.codes is None:
                return super()._model_generate(*args, **kwargs)
            before = ready.model.config._attn_implementation or "sdpa"
            try:
                return super()._model_generate(*args, past_key_values=PackedCache(ready.model, ready.codes), **kwargs)
            finally:
                ready.model.set_attn_implementation(before)

    longest = ready.shape.max_tokens
    return Harness(pretrained=ready.model, tokenizer=tokenizer, batch_size=BATCH, max_length=longest)
