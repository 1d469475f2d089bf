"""The whole line: inspect, plan, compress, heal, evaluate; in memory, or in one folder where nothing is done twice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise import __version__
from headwise.checkpoints.card import add_scores
from headwise.checkpoints.load import open_model, open_shape
from headwise.checkpoints.loaded import Loaded
from headwise.checkpoints.profiled import PROFILE, TENSORS, Profile
from headwise.data.texts import read_text
from headwise.families.shapes import shape_of
from headwise.files.contents import contents_of
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.pipelines.ledger import Ledger
from headwise.pipelines.plans import options_of, planned, timed
from headwise.pipelines.profile import PAGE, inspect, inspect_folder
from headwise.records.budget import Budget, natural_budget
from headwise.records.healing import read_curve
from headwise.records.plan import Plan
from headwise.records.running import RunConfig
from headwise.records.scores import Scores
from headwise.records.settings import BudgetConfig, CacheConfig, EvaluateConfig
from headwise.records.shape import ModelShape
from headwise.reduction.plans import slider
from headwise.report.page import write_page
from headwise.report.scores import markdown
from headwise.steps.compress import compress, compress_model
from headwise.steps.evaluate import evaluate, evaluate_folders
from headwise.steps.plan import given_budget, make_plan
from headwise.tracing.placement import as_it_was

DONE, PLAN, MODEL, HEALED, SCORES = "run.json", "plan.json", "model", "healed", "scores.json"
SHARE = 0.75
SAME_INPUTS = "Evaluated on the inputs that were also measured on; others (`eval_inputs`) would say more."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comes of a run; ``healed`` is None where nothing was healed."""

    profile: Profile
    plan: Plan
    model: PreTrainedModel
    healed: PreTrainedModel | None
    scores: Scores


