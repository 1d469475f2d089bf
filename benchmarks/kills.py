"""Commands killed at random moments and run again, and pairs of them at once: always the files of one that was let be.

    PYTHONPATH=. python benchmarks/kills.py [--kills 30] [--pairs 10] [--seed 0] [-o results/kills.json]

`run` with healing, `train`, `compare` and `papers run` on tiny models, in real processes and with real kill -9, at
moments spread over the time that the command takes. Compared is every file, byte for byte, but for what is a time
(seconds, tokens per second, and run.json, which holds hashes of files with such lines). The pace of `compare`, which a
stopwatch decides, is that of the first run for all others. Of two commands at once on one output one must work and the
other say so.
"""

import argparse
import json
import random
import shutil
import string
import tempfile
import time
from pathlib import Path

from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Text
from tests.commands import finished, headwise, start
from tests.tiny import VOCAB, tiny
from tests.tokens import save_tokenizer

TIMES = ("seconds", "tokens_per_second", "seal", "versions")
LEFT_OUT = ("run.json", "pace.json", ".lock")


def prepare(folder):
    """A model, text and two plans."""
    tiny("llama").save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text("".join(random.Random(0).choices(string.ascii_lowercase, k=9000)))
    for name, width in {"wide": 48, "narrow": 32}.items():
        blueprint = Blueprint(width, Text(VOCAB, 16, tied=True))
        shape = blueprint.shape("llama", 16, ((2, 2, 8, 8),))
        Plan.make(shape, (LayerPlan(2, 2, 8, 8),), blueprint=blueprint).save(folder / f"{name}.json")


def commands(given):
    """Each command without its output."""
    text = given / "text.txt"
    data = ("--tokenizer", given / "model", "--data", text, "--tokens", 2560, "--batch", 2, "--precision", "fp32")
    measured = ("--tokens", 512, "--eval-text", text, "--eval-tokens", 1024, "--no-speed")
    return {
        "run": ("run", given / "model", "--text", text, *measured, "--heal-tokens", 2048, "--precision", "fp32"),
        "train": ("train", "--plan", given / "wide.json", *data),
        "compare": ("compare", given / "wide.json", given / "narrow.json", *data, "--seeds", 1),
        "papers": ("papers", "run", "allocation/jacobian"),
    }


def plain(content):
    """JSON without times."""
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items() if name not in TIMES}
    return [plain(value) for value in content] if isinstance(content, list) else content


def contents(folder):
    """What every file holds, without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or path.name.endswith(LEFT_OUT):
            continue
        if path.suffix == ".json":
            found[name] = plain(json.loads(path.read_text().replace(str(folder), "OUTPUT")))
        elif path.suffix == ".jsonl":
            found[name] = [plain(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix not in (".html", ".md"):  # which show what the others hold, times among it
            found[name] = path.read_bytes()
        else:
            found[name] = True
    return found


def finish(name, command, out, place):
    """Run a command to its end; the pace of a comparison is the first run's."""
    pace = place / "pace.json"
    if name == "compare" and pace.exists():
        out.mkdir(exist_ok=True)
        shutil.copy(pace, out / "pace.json")
    done = headwise(*command, "-o", out)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr}")
    if name == "compare" and not pace.exists():
        shutil.copy(out / "pace.json", pace)


def kill(args, every, whole, seconds, place, report):
    """Kill commands at random moments and run them again."""
    draw = random.Random(args.seed)
    number = 0
    while sum(map(len, report["kills"].values())) < args.kills:
        name = list(every)[number % len(every)]
        out = place / f"killed-{number}"
        number += 1
        if name == "compare":
            out.mkdir()
            shutil.copy(place / "pace.json", out / "pace.json")
        process = start(*every[name], "-o", out)
        time.sleep(draw.uniform(0.05, 1.0) * seconds[name])
        process.kill()
        code = finished(process).returncode
        if code == 0:
            continue  # it was done before
        finish(name, every[name], out, place)
        same = contents(out) == whole[name]
        report["kills"].setdefault(name, []).append({"ended_with": code, "same": same})
        print("kill", number, name, code, same, flush=True)


def pair(args, every, whole, seconds, place, report):
    """Run commands two at a time on one output."""
    for number in range(args.pairs):
        name = list(every)[number % len(every)]
        out = place / f"pair-{number}"
        if name == "compare":
            out.mkdir()
            shutil.copy(place / "pace.json", out / "pace.json")
        both = [start(*every[name], "-o", out) for _ in range(2)]
        ends = [finished(process) for process in both]
        codes = sorted(end.returncode for end in ends)
        said = [end.stderr.strip().splitlines()[-1] for end in ends if end.returncode == 2]
        told = all("is being written by process" in line for line in said)
        same = contents(out) == whole[name]
        report["pairs"].setdefault(name, []).append({"ended_with": codes, "said_so": told, "same": same})
        print("pair", number, name, codes, told, same, said[:1], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/kills.json"))
    args = parser.parse_args()
    report = {"seed": args.seed, "kills": {}, "pairs": {}, "repeated": {}}
    with tempfile.TemporaryDirectory() as name_of_place:
        place = Path(name_of_place)
        prepare(place)
        every = commands(place)
        whole, seconds = {}, {}
        for name, command in every.items():
            finish(name, command, place / f"{name}-first", place)
            begin = time.monotonic()
            finish(name, command, place / f"{name}-again", place)
            seconds[name] = time.monotonic() - begin
            whole[name] = contents(place / f"{name}-first")
            again = contents(place / f"{name}-again")
            report["repeated"][name] = whole[name] == again
            other = [file for file in whole[name].keys() | again.keys() if whole[name].get(file) != again.get(file)]
            print(name, f"{seconds[name]:.1f} s, the same twice: {report['repeated'][name]}", other, flush=True)
        kill(args, every, whole, seconds, place, report)
        pair(args, every, whole, seconds, place, report)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
