"""The whole line in one folder: inspect, plan, compress, heal, evaluate. What has not changed is not done again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.families.save import add_scores
from headwise.records.budget import Budget
from headwise.records.errors import InputError
from headwise.records.files import check_free, read_json, write_record
from headwise.records.healing import Healing, read_curve
from headwise.records.locks import locking
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.scores import Scores
from headwise.report.page import write_page
from headwise.report.scores import markdown
from headwise.steps.compress import compress
from headwise.steps.evaluate import evaluate
from headwise.steps.inspect import PAGE, inspect
from headwise.steps.plan import make_plan

DONE, PLAN, MODEL, HEALED, SCORES = "run.json", "plan.json", "model", "healed", "scores.json"
Progress = Callable[[int, int, str], None]


@locking("folder")
def run(
    source: str,
    folder: Path,
    budget: Budget,
    *,
    texts: Sequence[str] = (),
    eval_texts: Sequence[str] = (),
    tokens: int = 8192,
    eval_tokens: int = 20480,
    heal_tokens: int = 0,
    lengths: tuple[int, ...] | None = None,
    speed: bool = True,
    multiple: int = 8,
    seed: int = 0,
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> tuple[Profile, Plan, Scores]:
    """Profile, plan, model, scores and page in ``folder``, from the model at ``source`` and a ``budget``.

    ``texts`` are measured on and healed on, ``eval_texts`` evaluated on (none: the text that comes with headwise).
    With ``heal_tokens`` the model is healed on so many, and the healed one is evaluated beside it.
    ``trust_remote_code`` lets its tokenizer run code of its own.
    """
    done, common = _Done(folder / DONE), {"trust_remote_code": trust_remote_code, "progress": progress}
    profile = inspect(source, folder, texts=texts, tokens=tokens, lengths=lengths, seed=seed, **common)
    asked = _hash(profile.inputs_hash, asdict(budget), multiple)
    if not done.holds(PLAN, asked, folder / PLAN):
        progress(0, 1, "planning")
        make_plan(folder, folder / PLAN, budget, multiple=multiple)
        done.note(PLAN, asked)
    plan = Plan.load(folder / PLAN)
    cut = _hash(asked, asdict(replace(plan, profile="")))
    if not done.holds(MODEL, cut, folder / MODEL):
        if done.made(MODEL):
            shutil.rmtree(folder / MODEL, ignore_errors=True)
        check_free(folder / MODEL)
        done.note(MODEL, cut)  # before it is made, which takes effect at once: a kill leaves nothing unnoted
        compress(source, folder / PLAN, folder / MODEL, command=command, profile=folder, progress=progress)
    made, curve = [MODEL], []
    if heal_tokens:
        how = Healing(tokens=heal_tokens, seed=seed)
        mended = _hash(cut, how.facts())
        if not done.holds(HEALED, mended, folder / HEALED):
            if done.made(HEALED):
                shutil.rmtree(folder / HEALED, ignore_errors=True)
            check_free(folder / HEALED)
            done.note(HEALED, mended)
            from headwise.steps.heal import heal  # noqa: PLC0415 - only this step needs the extra [train]

            heal(str(folder / MODEL), source, folder / HEALED, texts=texts, how=how, command=command, **common)
        made, cut, curve = [MODEL, HEALED], mended, read_curve(folder / HEALED)
    judged = _hash(cut, [_content(text) for text in eval_texts], eval_tokens, speed)
    if not done.holds(SCORES, judged, folder / SCORES):
        sources = [source, *(str(folder / name) for name in made)]
        found = evaluate(sources, texts=eval_texts, tokens=eval_tokens, speed=speed, output=folder / SCORES, **common)
        for name in made:
            add_scores(folder / name, markdown(found))
        write_page(profile, folder / PAGE, found, plan, curve)
        done.note(SCORES, judged)
    return profile, plan, Scores.load(folder / SCORES)


class _Done:
    """Which results of a run folder were made, and a hash of what each was made from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_json(path) if path.exists() else {}
        if content and content.get("headwise") != "run":
            raise InputError(f"{path} is not what headwise run writes; give another folder with -o.")
        self.steps: dict[str, Any] = dict(content.get("steps", {}))

    def made(self, step: str) -> bool:
        """Whether this run folder has made the result of ``step`` itself."""
        return step in self.steps

    def holds(self, step: str, inputs: str, result: Path) -> bool:
        """Whether ``result`` is there and was made from ``inputs``."""
        return self.steps.get(step) == inputs and result.exists()

    def note(self, step: str, inputs: str) -> None:
        """Remember that the result of ``step`` was made from ``inputs``."""
        self.steps[step] = inputs
        write_record(self.path, "run", 1, {"steps": self.steps})


def _hash(*facts: Any) -> str:
    return hashlib.sha256(json.dumps([__version__, *facts], sort_keys=True).encode()).hexdigest()


def _content(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).expanduser().read_bytes()).hexdigest()
    except OSError:
        return name  # evaluate says what is wrong with it
