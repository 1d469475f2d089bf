"""Damaged files by the thousand: every command must end by itself, with one sentence and a right exit code.

python -m tests.fuzz --n 1000 --seed 0     that many cases
python -m tests.fuzz --seed 0 --case 17    one of them alone, with all it said
"""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import world
from tests.fuzz.cases import Verdict, run_case
from tests.fuzz.child import preload

TAIL = 25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--n", type=int, default=1000, help="cases to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone, and keep its folder")
    asked = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # says where it is
    preload()
    with tempfile.TemporaryDirectory(prefix="headwise-fuzz-") as scratch:
        built = Path(scratch) / "world"
        start = time.monotonic()
        world.build(built)
        print(f"artefacts built in {time.monotonic() - start:.0f} s")
        if asked.case is not None:
            folder = Path(tempfile.mkdtemp(prefix=f"headwise-fuzz-{asked.seed}-{asked.case}-"))
            verdict = run_case(built, asked.seed, asked.case, folder)
            print(f"{verdict.said}\n{folder}\n{verdict.ended.stdout}{verdict.ended.stderr}")
            print(
                f"exit code {verdict.ended.code} after {verdict.ended.seconds:.1f} s: {verdict.wrong or 'as it should'}"
            )
            return int(bool(verdict.wrong))
        return _run_all(built, asked.seed, range(asked.first, asked.first + asked.n), Path(scratch))


def _run_all(built: Path, seed: int, numbers: range, scratch: Path) -> int:
    wrong, codes, start = 0, dict.fromkeys((0, 1, 2), 0), time.monotonic()
    for number in numbers:
        folder = scratch / str(number)
        folder.mkdir()
        verdict = run_case(built, seed, number, folder)
        shutil.rmtree(folder, ignore_errors=True)
        if verdict.wrong:
            wrong += 1
            print(told(verdict, seed), flush=True)
        else:
            codes[verdict.ended.code or 0] += 1
    seconds = (time.monotonic() - start) / max(1, len(numbers))
    ends = ", ".join(f"{count} ended with {code}" for code, count in codes.items())
    print(f"{len(numbers)} cases of seed {seed}, {seconds:.2f} s each: {ends}, {wrong} wrong")
    return int(bool(wrong))


def told(verdict: Verdict, seed: int) -> str:
    """What went wrong in a case, and how to repeat it."""
    tail = "\n".join(f"    {line}" for line in verdict.ended.stderr.splitlines()[-TAIL:])
    again = f"python -m tests.fuzz --seed {seed} --case {verdict.number}"
    return f"{verdict.said}:\n  {verdict.wrong} after {verdict.ended.seconds:.1f} s ({again})\n{tail}"


if __name__ == "__main__":
    sys.exit(main())
