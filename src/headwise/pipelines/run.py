"""The whole line in one folder: inspect, plan, compress, heal, evaluate. What has not changed is not done again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headwise import __version__
from headwise.checkpoints.fingerprint import files_fingerprint, fingerprint
from headwise.checkpoints.load import open_model, open_shape
from headwise.checkpoints.save import add_scores
from headwise.data.texts import read_text
from headwise.files.contents import contents_of
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.pipelines.ledger import Ledger
from headwise.records.budget import Budget, natural_budget
from headwise.records.healing import HealConfig, read_curve
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.scores import Scores
from headwise.records.settings import TextFormat
from headwise.reduction.plans import slider
from headwise.report.page import write_page
from headwise.report.scores import markdown
from headwise.steps.compress import compress
from headwise.steps.evaluate import evaluate
from headwise.steps.inspect import PAGE, PROFILE, TENSORS, inspect
from headwise.steps.plan import make_plan

DONE, PLAN, MODEL, HEALED, SCORES = "run.json", "plan.json", "model", "healed", "scores.json"
SHARE = 0.75
SAME_INPUTS = "Evaluated on the inputs that were also measured on; others (--eval-inputs) would say more."


@locking("folder")
def run(
    source: str,
    folder: Path,
    budget: Budget | None = None,
    *,
    texts: Sequence[str] = (),
    eval_texts: Sequence[str] = (),
    inputs: Path | None = None,
    eval_inputs: Path | None = None,
    tokens: int = 8192,
    eval_tokens: int = 20480,
    healing: HealConfig | None = None,
    context: int | None = None,
    text_format: TextFormat = "auto",
    accept_text: bool = False,
    lengths: tuple[int, ...] | None = None,
    speed: bool = True,
    multiple: int = 8,
    seed: int = 0,
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> tuple[Profile, Plan, Scores]:
    """Profile, plan, model, scores and page in ``folder``, from the model at ``source`` and a ``budget``.

    Without a budget 0.75 is kept of the KV cache, or of the attention parameters where there is no cache. ``texts`` are
    measured on and healed on, ``eval_texts`` evaluated on (none: the text that comes with headwise); ``inputs`` and
    ``eval_inputs`` are pictures or arrays for models that do not read text. With ``healing`` the model is healed so,
    and the healed one is evaluated beside it. ``context``: tokens of the windows to measure
    and evaluate on, by default as long as the model is used, up to 4,096. ``trust_remote_code`` lets a tokenizer or
    image processor run code of its own.
    """
    if (*texts, *eval_texts) and (inputs or eval_inputs):
        raise InputError("Give text or inputs, not both.")
    _check_apart(source, folder)
    budget = _budget(source, budget)
    if healing:
        import headwise.training  # noqa: F401, PLC0415 - says at once if the extra [train] is missing
    ledger = Ledger(folder, DONE)
    ledger.check((PROFILE, TENSORS, PLAN, MODEL, *([HEALED] if healing else []), SCORES, PAGE))
    whole = [__version__, fingerprint(open_model(source)), files_fingerprint(source)]
    given = [[_text(name) for name in texts], _contents(inputs), text_format, context]
    reading = {"text_format": text_format, "accept_text": accept_text, "trust_remote_code": trust_remote_code}
    asked = [[_text(name) for name in eval_texts], _contents(eval_inputs), eval_tokens, speed]

    def measure(place: Path) -> None:
        options = {"tokens": tokens, "context": context, "lengths": lengths, "seed": seed, **reading}
        inspect(source, place, texts=texts, inputs=inputs, progress=progress, **options)

    measured = ledger.do("profile", (PROFILE, TENSORS), [whole, given, tokens, lengths, seed], measure)
    profile = Profile.load(folder / PROFILE)

    def decide(place: Path) -> None:
        progress(0, 1, "planning")
        make_plan(folder, place / PLAN, budget, multiple=multiple)

    planned = ledger.do("plan", (PLAN,), [measured, asdict(budget), multiple], decide)
    plan = Plan.load(folder / PLAN)

    def cut(place: Path) -> None:
        compress(source, folder / PLAN, place / MODEL, command=command, profile=folder, progress=progress)

    made = {MODEL: ledger.do(MODEL, (MODEL,), [whole, measured, planned], cut)}

    def mend(place: Path) -> None:
        from headwise.steps.heal import heal  # noqa: PLC0415 - only this step needs the extra [train]

        options = {"config": healing, "command": command, "progress": progress, **reading}
        heal(str(folder / MODEL), source, place / HEALED, texts=texts, inputs=inputs, **options)

    if healing:
        made[HEALED] = ledger.do(HEALED, (HEALED,), [whole, made[MODEL], given, healing.facts()], mend)

    def judge(place: Path) -> None:
        sources = [source, *(str(folder / name) for name in made)]
        options = {"tokens": eval_tokens, "context": context, "speed": speed, "progress": progress, **reading}
        found = evaluate(sources, texts=eval_texts, inputs=eval_inputs or inputs, **options)
        notes = (SAME_INPUTS,) if inputs and not eval_inputs else ()
        replace(found, notes=(*found.notes, *notes)).save(place / SCORES)

    scored = ledger.do("scores", (SCORES,), [whole, made, given[1:], asked], judge)
    scores = Scores.load(folder / SCORES)
    for name in made:
        add_scores(folder / name, markdown(scores))

    def show(place: Path) -> None:
        write_page(profile, place / PAGE, slider(profile), scores, plan, read_curve(folder / HEALED) if healing else [])

    ledger.do("page", (PAGE,), [measured, planned, made, scored], show)
    ledger.close()
    return profile, plan, scores


def _check_apart(source: str, folder: Path) -> None:
    own = Path(source).expanduser().resolve()
    if own == folder.resolve():
        raise InputError(f"{folder} is the model's own folder; give another one with -o.")
    if own in ((folder / name).resolve() for name in (MODEL, HEALED)):
        raise InputError(f"{source} is what a run made in {folder}; give another folder with -o.")


def _budget(source: str, asked: Budget | None) -> Budget:
    """The budget that is asked for, or the natural one; raises where the model has nothing of what it limits."""
    shape = open_shape(source)
    budget = asked or Budget(natural_budget(shape), SHARE)
    budget.limit(shape)
    return budget


def _text(name: str) -> str:
    return hashlib.sha256(read_text(name).encode()).hexdigest()


def _contents(path: Path | None) -> dict[str, str]:
    found = {} if path is None else contents_of(path.expanduser())
    if path is not None and not found:
        raise InputError(f"There is nothing at {path} to read inputs from.")
    return found
