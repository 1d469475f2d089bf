"""Options are the fields of settings; numbers, notes and log lines as a person meets them."""

from dataclasses import fields, is_dataclass

import pytest
import typer
from typer.testing import CliRunner

from headwise.cli import app, as_flags
from headwise.cli.old_names import renamed
from headwise.cli.progress import log_lines
from headwise.files.errors import InputError
from headwise.files.numbers import read_count, read_share, read_size, read_window, read_windows
from headwise.records import healing, settings
from tests.commands import headwise


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (read_count, {"200000": 200_000, "200k": 200_000, "1.5M": 1_500_000, "2B": 2 * 10**9, "1e6": 10**6, "0": 0}),
        (read_window, {"4096": 4096, "32k": 32_768, "1.5k": 1536}),
        (read_windows, {"64,512, 4k": (64, 512, 4096)}),
        (read_size, {"23040": 23_040, "24kB": 24_000, "8GB": 8 * 10**9, "8GiB": 2**33, "8g": 8 * 10**9}),
        (read_share, {"0.75": 0.75, "75%": 0.75, "75 %": 0.75, "1": 1.0, ".5": 0.5}),
    ],
)
def test_one_grammar_for_numbers(read, values):
    for text, value in values.items():
        assert read(text) == value
    for wrong in ("", "many", "k", "-1", "nan", "inf", "1e9999999999", "1e999", "9" * 5000, "1x", "1..2"):
        with pytest.raises(InputError, match="Expected"):
            read(wrong)


def test_a_percentage_is_a_share_and_not_a_count():
    assert read_share("12.5%") == 0.125
    for read in (read_count, read_window, read_size):
        with pytest.raises(InputError):
            read("75%")


def test_every_setting_has_words_or_is_not_an_option():
    for module in (settings, healing):
        for config in vars(module).values():
            if isinstance(config, type) and is_dataclass(config):
                for each in fields(config):
                    assert not each.metadata or each.metadata["help"].endswith("."), (config, each.name)


def test_every_command_takes_h_quiet_and_verbose():
    group = typer.main.get_command(app)
    commands = [["papers", name] for name in group.commands["papers"].commands]
    commands += [[name] for name in group.commands if name != "papers"]
    for words in commands:
        shown = CliRunner().invoke(app, [*words, "-h"])
        assert shown.exit_code == 0 and "--quiet" in shown.stdout and "--verbose" in shown.stdout, words


def test_old_names_work_with_a_note():
    assert renamed(["plan", "x", "--max-damage", "2%"])[0] == ["plan", "x", "--max-ppl-increase", "2%"]
    assert renamed(["plan", "x", "--max-damage=0.02"])[0] == ["plan", "x", "--max-loss-increase=0.02"]
    assert renamed(["plan", "x", "--context", "64"])[0] == ["plan", "x", "--cache-tokens", "64"]
    assert renamed(["cost", "x", "--context", "64"]) == (["cost", "x", "--context", "64"], [])
    arguments, notes = renamed(["plan", "x", "--dtype", "fp32"])
    assert arguments == ["plan", "x", "--dtype", "fp32"] and "--cache-dtype" in notes[0]
    done = headwise("cost", "nowhere/at/all", "--dtype", "fp8")
    assert "--dtype is called --cache-dtype now" in done.stderr and done.returncode == 2


def test_arguments_in_a_sentence_become_flags():
    assert as_flags("Give `keep_kv` or `fit`, as in `8GB at 32k`.") == "Give --keep-kv or --fit, as in `8GB at 32k`."


def test_log_lines_tell_what_changes_and_that_work_goes_on():
    seconds = iter([0.0, 1.0, 12.0, 13.0, 20.0, 43.0, 44.0])
    lines = []
    update = log_lines(lines.append, 10.0, lambda: next(seconds))
    for done, what in enumerate(["early", "watching", "watching", "watching", "watching", "writing"]):
        update(done, 6, what)
    assert [line.split("s  ")[1] for line in lines] == ["watching, 1 of 6", "watching, 4 of 6", "writing, 5 of 6"]
