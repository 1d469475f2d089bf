"""What is run on damaged files, and what must hold then."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.child import Ended, run_command
from tests.fuzz.damage import damage
from tests.fuzz.world import HEAL, MEASURE, PAPERS, RUN, TRAIN

EVALUATE = ("--text", "text.txt", "--tokens", "128", "--context", "32", "--no-speed")
SHARE_OF_OPTIONS = 0.1
ODD_OPTIONS = ("", "-1", "0", "nan", "inf", "1e999", "x", "1,2", "0.5", "-", "/", ",", "--", "\u0663", "0-1000000000")
SEEN = ("--tokens", "64")


@dataclass(frozen=True, slots=True)
class Command:
    """A command, the artefacts it reads (``inputs`` stay as they are, ``work`` may change) and its ``output``."""

    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    work: tuple[str, ...] = ()
    output: str = ""


COMMANDS = (
    Command(("cost", "llama"), ("llama/config.json",)),
    Command(("cost", "reduced"), ("reduced/config.json",)),
    Command(("cost", "llama", "--plan", "plan.json"), ("llama", "plan.json")),
    Command(("cost", "vit", "--json"), ("vit/config.json",)),
    Command(("inspect", "llama", *MEASURE, "-o", "out"), ("llama", "text.txt"), output="out"),
    Command(("inspect", "bert", *MEASURE, "-o", "out"), ("bert", "text.txt"), output="out"),
    Command(
        ("inspect", "vit", "--inputs", "inputs.npz", *SEEN, "-o", "out"),
        ("vit/config.json", "vit/model.safetensors", "inputs.npz"),
        output="out",
    ),
    Command(("inspect", "vit", "--inputs", "pictures", *SEEN, "-o", "out"), ("vit", "pictures"), output="out"),
    Command(("inspect", "llama", *MEASURE, "-o", "profile-llama"), ("llama", "text.txt"), ("profile-llama",)),
    Command(("inspect", "llama", *MEASURE, "-o", "begun"), ("llama", "text.txt"), ("begun",)),
    Command(
        ("plan", "profile-llama", "--keep-kv", "0.5", "-o", "out.json"),
        ("profile-llama/profile.json",),
        output="out.json",
    ),
    Command(
        ("plan", "profile-bert", "--keep-attention-params", "0.6", "--multiple-of", "2", "-o", "out.json"),
        ("profile-bert/profile.json",),
        output="out.json",
    ),
    Command(
        ("plan", "profile-llama", "--kv-bytes-per-token", "100", "--uniform", "--multiple-of", "2", "-o", "out.json"),
        ("profile-llama/profile.json",),
        output="out.json",
    ),
    Command(
        (
            "plan",
            "profile-llama",
            "--max-loss-increase",
            "0.5",
            "--text",
            "other.txt",
            "--multiple-of",
            "2",
            "-o",
            "out.json",
        ),
        ("profile-llama", "other.txt"),
        output="out.json",
    ),
    Command(
        ("compress", "llama", "--plan", "plan.json", "--profile", "profile-llama", "-o", "out"),
        ("llama", "plan.json", "profile-llama"),
        output="out",
    ),
    Command(
        ("compress", "llama", "--plan", "plan.json", "--method", "svd", "-o", "out"),
        ("llama", "plan.json"),
        output="out",
    ),
    Command(
        ("evaluate", "llama", "reduced", *EVALUATE, "-o", "out.json"),
        ("llama", "reduced", "text.txt"),
        output="out.json",
    ),
    Command(
        ("evaluate", "classifier", *EVALUATE, "--labels", "labels.tsv", "-o", "out.json"),
        ("classifier", "labels.tsv", "text.txt"),
        output="out.json",
    ),
    Command(
        ("evaluate", "vit", "--inputs", "inputs.npz", "--tokens", "100", "--no-speed", "-o", "out.json"),
        ("vit/config.json", "vit/model.safetensors", "inputs.npz"),
        output="out.json",
    ),
    Command(
        ("heal", "reduced", *HEAL, "-o", "healed"), ("llama", "reduced", "text.txt"), ("healed.healing",), "healed"
    ),
    Command(("heal", "reduced", *HEAL, "-o", "healed"), (), ("healed.healing",), "healed"),
    Command(
        ("train", "--plan", "usual.json", "--data", "text.txt", *TRAIN, "-o", "trained"),
        ("usual.json", "text.txt"),
        ("trained.training",),
        "trained",
    ),
    Command(
        ("train", "--plan", "seeing.json", "--data", "labelled.npz", *TRAIN, "-o", "out"),
        ("seeing.json", "labelled.npz"),
        output="out",
    ),
    Command(
        ("compare", "usual.json", "other.json", "--data", "text.txt", *TRAIN, "--seeds", "2", "-o", "compared"),
        ("usual.json", "other.json", "text.txt"),
        ("compared",),
    ),
    Command(("papers", "list", "-o", "papers"), tuple(f"papers/{name}.quick.json" for name in PAPERS)),
    Command(("papers", "report", "-o", "papers"), (), tuple(f"papers/{name}.quick.json" for name in PAPERS)),
    *(Command(("papers", "run", name, "-o", "papers"), (), (f"papers/{name}",)) for name in PAPERS),
    Command(("run", "llama", *RUN, "--heal-tokens", "128", "-o", "run"), ("llama", "text.txt"), ("run",)),
)
NEEDED = {"plan": ("llama",), "heal": ("llama", "reduced", "text.txt")}  # read too, but not damaged by every command


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case: what was damaged how, which command ran, how it ended, and what is wrong with that (nothing: "")."""

    number: int
    said: str
    ended: Ended
    wrong: str


