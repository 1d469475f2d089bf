"""Likelihoods of answers against direct computation, one question at a time."""

import pytest
import torch

from headwise.data.skills.question import Question
from headwise.tracing.answers import answer, write
from headwise.tracing.rounding import rounding
from tests.runtime.specs import random_spec
from tests.tiny import tiny

QUESTIONS = [
    Question("a", 0, (5, 6, 7), ((8,), (9,), (10,))),
    Question("a", 1, (5, 6, 7, 8), ((9, 10), (9, 11), (12, 13))),  # its prompt goes on where the first one ends
    Question("b", 0, (20, 21), ((22,),)),  # against all tokens
    Question("b", 1, tuple(range(30, 60)), ((3, 4, 5), (3, 4, 6))),
]


def directly(model, question):
    logs = []
    with torch.no_grad():
        for reply in question.answers:
            ids = torch.tensor([[*question.prompt, *reply]])
            log_p = model(ids).logits[0].log_softmax(-1)
            places = range(len(question.prompt) - 1, ids.shape[1] - 1)
            logs.append(sum(log_p[at, token].item() for at, token in zip(places, reply)))
        if len(logs) == 1:
            likeliest = model(torch.tensor([question.prompt])).logits[0, -1].argmax().item()
            return likeliest == question.answers[0][0], -logs[0]
    return logs[0] > max(logs[1:]), torch.tensor(logs).logsumexp(0).item() - logs[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_answers_are_as_likely_as_each_by_itself(name):
    model = tiny(name)
    answers = answer(model, name, QUESTIONS, lambda done, total: None)
    for question, given in zip(QUESTIONS, answers, strict=True):
        right, nats = directly(model, question)
        assert given.right == right and given.nats == pytest.approx(nats, abs=1e-4)


def test_what_is_read_for_several_questions_is_read_once(monkeypatch):
    model, read = tiny("llama"), []
    model.register_forward_pre_hook(lambda module, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True)
    answer(model, "llama", QUESTIONS, lambda done, total: None)
    (batch,) = read
    assert batch.shape == (4, 32)  # (5 6 7) and (5 6 7 8) are read as the beginnings of others


def test_equal_likelihoods_are_not_right():
    model = tiny("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    assert not any(given.right for given in answer(model, "llama", QUESTIONS[:2], lambda done, total: None))


def test_a_rounded_cache_changes_answers_as_it_changes_logits():
    model = tiny("llama")
    codes = random_spec()
    plain = answer(model, "llama", QUESTIONS, lambda done, total: None)
    with rounding(model, codes):
        rounded = answer(model, "llama", QUESTIONS, lambda done, total: None)
        expected = [directly(model, question)[1] for question in QUESTIONS]
    assert [given.nats for given in rounded] == pytest.approx(expected, abs=1e-4)
    assert rounded[3].nats != pytest.approx(plain[3].nats, abs=1e-3)


def test_writing_stops_at_an_end_and_padding_changes_nothing():
    model = tiny("llama")
    prompts = [(5, 6, 7), tuple(range(10, 30))]
    alone = [write(model, None, [prompt], [2], 12)[0] for prompt in prompts]
    assert write(model, None, prompts, [2], 12) == alone
    stopped = write(model, None, prompts, [2, alone[0][3]], 12)
    assert stopped[0] == alone[0][: alone[0].index(alone[0][3]) + 1]


def test_writing_goes_through_the_packed_cache():
    model = tiny("llama", max_position_embeddings=256)
    codes, prompts = random_spec(), [tuple(range(5, 90))]
    before = model.config._attn_implementation
    packed = write(model, codes, prompts, [2], 16)
    assert model.config._attn_implementation == before
    assert packed != write(model, None, prompts, [2], 16)
