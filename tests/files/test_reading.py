"""One strict reader: what it refuses, and that it says where."""

import json
import math

import pytest

from headwise.files.reading import Reader, read_json, read_lines
from headwise.planning.knapsack import Option, choose
from headwise.records import InputError
from headwise.records.healing import CURVE, read_curve


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": NaN}', "NaN is no finite number"),
        ('{"a": [-Infinity]}', "-Infinity is no finite number"),
        ('{"a": 1e999}', "a number beyond 1e+100"),
        ('{"a": {"b": ' + "9" * 200 + "}}", "a number beyond 1e+100"),
        ('{"a": ' + "9" * 5000 + "}", "damaged or not JSON"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "more than 32 deep"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "damaged or not JSON"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"\\u0000": 1}', "a text holds a zero byte"),
        ('{"a": 1', "damaged or not JSON"),
        ("[1]", "expected a JSON object, found a list"),
    ],
)
def test_what_cannot_be_computed_with_or_written_again_is_refused(tmp_path, text, sentence):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"some\.json") as error:
        read_json(path)
    assert sentence in str(error.value)


def test_a_key_given_twice_counts_once_and_large_numbers_of_others_pass(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('{"a": 1, "a": 2, "model_max_length": 1000000000000000019884624838656}')
    assert read_json(path) == {"a": 2, "model_max_length": 1000000000000000019884624838656}


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (lambda row: row.integer("half"), "expected a whole number, found 0.5"),
        (lambda row: row.integer("yes"), "expected a whole number, found True"),
        (lambda row: row.integer("three", least=4), "three: expected a whole number from 4 on, found 3"),
        (lambda row: row.integer("three", 0, 2), "three: expected a whole number from 0 to 2, found 3"),
        (lambda row: row.integer("huge"), "expected a whole number from"),
        (lambda row: row.number("yes"), "expected a number, found True"),
        (lambda row: row.number("half", least=1), "half: expected a finite number from 1 on, found 0.5"),
        (lambda row: row.choice("word", ("yes", "no")), "expected one of 'yes', 'no', found the text 'maybe'"),
        (lambda row: row.choice("list", ("yes", "no")), "expected one of 'yes', 'no', found a list"),
        (lambda row: row.texts("list"), "list 0: expected text, found a list"),
        (lambda row: row.scores("empty"), "expected at least one number"),
        (lambda row: row.scores("words"), "words, a: expected a number, found the text 'x'"),
        (lambda row: row.child("list").nested([2, 3]), "list: expected 2 x 3 finite numbers"),
        (lambda row: row.child("list").nested([3, None]), "list: expected 3 x any finite numbers"),
        (lambda row: row.child("list").nested([2]), "list: expected 2 finite numbers"),
        (lambda row: row.child("list").nested([2, 2, 1]), "list: expected 2 x 2 x 1 finite numbers"),
        (lambda row: row.child("list").nested([2, 2], least=2), "list: expected 2 x 2 finite numbers from 2 on"),
        (lambda row: row.child("holes").nested([2, 2]), "holes: expected 2 x 2 finite numbers"),
        (lambda row: row.child("holes").nested([2, 2], holes=0), "holes: expected 2 x 2 finite numbers"),
    ],
)
def test_every_kind_of_field_says_what_it_expects(read, sentence):
    content = {
        "half": 0.5,
        "yes": True,
        "three": 3,
        "huge": 10**60,
        "word": "maybe",
        "list": [[1, 2], [3, 4.5]],
        "holes": [[1, None], [3, 4]],
        "empty": {},
        "words": {"a": "x"},
    }
    with pytest.raises(InputError, match=r"file\.json") as error:
        read(Reader(content, "file.json"))
    assert sentence in str(error.value)


def test_nested_lists_of_numbers_come_as_they_are():
    assert Reader([[1, 2], [3, 4]], "x").nested([2, None]) == [[1, 2], [3, 4]]
    assert Reader([[1, None], [None, 4]], "x").nested([2, 2], holes=1) == [[1, None], [None, 4]]
    assert Reader([[None, [1, 2]]], "x").nested([1, 2, 2], holes=1) == [[None, [1, 2]]]
    for wrong in (math.nan, math.inf):
        with pytest.raises(InputError, match="expected 1 finite numbers"):
            Reader([wrong], "x").nested([1])


def test_lines_are_read_up_to_where_a_kill_cut_them(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert [line.content for line in read_lines(path)] == [{"a": 1}, {"a": 2}]
    for content, sentence in (
        ('{"a": 1}\n3\n', "line 2: expected a JSON object, found 3"),
        ('{"a": 1}\n{"a"\n{"a": 2}\n', "line 2 is damaged or not JSON"),
        ("\xff\n", "line 1 is damaged or not JSON"),
        ('{"a": NaN}\n', "line 1 is damaged or not JSON: NaN"),
    ):
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(InputError, match=r"lines\.jsonl") as error:
            read_lines(path)
        assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda line: line.pop("tokens"), "the field 'tokens' is missing"),
        (lambda line: line.update(tokens="many"), "expected a whole number"),
        (lambda line: line.update(scores=[1]), "expected a JSON object"),
        (lambda line: line.update(scores={"kl": "x"}), "expected a number"),
        (lambda line: line.update(scores={"error": 1}), "expected kl as before"),
    ],
)
def test_a_damaged_curve_of_healing_is_told(tmp_path, change, sentence):
    lines = [{"stage": "start", "tokens": 0, "scores": {"kl": 1.0}}, {"stage": "x"}]
    lines.append({"stage": "global", "tokens": 9, "scores": {"kl": 0.5}})
    (tmp_path / CURVE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_curve(tmp_path) == [("start", 0, {"kl": 1.0}), ("global", 9, {"kl": 0.5})]
    change(lines[2])
    (tmp_path / CURVE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match="line 3") as error:
        read_curve(tmp_path)
    assert sentence in str(error.value)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_the_knapsack_ends_whatever_numbers_it_gets(odd):
    menus = [
        [Option(10, 0.0), Option(8, odd), Option(5, 1e16), Option(0, 3e16)],
        [Option(10, odd), Option(5, 1.0), Option(0, odd)],
        [Option(10, 0.1), Option(5, odd), Option(0, 1e-13)],
    ]
    for limit in range(0, 31):
        assert sum(option.cost for option in choose(menus, limit)) <= limit
