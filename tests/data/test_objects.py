"""Text and inputs as objects: the same windows as the same text in a file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.data.calibration import evaluation_windows, text_calibration
from headwise.data.processors import open_tokenizer
from headwise.data.ready import are_batches, input_calibration
from headwise.data.texts import Files, texts_of
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from tests.tiny import tiny
from tests.tokens import save_tokenizer

SENTENCES = [f"the quick brown fox {word} jumps over the lazy dog " * 9 for word in ("and", "or", "runs", "from")]
DIALOGUES = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[:99]}]} for text in SENTENCES
]
ROWS = [{"text": text} for text in SENTENCES]


class Dataset:
    """As much of a `datasets.Dataset` as anybody needs: rows that are found by number or one after the other."""

    def __init__(self, rows):
        self.rows, self.column_names = rows, list(rows[0])

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


def in_a_file(rows, folder):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Files([str(folder / "rows.jsonl")])


KINDS = {
    "a string": (" ".join(SENTENCES), None),
    "a list of one": ([" ".join(SENTENCES)], None),
    "strings": (SENTENCES, ROWS),
    "a tuple": (tuple(SENTENCES), ROWS),
    "rows": (ROWS, ROWS),
    "dialogues": (DIALOGUES, DIALOGUES),
    "a dataset of texts": (Dataset([{**row, "id": 3} for row in ROWS]), ROWS),
    "a dataset of dialogues": (Dataset(DIALOGUES), DIALOGUES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_give_the_windows_of_files(kind, tmp_path):
    given, rows = KINDS[kind]
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES))
    files = Files([str(tmp_path / "text.txt")]) if rows is None else in_a_file(rows, tmp_path)
    save_tokenizer(tmp_path)
    model, tokenizer = tiny("llama"), open_tokenizer(str(tmp_path))
    shape = shape_of(model)
    for cut in (
        lambda texts: text_calibration(model, shape, "model", tokenizer, texts, 256),
        lambda texts: evaluation_windows(model, shape, "model", tokenizer, texts, 256, 32),
    ):
        one, other = cut(texts_of(given)), cut(texts_of(files))
        assert one.sha256 == other.sha256 and one.tokens and len(one.held_out) == len(other.held_out)
        assert [batch.kind for batch in one.batches] == [batch.kind for batch in other.batches]


def test_names_say_what_was_given():
    assert [texts_of(given)[0].name for given in ("a b c", SENTENCES, DIALOGUES)] == [
        "1 text",
        "4 texts",
        "4 dialogues",
    ]


def test_a_real_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(DIALOGUES)
    assert texts_of(rows)[0].dialogues == texts_of(in_a_file(DIALOGUES, tmp_path))[0].dialogues
    texts = datasets.Dataset.from_dict({"text": SENTENCES})
    assert texts_of(texts)[0].passages == tuple(SENTENCES)
    with pytest.raises(InputError, match="`text` holds train: give one of these"):
        texts_of(datasets.DatasetDict({"train": texts}))


def test_a_path_is_a_file_and_a_string_is_not(tmp_path):
    (tmp_path / "text.txt").write_text("what is in the file")
    path = tmp_path / "text.txt"
    assert texts_of(path)[0].passages == texts_of([path])[0].passages == ("what is in the file",)
    assert texts_of(path)[0].name == str(path)
    assert texts_of(str(path))[0].passages == (str(path),)


def test_examples_may_be_one_long_text():
    (text,) = texts_of(SENTENCES, "document")
    assert text.passages == tuple(SENTENCES) and not text.apart


@pytest.mark.parametrize(
    ("given", "sentence"),
    {
        "nothing": ([], "`text` holds no text"),
        "empty": ("  ", "holds no text"),
        "numbers": ([1, 2], "Row 0 of `text`: expected an object"),
        "a number": (3, "`text` may be a string"),
        "bytes": (b"abc", "`text` may be a string"),
        "mixed": ([*ROWS, *DIALOGUES], "mixes"),
        "files and strings": ([Path("a"), "b"], "Row 0 of `text`"),
        "no role": ([{"messages": [{"content": "x"}]}], 'Row 0 of `text`: messages must be objects with a "role"'),
    }.values(),
)
def test_what_is_no_text_gets_one_sentence(given, sentence):
    with pytest.raises(InputError) as error:
        texts_of(given)
    assert sentence in str(error.value)


def test_batches_are_the_arrays_of_a_file(tmp_path):
    model = tiny("vit")
    pictures = np.random.default_rng(0).random((12, 3, 12, 12), dtype=np.float32)
    np.savez(tmp_path / "inputs.npz", pixel_values=pictures)
    file = input_calibration(model, "model", tmp_path / "inputs.npz", 60)
    tensor = torch.from_numpy(pictures)
    for given in (
        [{"pixel_values": some} for some in tensor.split(5)],
        [{"pixel_values": some} for some in tensor.to(torch.float64).split(1)],
        {"pixel_values": tensor},
        {"pixel_values": pictures},
    ):
        assert are_batches(given)
        batches = input_calibration(model, "model", given, 60)
        assert batches.sha256 == file.sha256 and batches.tokens == file.tokens
    assert not are_batches(SENTENCES) and not are_batches(DIALOGUES) and not are_batches([])


def test_batches_of_tokens_of_several_lengths():
    model = tiny("llama")
    batches = [{"input_ids": torch.randint(3, 90, (2, length))} for length in (16, 24) for _ in range(3)]
    calibration = input_calibration(model, "model", batches, 200)
    assert {batch.inputs["input_ids"].shape[1] for batch in calibration.batches} == {16, 24}
    assert {batch.inputs["input_ids"].shape[1] for batch in calibration.held_out} == {16, 24}
    assert calibration.name == "6 batches"
    with pytest.raises(InputError, match="`inputs` may be a folder of pictures"):
        input_calibration(model, "model", [1, 2], 200)
