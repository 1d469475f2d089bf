"""Generated exercises: what is asked has one right answer, stands in the prompt, and comes from the seed alone."""

import json
import re

import pytest
from transformers import AutoTokenizer

from headwise.data.skills import exercises
from headwise.data.skills.chat import requests, turn_end
from headwise.data.skills.question import offered
from headwise.data.texts import own_texts
from tests.tokens import EVERY_BYTE, save_tokenizer

PROSE = own_texts(evaluation=True)[0]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] + '\n' + m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save_tokenizer(folder, EVERY_BYTE)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def asked(tokenizer):
    return exercises(tokenizer, PROSE, (512, 1024), 2048, seed=0)


def of(asked, skill):
    return [question for question in asked.questions if question.skill == skill]


def test_the_same_seed_asks_the_same_and_another_seed_something_else(tokenizer, asked):
    again, other = (exercises(tokenizer, PROSE, (512, 1024), 2048, seed=seed) for seed in (0, 1))
    assert again.questions == asked.questions
    for skill in ("needle", "copying", "sums", "JSON"):
        assert len(of(other, skill)) == len(of(asked, skill)) and of(other, skill) != of(asked, skill)


def test_needles_fill_their_length_and_are_said_once_at_their_depth(tokenizer, asked):
    longest = {}
    for question in of(asked, "needle"):
        text = tokenizer.decode(question.prompt)
        (city,) = re.findall(r"\nThe secret word of (\w+) is $", text)
        (word,) = re.findall(rf"[^\n]The secret word of {city} is (\w+)\.", text)
        answers = [tokenizer.decode(answer) for answer in question.answers]
        assert answers[0] == word[0] and len(set(answers)) == len(answers) == 10
        length, depth = (int(re.sub(r"\D", "", question.parts[name])) for name in ("length", "depth"))
        at = text.index(f" The secret word of {city} is {word}.") / text.index("\nThe secret word")
        assert at == pytest.approx(depth / 100, abs=0.2)
        longest[length, question.trial] = max(longest.get((length, question.trial), 0), len(question.prompt))
    assert len(longest) == 16 and all(tokens == length for (length, _), tokens in longest.items())


def test_copying_asks_for_each_token_of_the_second_round(asked):
    for question in of(asked, "copying"):
        row, again = question.prompt[:32], question.prompt[32:]
        assert len(set(row)) == 32 and again == row[: len(again)] and question.answers == ((row[len(again)],),)


def test_sums_are_right_once(tokenizer, asked):
    for question in of(asked, "sums"):
        *shots, (one, other, _) = re.findall(r"(\d+) \+ (\d+) =(?: (\d+)\n)?", tokenizer.decode(question.prompt))
        assert len(shots) == 4 and all(int(a) + int(b) == int(c) for a, b, c in shots)
        prompt = tokenizer.decode(question.prompt)
        results = [int((prompt + tokenizer.decode(answer)).rpartition("=")[2]) for answer in question.answers]
        assert results[0] == int(one) + int(other) and len(set(results)) == 7
        assert all(10 <= result <= 99 for result in results)


def test_only_the_right_brackets_make_json(tokenizer, asked):
    depths = set()
    for question in of(asked, "JSON"):
        first, text = tokenizer.decode(question.prompt).split("\n")
        json.loads(first)
        right, *wrong = [tokenizer.decode(answer).strip() for answer in question.answers]
        json.loads(text + right)
        depths.add(len(right))
        for each in wrong:
            with pytest.raises(ValueError):
                json.loads(text + each)
    assert len(depths) > 1


def test_answers_are_cut_where_they_differ(tokenizer):
    def letters(answers):
        return [tokenizer.decode(answer) for answer in answers]

    prompt, answers = offered(tokenizer, [1], "a =", [" 12", " 34"])
    assert prompt[0] == 1 and tokenizer.decode(prompt[1:]) == "a = " and letters(answers) == ["1", "3"]
    _, answers = offered(tokenizer, [], "a =", [" 12", " 13", " 45"])
    assert letters(answers) == ["12", "13", "45"]


def test_what_does_not_fit_is_left_out_with_a_note(tokenizer):
    asked = exercises(tokenizer, PROSE, (128,), 40, seed=0)
    assert asked.questions == () and len(asked.notes) == 2
    assert "No needles in 128 tokens" in asked.notes[0] and "more than the 40 tokens" in asked.notes[1]


def test_requests_open_the_models_turn_and_know_their_forms(tokenizer):
    assert exercises(tokenizer, PROSE, (512,), 2048, seed=0).requests == ()  # no template
    tokenizer.chat_template = TEMPLATE
    try:
        made = requests(tokenizer, seed=0)
        assert turn_end(tokenizer) == tokenizer.eos_token_id
        prompts = [tokenizer.decode(request.prompt) for request in made]
    finally:
        tokenizer.chat_template = None
    assert all(prompt.endswith("<s>assistant\n") for prompt in prompts) and len(set(prompts)) > 8
    good = ("Bone", "3", "cat, dog, horse", '{"thing": "dog", "colour": "red"}')
    for number, request in enumerate(made):
        assert [request.keeps(reply) for reply in good] == [
            number % 4 == place for place in range(4)
        ] or number % 4 == 0
        assert not any(request.keeps(reply) for reply in ("", "I think so.\nYes", '{"thing": 1}', "a, b"))
    assert made[0].keeps("3") and not made[1].keeps("three")
