"""Text before and after it is tokens: files of every kind, windows that never overlap, tokens that say nothing."""

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwise.data.processors import open_tokenizer
from headwise.data.texts import Text, own_texts, read_texts
from headwise.data.windows import Tokens, has_chat, hold_out, in_order, spread, tokenise
from headwise.files.errors import InputError

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
TALK = ({"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"})


def words(template=None):
    """A tokenizer of letters that knows no others."""
    known = {name: number for number, name in enumerate(["<unk>", "<pad>", "<user>", "<assistant>", *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    wrapped.chat_template = template
    return wrapped


def row(ids, *, apart=False, starts=False, before=(), after=()):
    return Tokens("text", "prose", ids, list(before), list(after), apart, starts, {})


def test_standard_input_is_read_once(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some words here")))
    first, again = read_texts(["-"]), read_texts(["-"])
    assert first == again == (Text("standard input", ("some words here",)),)


def test_files_of_every_kind(tmp_path):
    prose, lines, talks, rows = (tmp_path / name for name in ("prose.txt", "lines.txt", "talks.jsonl", "rows.jsonl"))
    prose.write_text("A first line.\nAnd a second one.\n")
    chains = tuple(letter * 3 + "QLVESGGGLVQPGGSLRLSCAAS" for letter in "EQD")
    lines.write_text("\n\n".join(chains))
    talks.write_text(json.dumps({"messages": list(TALK)}) + "\n")
    rows.write_text('{"text": "one"}\n{"text": "two three"}\n')
    assert read_texts([str(prose)]) == (Text(str(prose), (prose.read_text(),)),)
    assert read_texts([str(prose)], "lines")[0].passages == ("A first line.", "And a second one.")
    assert read_texts([str(lines)]) == (Text(str(lines), chains, apart=True),)
    assert not read_texts([str(lines)], "document")[0].apart
    both = read_texts([str(talks), str(prose)])
    assert [text.kind for text in both] == ["prose", "chat"] and both[1].dialogues == (TALK,)
    assert read_texts([str(rows)])[0].passages == ("one", "two three")


@pytest.mark.parametrize(
    "line",
    ["{", "3", '{"a": 1}', '{"messages": []}', '{"messages": [{"role": "king", "content": "a"}]}', '{"text": 1}'],
)
def test_wrong_lines_are_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_texts([str(path)])


def test_own_dialogues_are_for_models_that_chat_and_none_is_evaluated_on():
    prose, talks = own_texts(chat=True)
    assert own_texts() == (prose,) and len(talks.dialogues) > 300
    others = own_texts(evaluation=True, chat=True)[1]
    openings = [{message["content"] for talk in each.dialogues for message in talk[:1]} for each in (talks, others)]
    assert not openings[0] & openings[1] or all("You are" in content for content in openings[0] & openings[1])
    assert not set(map(str, talks.dialogues)) & set(map(str, others.dialogues))


def test_dialogues_are_put_as_the_template_says_and_windows_begin_where_one_begins():
    tokens = tokenise(words(TEMPLATE), Text("talks", dialogues=(TALK,) * 5), 100, "model")
    assert has_chat(words(TEMPLATE)) and tokens.kind == "chat" and tokens.rows[0] == [2, 4, 5, 3, 6]
    assert in_order(tokens, 8) == [[2, 4, 5, 3, 6, 2, 4, 5]] * 2
    plain = tokenise(words(), Text("talks", dialogues=(TALK,) * 5), 100, "model")
    assert plain.apart and plain.rows[0] == [4, 5, 6]


def test_unknown_repeated_and_padding_tokens_are_counted():
    text = Text("text", ("a b " * 40 + "x y " * 3,))
    tokens = tokenise(words(), text, 100, "model")
    assert tokens.empty["unknown"] == pytest.approx(6 / 86)
    assert tokens.warnings() == [
        "7% of the tokens of text are unknown: what is measured on them says little of the model's own text."
    ]
    bad = tokenise(words(), Text("text", ("x y a b " * 40,)), 100, "model")
    with pytest.raises(InputError, match=r"50% of the tokens of text are unknown.*`accept_text`"):
        bad.warnings()
    assert len(bad.warnings(accept=True)) == 1
    stuck = tokenise(words(), Text("text", ("a " * 100,)), 100, "model")
    assert stuck.empty["repeated"] == pytest.approx(0.97)
    assert not tokenise(words(), Text("text", ("a b c " * 40,)), 100, "model").warnings()
    with pytest.raises(InputError, match="The tokenizer of model makes no tokens"):
        tokenise(words(), Text("text", ("\n",)), 100, "model")


@given(st.integers(20, 400), st.integers(8, 40), st.integers(1, 500), st.floats(0.01, 0.9))
def test_windows_never_overlap(count, length, wanted, share):
    tokens = row([list(range(count))], before=[-1], after=[-2])
    length = min(length, count // 2 + 2)
    windows = spread(tokens, length, wanted)
    main, held = hold_out(windows, share)
    inside = [token for window in (*main, *held) for token in window[1:-1]]
    assert len(set(inside)) == len(inside) and all(len(window) == length for window in windows)
    assert len(main) + len(held) == len(windows) and main and (held or len(windows) == 1)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=30), st.integers(4, 20))
def test_examples_are_never_joined(rows, length):
    windows = in_order(row(rows, apart=True, before=[-1]), length)
    assert windows == [[-1, *ids[: length - 1]] for ids in rows]
    assert all(window in windows for window in spread(row(rows, apart=True, before=[-1]), length, 40))


def test_a_model_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(InputError, match=r"has no tokenizer \(tokenizer\.json or the like\)"):
        open_tokenizer(str(tmp_path))
