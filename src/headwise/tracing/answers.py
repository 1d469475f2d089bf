"""Which of the answers on offer a model finds likeliest, and what it writes by itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.calibration import TOKENS_AT_ONCE
from headwise.data.skills.question import Ids, Question
from headwise.files.errors import InputError
from headwise.runtime.cache import CacheSpec, PackedCache
from headwise.tracing.forward import forward

PAD = 0  # after the last token that counts: a decoder does not look ahead


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether the right answer was the likeliest, and its nats among those on offer."""

    right: bool
    nats: float


def answer(
    model: PreTrainedModel, source: str, questions: Sequence[Question], progress: Callable[[int, int], None]
) -> list[Answer]:
    """The answers of ``model``. What is read for one question is read once for all whose tokens begin alike."""
    rows = _longest({_read(question, reply) for question in questions for reply in question.answers})
    places: list[list[tuple[int, int]]] = [[] for _ in rows]  # of each row: question and answer
    for number, question in enumerate(questions):
        for place, reply in enumerate(question.answers):
            places[bisect_left(rows, _read(question, reply))].append((number, place))
    logs = [[0.0] * len(question.answers) for question in questions]
    tops = [False] * len(questions)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
    done = 0
    while done < len(order):
        progress(done, len(order))
        batch = order[done : done + max(1, TOKENS_AT_ONCE // len(rows[order[done]]))]
        done += len(batch)
        wanted = sorted({at for row in batch for n, a in places[row] for at in _positions(questions[n], a)})
        logits_BPW = _logits(model, source, [rows[row] for row in batch], wanted)
        for row, logits_PW in zip(batch, logits_BPW, strict=True):
            log_p = logits_PW.float().log_softmax(-1)
            for n, a in places[row]:
                lines = [bisect_left(wanted, at) for at in _positions(questions[n], a)]
                reply = questions[n].answers[a]
                logs[n][a] = log_p[lines, list(reply)].sum().item()
                if len(questions[n].answers) == 1:
                    tops[n] = bool(log_p[lines].argmax(-1).tolist() == list(reply))
    return [_judged(log, top) for log, top in zip(logs, tops, strict=True)]


def write(
    model: PreTrainedModel, codes: CacheSpec | None, prompts: Sequence[Ids], ends: Sequence[int], tokens: int
) -> list[list[int]]:
    """What ``model`` most likely writes after each prompt, up to and with one of ``ends``; through its packed cache."""
    longest = max(map(len, prompts))
    gaps = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[ends[0]] * gap + list(prompt) for gap, prompt in zip(gaps, prompts)], device=model.device)
    mask = (torch.arange(longest)[None] >= torch.tensor(gaps)[:, None]).long().to(model.device)
    with torch.inference_mode(), _as_before(model):
        packed = {} if codes is None else {"past_key_values": PackedCache(model, codes)}
        written = cast(Any, model).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
            **packed,
        )
    replies = written[:, longest:].tolist()
    stops = [next((n + 1 for n, token in enumerate(reply) if token in ends), len(reply)) for reply in replies]
    return [reply[:stop] for reply, stop in zip(replies, stops, strict=True)]


@contextmanager
def _as_before(model: PreTrainedModel) -> Generator[None, None, None]:
    """A packed cache sets the attention that it is read by; afterwards the model has its own again."""
    before = model.config._attn_implementation or "sdpa"
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _read(question: Question, reply: Ids) -> Ids:
    """What a model has read when it comes to the last token of an answer."""
    return (*question.prompt, *reply[:-1])


def _positions(question: Question, place: int) -> range:
    """Where the tokens of an answer are predicted."""
    start = len(question.prompt) - 1
    return range(start, start + len(question.answers[place]))


def _longest(rows: set[Ids]) -> list[Ids]:
    """In order, without those that others begin with."""
    ordered = sorted(rows)
    return [row for row, after in zip(ordered, [*ordered[1:], ()]) if after[: len(row)] != row]


def _logits(model: PreTrainedModel, source: str, rows: Sequence[Ids], wanted: Sequence[int]) -> Tensor:
    """Logits of some positions of each row, (B, P, W)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    kept = torch.tensor(wanted, device=model.device)
    with torch.inference_mode():
        if "logits_to_keep" in signature(type(model).forward).parameters:
            logits = forward(model, {"input_ids": ids, "logits_to_keep": kept}).logits
        else:
            logits = forward(model, {"input_ids": ids}).logits[:, kept]
    if not logits.isfinite().all():
        raise InputError(f"{source} gives outputs that are not finite numbers.")
    return logits


def _judged(logs: list[float], top: bool) -> Answer:
    """Answers as likely as the right one count as wrong: a model that says the same of all knows nothing."""
    if len(logs) == 1:
        return Answer(top, -logs[0])
    right, *others = logs
    return Answer(right > max(others), torch.tensor(logs).logsumexp(0).item() - right)
