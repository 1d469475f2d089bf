"""Tokenizers learnt from text: every text comes back, and transformers opens them."""

from transformers import AutoTokenizer

from headwise.data.sources import PIECE, check_source, pieces_of
from headwise.data.vocabulary import END, learn_tokenizer


def test_what_was_never_seen_comes_back_too(tmp_path):
    learn_tokenizer(["the cat sat on the mat " * 20], 280, tmp_path / "words")
    words = AutoTokenizer.from_pretrained(tmp_path / "words")
    assert len(words) <= 280 and words.eos_token == END
    for text in ("the cat", "  tabs\tand\nlines ", "na\u00efve \u2603 \U0001f600", ""):
        assert words.decode(words(text)["input_ids"]) == text
    assert len(words(" the cat sat")["input_ids"]) < 6


def test_long_files_are_read_in_pieces_that_lose_nothing(tmp_path):
    text = "a line of text, \u2603 included\n" * 9000 + "x" * (2 * PIECE) + "\nof DOS\r\nof old\rthe end"
    (tmp_path / "long.txt").write_bytes(text.encode())
    pieces = list(pieces_of(check_source(tmp_path / "long.txt")))
    assert "".join(pieces) == text and len(pieces) > 4
    assert pieces[0].endswith("\n")
    assert check_source(tmp_path / "long.txt").characters == len(text)