def run_case(world: Path, seed: int, number: int, folder: Path) -> Verdict:
    """Copy what a command reads to ``folder``, damage one file, run the command and judge how it ends."""
    rng = Random(f"{seed} {number}")
    command = rng.choice(COMMANDS)
    prepare(world, command, folder)
    files = [file for part in (*command.inputs, *command.work) for file in _files(folder / part)]
    files = [file for file in files if file.suffix not in (".html", ".md", ".py")]
    arguments, said = list(command.arguments), []
    options = [place for place, part in enumerate(arguments[:-1]) if part.startswith("--")]
    if options and rng.random() < SHARE_OF_OPTIONS:
        arguments[rng.choice(options) + 1] = rng.choice(ODD_OPTIONS)
    else:
        for target in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
            said.append(f"{target.relative_to(folder)} {damage(target, rng, world)}")
    kept = {folder / part.split("/")[0] for part in command.inputs}
    before = {path: _state(path) for path in kept}
    ended = run_command(arguments, folder, then=lambda: _check_output(folder, command))
    wrong = judge(ended)
    changed = [path.name for path in kept if _state(path) != before[path]]
    if not wrong and changed:
        wrong = f"changed its input {changed[0]}"
    return Verdict(number, f"headwise {' '.join(arguments)}: {', '.join(said) or 'nothing damaged'}", ended, wrong)


def prepare(world: Path, command: Command, folder: Path) -> None:
    """Copy what ``command`` reads from ``world`` to ``folder``."""
    for name in sorted(
        {part.split("/")[0] for part in (*command.inputs, *command.work, *NEEDED.get(command.arguments[0], ()))}
    ):
        _copy(world / name, folder / name)


def judge(ended: Ended) -> str:
    """What is wrong with how a command ended; nothing: ""."""
    if ended.code is None:
        return "did not end"
    if "Traceback" in ended.stderr or "Traceback" in ended.stdout:
        return f"ended with a traceback and {ended.code}"
    if ended.code not in (0, 1, 2):
        return f"ended with {ended.code}"
    if ended.code and not any(line.startswith(("headwise: ", "Usage: ")) for line in ended.stderr.splitlines()):
        return f"ended with {ended.code} and no sentence"
    return ""


def _check_output(folder: Path, command: Command) -> None:
    """Raise where something was written that does not open; runs in the child, which has everything imported."""
    import json

    from headwise.checkpoints.load import open_model
    from headwise.records.plan import Plan
    from headwise.records.profile import Profile
    from headwise.records.scores import Scores

    output = folder / command.output
    if command.output and output.exists():
        if output.is_file():
            kind = json.loads(output.read_text())["headwise"]
            {"plan": Plan, "scores": Scores}[kind].load(output)
        elif (output / "profile.json").exists():
            Profile.load(output / "profile.json")
        elif command.arguments[0] != "inspect":
            open_model(str(output))


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def _state(path: Path) -> dict[str, str]:
    """Every file below ``path`` with its content, links as where they point."""
    if path.is_symlink() or not path.is_dir():
        return {"": _content(path)}
    return {str(file.relative_to(path)): _content(file) for file in sorted(path.rglob("*"))}


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder" if path.is_dir() else "none"
