"""What a model can do of small generated exercises, and how that differs from the first model in the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from headwise.data.skills import Exercises, exercises
from headwise.data.skills.chat import turn_end
from headwise.data.texts import Text
from headwise.files.errors import InputError
from headwise.files.progress import Progress
from headwise.records.skills import Difference, SkillScores
from headwise.steps.evaluate.candidates import Candidate
from headwise.steps.evaluate.measures import Ready
from headwise.tracing.answers import answer, write
from headwise.tracing.rounding import rounding
from headwise.tracing.scoring import predicts_next

REPLY = 32  # tokens a model may write: the forms asked for take fewer
ENDS, FORM = "chat, ends its turn", "chat, keeps the form"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a trial: of which skill and parts of it, whether it was right, and nats and chance if scored."""

    skill: str
    parts: tuple[tuple[str, str], ...]
    trial: int
    right: bool
    nats: float | None = None
    offered: int | None = None


@dataclass(frozen=True, slots=True)
class Practice:
    """What a model was asked, and its decisions, in order."""

    asked: Exercises
    decisions: tuple[Decision, ...]


class Examination:
    """The exercises that one model after the other is given, all compared with the first."""

    def __init__(self, lengths: tuple[int, ...], longest: int, seed: int) -> None:
        self.lengths, self.longest, self.seed = lengths, longest, seed
        self._first: Practice | None = None

    def of(
        self, ready: Ready, tokenizer: Any, prose: Text, progress: Progress
    ) -> tuple[tuple[SkillScores, ...], list[str]]:
        """The scores of a model in all skills, whole and by part; and notes. Needles are hidden in ``prose``."""
        asked = exercises(tokenizer, prose, self.lengths, self.longest, self.seed)
        own, first = practise(ready, tokenizer, asked, progress), self._first
        if first is None:
            self._first = own
        same = first is not None and own.asked.questions == first.asked.questions
        before = _groups(first.decisions) if first is not None and same else {}
        notes = list(asked.notes)
        if first is not None and not same:
            notes.append(f"{ready.name} is asked in tokens of its own: its skills are not compared.")
        return tuple(_scored(key, some, before.get(key)) for key, some in _groups(own.decisions).items()), notes


def check_writes(candidate: Candidate) -> None:
    """Raise where a model writes no text."""
    kind = candidate.kind()
    if not kind.can_generate() or kind.main_input_name != "input_ids":
        raise _silent(candidate.name, kind)


def practise(ready: Ready, tokenizer: Any, asked: Exercises, progress: Progress) -> Practice:
    """The decisions of a model in all exercises; a rounded cache is read through its rounding."""
    if not predicts_next(ready.model):
        raise _silent(ready.name, type(ready.model))
    with rounding(ready.model, ready.codes):
        answers = answer(
            ready.model, ready.name, asked.questions, lambda done, total: progress(done, total, "skills: answers")
        )
    decisions = [
        Decision(
            question.skill,
            tuple(question.parts.items()),
            question.trial,
            given.right,
            given.nats,
            len(question.answers) if len(question.answers) > 1 else None,
        )
        for question, given in zip(asked.questions, answers, strict=True)
    ]
    ends = _ends(ready, tokenizer)
    prompts = [request.prompt for request in asked.requests]
    if ends and prompts and max(map(len, prompts)) + REPLY <= ready.shape.max_tokens:
        progress(0, 1, "skills: chat")
        replies = write(ready.model, ready.codes, prompts, ends, REPLY)
        for trial, (request, reply) in enumerate(zip(asked.requests, replies, strict=True)):
            said = tokenizer.decode([token for token in reply if token not in ends], skip_special_tokens=True).strip()
            decisions.append(Decision(ENDS, (), trial, reply[-1] in ends))
            decisions.append(Decision(FORM, (), trial, request.keeps(said)))
    return Practice(asked, tuple(decisions))


def _silent(name: str, kind: type[PreTrainedModel]) -> InputError:
    return InputError(f"Skills and tasks are for models that write text (...ForCausalLM); {name} is a {kind.__name__}.")


def _ends(ready: Ready, tokenizer: Any) -> list[int]:
    """The tokens that end a model's turn: as its configuration, its tokenizer and the chat template say."""
    config = getattr(ready.model.generation_config, "eos_token_id", None)
    ends = [*(config if isinstance(config, list) else [config]), tokenizer.eos_token_id]
    ends += [turn_end(tokenizer)] if tokenizer.chat_template else []
    return list(dict.fromkeys(token for token in ends if token is not None))


Key = tuple[str, str, str]  # skill, axis, part of it
Trials = dict[int, list[Decision]]


def _groups(decisions: Sequence[Decision]) -> dict[Key, Trials]:
    """Decisions by trial, for each skill, each part of it on one axis, and each pair of parts."""
    groups: dict[Key, Trials] = defaultdict(lambda: defaultdict(list))
    numbers: dict[tuple[str, str, int], int] = {}
    for decision in decisions:
        length = dict(decision.parts).get("length", "")
        trial = numbers.setdefault((decision.skill, length, decision.trial), len(numbers))
        keys = [("", ""), *decision.parts]
        if len(decision.parts) > 1:
            keys.append(
                (" and ".join(name for name, _ in decision.parts), ", ".join(part for _, part in decision.parts))
            )
        for axis, part in keys:
            groups[decision.skill, axis, part][trial].append(decision)
    skills, axes = (list(dict.fromkeys(key[place] for key in groups)) for place in (0, 1))
    return {key: groups[key] for key in sorted(groups, key=lambda key: (skills.index(key[0]), axes.index(key[1])))}


def _scored(key: Key, trials: Trials, before: Trials | None) -> SkillScores:
    decisions = [decision for some in trials.values() for decision in some]
    offered = decisions[0].offered
    nats = None if decisions[0].nats is None else _nats(trials)
    return SkillScores(
        *key,
        trials=len(trials),
        decisions=len(decisions),
        right=fmean(_rights(trials)),
        chance=None if offered is None else 1 / offered,
        nats=None if nats is None else fmean(nats),
        right_difference=None
        if before is None
        else Difference.of_shares(_rights(before), _rights(trials), len(decisions) / len(trials)),
        nats_difference=None if before is None or nats is None else Difference.of_nats(_nats(before), nats),
    )


def _rights(trials: Trials) -> list[float]:
    return [fmean(decision.right for decision in some) for some in trials.values()]


def _nats(trials: Trials) -> list[float]:
    return [fmean(decision.nats or 0.0 for decision in some) for some in trials.values()]
