"""Options as they were called before: they work for one release more, with a note."""

from __future__ import annotations

from collections.abc import Sequence


def renamed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``arguments`` with today's names, and a note for each that was an old one."""
    current, notes = [], []
    following = [*arguments[1:], ""]
    for argument, value in zip(arguments, following, strict=True):
        flag, equals, own = argument.partition("=")
        name = _current(arguments[0], flag, own if equals else value)
        if (arguments[0], flag) == ("plan", "--dtype"):
            notes.append("--dtype is the precision to run in now; --cache-dtype says what bytes are counted in.")
        if name != flag:
            notes.append(f"{flag} is called {name} now; the old name goes with the next release.")
        current.append(f"{name}{equals}{own}")
    return current, notes


def _current(command: str, flag: str, value: str) -> str:
    if flag == "--max-damage" and command == "plan":
        return "--max-ppl-increase" if value.endswith("%") else "--max-loss-increase"
    counted = {"cost": {"--dtype": "--cache-dtype"}, "plan": {"--context": "--cache-tokens"}}
    return counted.get(command, {}).get(flag, flag)