def run(
    model: Any,
    tokenizer: Any = None,
    *,
    keep_kv: float | None = None,
    keep_params: float | None = None,
    keep_attention_params: float | None = None,
    kv_bytes_per_token: int | None = None,
    layers: int | None = None,
    fit: str | None = None,
    keep_decode_time: float | None = None,
    text: Any = None,
    eval_text: Any = None,
    inputs: Any = None,
    eval_inputs: Any = None,
    cache: CacheConfig | None = None,
    config: RunConfig | None = None,
    output: Path | str | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Profile, plan, reduced model and scores of ``model``, which is left as it was; healed if ``config`` says so.

    Without a budget 0.75 is kept of the KV cache, or of the attention parameters where there is no cache. ``text`` is
    measured on and healed on, ``eval_text`` evaluated on (by default headwise's own); for models that do not read text
    ``inputs`` and ``eval_inputs``. See `inspect`, `plan`, `compress`, `heal` and `evaluate`.

    With a folder as ``output`` everything is written there, and what is there already is not done again: then ``model``
    is a folder or Hub id, and text is a `pathlib.Path` or a list of them.

    >>> config = hw.RunConfig(
    ...     inspect=hw.InspectConfig(tokens=256),
    ...     plan=hw.PlanConfig(multiple_of=2),
    ...     evaluate=hw.EvaluateConfig(tokens=256, speed=False),
    ... )
    >>> outcome = hw.run(model, tokenizer, keep_kv=0.5, text=texts, eval_text=texts, config=config)
    >>> [scores.source for scores in outcome.scores.models]
    ['dense', 'reduced']
    """
    config = config or RunConfig()
    _check_given(text, eval_text, inputs, eval_inputs)
    amounts = BudgetConfig(
        keep_kv, keep_params, keep_attention_params, kv_bytes_per_token, layers, fit, keep_decode_time
    )
    given = given_budget(amounts, cache or CacheConfig())
    if output is not None:
        names = (_names(text, "text"), _names(eval_text, "eval_text"))
        return _run_folder(model, Path(output), given, names, (inputs, eval_inputs), config, progress)
    if config.heal:
        import headwise.training  # noqa: F401, PLC0415 - says at once if the extra [train] is missing
    loaded = Loaded.of(model, tokenizer, config.opening)
    budget = _budget(shape_of(loaded.model), given)
    common = {"reading": config.reading, "opening": config.opening, "progress": progress}
    profile = inspect(loaded, text=text, inputs=inputs, config=config.inspect, **common)
    progress(0, 1, "planning")
    plan = planned(profile, timed(budget, profile, loaded, config.opening, progress), config.plan)
    small = compress_model(loaded.model, plan, profile, config.compress, progress=progress)
    own = None if inputs is not None else loaded.tokenizer()
    models: dict[str, Any] = {"dense": loaded, "reduced": (small, own)}
    healed = None
    if config.heal:
        from headwise.steps.heal import heal_model  # noqa: PLC0415 - only this step needs the extra [train]

        healed = heal_model(
            small,
            teacher=loaded.model,
            tokenizer=own,
            text=text,
            inputs=inputs,
            config=config.heal,
            reading=config.reading,
            progress=progress,
        )
        models["healed"] = (healed, own)
    scores = evaluate(
        models,
        text=eval_text,
        inputs=inputs if eval_inputs is None else eval_inputs,
        config=_evaluation(config),
        **common,
    )
    return Outcome(profile, plan, small, healed, _noted(scores, inputs, eval_inputs))


def _run_folder(
    model: Any,
    folder: Path,
    budget: Budget | None,
    texts: tuple[list[str], list[str]],
    inputs: tuple[Any, Any],
    config: RunConfig,
    progress: Progress,
) -> Outcome:
    """`run_folder` with what it wrote opened."""
    if not isinstance(model, str | Path):
        raise InputError("With `output` the model is given as a folder or Hub id: save it first.")
    measured_on, evaluated_on = inputs
    profile, plan, scores = run_folder(
        str(model),
        folder,
        budget,
        texts=texts[0],
        eval_texts=texts[1],
        inputs=None if measured_on is None else Path(measured_on),
        eval_inputs=None if evaluated_on is None else Path(evaluated_on),
        config=config,
        progress=progress,
    )
    healed = open_model(str(folder / HEALED)) if config.heal else None
    return Outcome(profile, plan, open_model(str(folder / MODEL)), healed, scores)


def _names(text: Any, name: str) -> list[str]:
    """The names of files of text."""
    paths = [] if text is None else [text] if isinstance(text, Path) else list(text)
    if not all(isinstance(path, Path) for path in paths):
        raise InputError(f"With `output` what is read must be in files: give `{name}` as a pathlib.Path.")
    return [str(path) for path in paths]


@locking("folder", "run")
def run_folder(
    source: str,
    folder: Path,
    budget: Budget | None = None,
    *,
    texts: Sequence[str] = (),
    eval_texts: Sequence[str] = (),
    inputs: Path | None = None,
    eval_inputs: Path | None = None,
    config: RunConfig | None = None,
    command: str = "",
    progress: Progress = silent,
) -> tuple[Profile, Plan, Scores]:
    """Profile, plan, model, scores and page in ``folder``, from the model at ``source`` and a ``budget``.

    As `run`, with files: ``texts`` and ``eval_texts`` are names of files, ``inputs`` and ``eval_inputs`` folders of
    pictures or .npz files. What is there already and whose inputs have not changed is not done again. The dense model
    is opened once.
    """
    config = config or RunConfig()
    _check_given(texts or None, eval_texts or None, inputs, eval_inputs)
    _check_apart(source, folder)
    budget = _budget(open_shape(source), budget)
    if config.heal:
        import headwise.training  # noqa: F401, PLC0415 - says at once if the extra [train] is missing
    ledger = Ledger(folder, DONE)
    ledger.check((PROFILE, TENSORS, PLAN, MODEL, *([HEALED] if config.heal else []), SCORES, PAGE))
    dense = Loaded.of(source, opening=config.opening)
    reading, opening = config.reading, config.opening
    whole = [__version__, dense.fingerprint(), dense.files()]
    given = [[_text(name) for name in texts], _contents(inputs), reading.text_format]
    judged = [[_text(name) for name in eval_texts], _contents(eval_inputs), asdict(_evaluation(config)), opening.dtype]

    def measure(place: Path) -> None:
        inspect_folder(
            dense,
            place,
            texts=texts,
            inputs=inputs,
            config=config.inspect,
            reading=reading,
            opening=opening,
            progress=progress,
        )

    facts = [whole, given, asdict(config.inspect), opening.dtype]
    measured = ledger.do("profile", (PROFILE, TENSORS), facts, measure)
    profile = Profile.load(folder)

    def decide(place: Path) -> None:
        progress(0, 1, "planning")
        limits = timed(budget, folder, dense, opening, progress)
        make_plan(folder, place / PLAN, limits, **options_of(config.plan))

    decided = ledger.do("plan", (PLAN,), [measured, asdict(budget), asdict(config.plan)], decide)
    plan = Plan.load(folder / PLAN)

    def cut(place: Path) -> None:
        with as_it_was(dense.model):
            compress(
                source,
                folder / PLAN,
                place / MODEL,
                profile=folder,
                config=config.compress,
                opening=replace(opening, dtype="auto"),  # what is saved has the precision of the dense model
                command=command,
                model=dense.model,
                progress=progress,
            )

    models = {MODEL: ledger.do(MODEL, (MODEL,), [whole, measured, decided, asdict(config.compress)], cut)}

    def mend(place: Path) -> None:
        from headwise.steps.heal import heal  # noqa: PLC0415 - only this step needs the extra [train]

        with as_it_was(dense.model):
            heal(
                str(folder / MODEL),
                source,
                place / HEALED,
                texts=texts,
                inputs=inputs,
                config=config.heal,
                reading=reading,
                opening=opening,
                command=command,
                teacher=dense.model,
                progress=progress,
            )

    if config.heal:
        models[HEALED] = ledger.do(HEALED, (HEALED,), [whole, models[MODEL], given, config.heal.facts()], mend)

    def judge(place: Path) -> None:
        scores = evaluate_folders(
            [dense, *(str(folder / name) for name in models)],
            texts=eval_texts,
            inputs=eval_inputs or inputs,
            config=_evaluation(config),
            reading=reading,
            opening=opening,
            progress=progress,
        )
        _noted(scores, inputs, eval_inputs).save(place / SCORES)

    scored = ledger.do("scores", (SCORES,), [whole, models, given[1:], judged], judge)
    scores = Scores.load(folder / SCORES)
    for name in models:
        add_scores(folder / name, markdown(scores))

    def show(place: Path) -> None:
        curve = read_curve(folder / HEALED) if config.heal else []
        write_page(profile, place / PAGE, slider(profile), scores, plan, curve)

    ledger.do("page", (PAGE,), [measured, decided, models, scored], show)
    ledger.close()
    return profile, plan, scores


def _check_given(text: Any, eval_text: Any, inputs: Any, eval_inputs: Any) -> None:
    if (text is not None or eval_text is not None) and (inputs is not None or eval_inputs is not None):
        raise InputError("Give text or inputs, not both.")


def _check_apart(source: str, folder: Path) -> None:
    own = Path(source).expanduser().resolve()
    if own == folder.resolve():
        raise InputError(f"{folder} is the model's own folder; give another one as `output`.")
    if own in ((folder / name).resolve() for name in (MODEL, HEALED)):
        raise InputError(f"{source} is what a run made in {folder}; give another folder as `output`.")


def _budget(shape: ModelShape, given: Budget | None) -> Budget:
    """The budget that is given, or the natural one; raises where the model has nothing of what it limits."""
    budget = given or Budget(natural_budget(shape), SHARE)
    budget.check(shape)
    return budget


def _evaluation(config: RunConfig) -> EvaluateConfig:
    """How models are evaluated: where nobody says otherwise in windows as long as those measured on."""
    return replace(config.evaluate, context=config.evaluate.context or config.inspect.context)


def _noted(scores: Scores, inputs: Any, eval_inputs: Any) -> Scores:
    """``scores`` with a warning where they are of the inputs that were measured on."""
    same = inputs is not None and eval_inputs is None
    return replace(scores, notes=(*scores.notes, SAME_INPUTS)) if same else scores


def _text(name: str) -> str:
    return hashlib.sha256(read_text(name).encode()).hexdigest()


def _contents(path: Path | None) -> dict[str, str]:
    contents = {} if path is None else contents_of(path.expanduser())
    if path is not None and not contents:
        raise InputError(f"There is nothing at {path} to read inputs from.")
    return contents
