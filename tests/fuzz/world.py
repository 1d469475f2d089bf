"""A small set of valid artefacts, one of each kind that headwise reads. Built once, then copied and damaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Images, Text
from tests.fuzz.child import Patch, run_command
from tests.tiny import tiny
from tests.tokens import save_tokenizer

SENTENCES = "The quick brown fox jumps over the lazy dog, and the dog did not mind. " * 60
OTHERS = "Pack my box with five dozen jugs of wine; how vexingly quick a daft zebra can jump. " * 20
DIMS = ((2, 2, 8, 8), (2, 1, 8, 4))
MEASURE = ("--text", "text.txt", "--tokens", "64", "--lengths", "16,32")
HEAL = ("--teacher", "llama", "--text", "text.txt", "--tokens", "128", "--context", "16", "--evaluations", "2")
TRAIN = ("--tokens", "384", "--batch", "4", "--evaluations", "3", "--precision", "fp32", "--lr", "0.01")
RUN = ("--text", "text.txt", "--eval-text", "text.txt", "--tokens", "64", "--eval-tokens", "256", "--no-speed")
PAPERS = ("allocation/bound", "depth/parameters")


def build(folder: Path) -> None:
    """Make all artefacts in ``folder``."""
    folder.mkdir(parents=True)
    _models(folder)
    _data(folder)
    _plans(folder)
    for name, options in (("llama", MEASURE), ("bert", MEASURE), ("vit", ("--inputs", "inputs.npz", "--tokens", "64"))):
        _do(folder, ["inspect", name, *options, "-o", f"profile-{name}"])
    _do(
        folder,
        ["inspect", "llama", *MEASURE, "-o", "begun"],
        [lambda: _stop_after(1, "headwise.steps.inspect.work")],
        9,
    )
    _do(folder, ["plan", "profile-llama", "--keep-kv", "0.5", "--multiple-of", "2", "-o", "plan.json"])
    _do(folder, ["compress", "llama", "--plan", "plan.json", "--profile", "profile-llama", "-o", "reduced"])
    _do(folder, ["heal", "reduced", *HEAL, "-o", "healed"], [lambda: _stop_after(3, "headwise.training.work")], 9)
    texts = ("--plan", "usual.json", "--data", "text.txt", *TRAIN)
    _do(folder, ["train", *texts, "-o", "trained"], [lambda: _stop_after(3, "headwise.training.work")], 9)
    _do(folder, ["compare", "usual.json", "other.json", "--data", "text.txt", *TRAIN, "--seeds", "2", "-o", "compared"])
    for name in PAPERS:
        _do(folder, ["papers", "run", name, "-o", "papers"])
    _do(folder, ["run", "llama", *RUN, "--heal-tokens", "128", "-o", "run"])


def _do(folder: Path, arguments: Sequence[str], patches: Sequence[Patch] = (), code: int = 0) -> None:
    ended = run_command(arguments, folder, patches=patches, seconds=120)
    if ended.code != code:
        raise RuntimeError(f"headwise {' '.join(arguments)} ended with {ended.code}:\n{ended.stdout}{ended.stderr}")


def _stop_after(count: int, room: str) -> None:
    """End the process as a kill would, when the modules ``room`` has written so many files of tensors."""
    module, left = sys.modules[room], [count]
    write = module.write_tensors

    def stopping(*args, **kwargs) -> None:
        write(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os._exit(9)

    module.write_tensors = stopping
    if hasattr(module, "SECONDS_BETWEEN"):
        module.SECONDS_BETWEEN = -1.0


def _models(folder: Path) -> None:
    for name, kind in (("llama", "llama"), ("bert", "bert"), ("classifier", "roberta"), ("vit", "vit")):
        tiny(kind).save_pretrained(folder / name)
        if name != "vit":
            save_tokenizer(folder / name)
    size = '{"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}}'
    (folder / "vit" / "preprocessor_config.json").write_text(size)


def _data(folder: Path) -> None:
    from PIL import Image

    draws = np.random.default_rng(0)
    (folder / "text.txt").write_text(SENTENCES)
    (folder / "other.txt").write_text(OTHERS)
    (folder / "labels.tsv").write_text("0\tthe quick fox\n1\tthe lazy dog\n" * 3)
    pixels = draws.standard_normal((12, 3, 12, 12)).astype(np.float32)
    np.savez(folder / "inputs.npz", pixel_values=pixels)
    np.savez(folder / "labelled.npz", pixel_values=pixels, labels=np.arange(12) % 3)
    (folder / "pictures").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(draws.integers(0, 255, (16, 20, 3), dtype=np.uint8)).save(folder / "pictures" / name)


def _plans(folder: Path) -> None:
    for name, family, blueprint in (
        ("usual", "llama", Blueprint(32, Text(300, 16, tied=True))),
        ("other", "llama", Blueprint(40, Text(300, 16, tied=True))),
        ("seeing", "vit", Blueprint(32, Images(12, 4, 3, 3))),
    ):
        shape = blueprint.shape(family, 16, DIMS)
        layers = tuple(LayerPlan(*layer) for layer in DIMS)
        Plan.make(shape, layers, blueprint=blueprint).save(folder / f"{name}.json")
