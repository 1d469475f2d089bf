"""From a model and some text to a profile: what every head really uses, and how much the loss would feel its cuts."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from headwise import __version__
from headwise.families.calibration import Calibration, file_calibration, text_calibration
from headwise.families.fingerprint import files_fingerprint, fingerprint, located
from headwise.families.load import open_model
from headwise.families.shapes import shape_of
from headwise.families.tensor_files import write_tensors
from headwise.families.texts import read_texts
from headwise.linalg.maps import TOLERANCES
from headwise.linalg.masks import CAUSAL_BLOCK
from headwise.records.errors import InputError
from headwise.records.profile import Profile
from headwise.records.shape import ModelShape
from headwise.report.page import write_page
from headwise.steps.inspect.checks import TOKENS as CHECK_TOKENS
from headwise.steps.inspect.checks import check_predictions
from headwise.steps.inspect.collect import Collector
from headwise.steps.inspect.summarise import layer_profile, layer_tensors
from headwise.steps.inspect.work import Work

SPECTRAL_TOKENS = 1024  # spectra of whole attention maps are dear: taken on a few batches of each length only
PROFILE, TENSORS, PAGE = "profile.json", "profile.safetensors", "report.html"
Progress = Callable[[int, int, str], None]


def inspect(
    source: str,
    output: Path,
    *,
    texts: Iterable[str] = (),
    inputs: Path | None = None,
    tokens: int = 8192,
    lengths: tuple[int, ...] | None = None,
    seed: int = 0,
    maps: bool = True,
    progress: Progress = lambda done, total, what: None,
) -> Profile:
    """Measure the model at ``source`` and write profile.json, profile.safetensors and report.html into ``output``.

    Without ``maps`` only what planning and compressing need is measured, in less than half the time, without a page.

    ``texts`` are files ("-": standard input; none: the text that comes with headwise), ``inputs`` a folder of
    pictures or a .npz file for models that do not read text. A result that is there already for the same inputs is
    returned as it is; an unfinished one is continued.
    """
    texts = list(texts)
    if tokens < 1:
        raise InputError(f"{tokens} tokens are asked for; at least 1 is needed.")
    if texts and inputs is not None:
        raise InputError("Give text or inputs, not both.")
    _check_output(output, source)
    model = open_model(source)
    if not torch.cuda.is_available():
        model.float()  # half precision is slow on a CPU
    shape = shape_of(model)
    calibration = _calibration(model, shape, source, texts, inputs, tokens, lengths)
    settings = {
        "tokens": tokens,
        "lengths": sorted({length for batch in calibration.batches for length in batch.lengths}),
        "seed": seed,
        "spectral_tokens": SPECTRAL_TOKENS,
        "tolerances": list(TOLERANCES),
        "mask_block": CAUSAL_BLOCK,
        "maps": maps,
    }
    weights = fingerprint(model)
    inputs_hash = _hash(weights, files_fingerprint(source), calibration.sha256, settings, __version__)
    known = _known(output, inputs_hash)
    if known is not None:
        return known
    if torch.cuda.is_available():
        cast(Any, model).to("cuda")
    work = Work(output, inputs_hash)
    collector = _collect(Collector(model, shape, maps=maps), calibration, work, seed, progress)
    profile = Profile(
        model={
            "source": located(source),
            "class": type(model).__name__,
            "parameters": shape.total_parameters(),
            "fingerprint": weights,
        },
        shape=shape,
        text={"name": calibration.name, "sha256": calibration.sha256, "tokens": calibration.tokens},
        settings=settings,
        versions=_versions(),
        layers=tuple(layer_profile(collector, i) for i in range(len(shape.layers))),
        inputs_hash=inputs_hash,
        notes=tuple(calibration.notes),
    )
    tensors = {name: value for i in range(len(shape.layers)) for name, value in layer_tensors(collector, i).items()}
    main = [batch.inputs for batch in calibration.batches if batch.main]
    tensors |= {f"inputs.{n}.{name}": value for n, inputs in enumerate(main) for name, value in inputs.items()}
    if maps:
        some = main[-max(1, CHECK_TOKENS // calibration.batches[0].tokens) :]
        profile = replace(profile, checks=check_predictions(model, profile, tensors, some))
    facts = {"headwise": "profile", "inputs_hash": inputs_hash, "fingerprint": weights}
    write_tensors(output / TENSORS, tensors, facts)
    if maps:
        write_page(profile, output / PAGE)
    profile.save(output / PROFILE)
    work.finish()
    return profile


def _collect(collector: Collector, calibration: Calibration, work: Work, seed: int, progress: Progress) -> Collector:
    """Both passes over all batches, from where an earlier run stopped."""
    done, state = work.load()
    collector.resume(state)
    second = [batch for batch in calibration.batches if batch.main]
    first = calibration.batches if collector.maps else second
    total = len(first) + len(second)
    spectral = _spectral(calibration)
    for number in range(done, total):
        progress(number, total, "watching" if number < len(first) else "differentiating")
        if number < len(first):
            collector.watch(first[number], spectra=number in spectral)
        else:
            if not collector.units:
                collector.prepare()
            collector.differentiate(second[number - len(first)], seed + number)
        work.save(number + 1, collector.state())
    if not collector.units:
        collector.prepare()
    progress(total, total, "writing")
    return collector


def _spectral(calibration: Calibration) -> set[int]:
    """Numbers of the batches whose maps get full spectra: of each length some from the middle of the text."""
    by_length: dict[tuple[int, ...], list[int]] = {}
    for number, batch in enumerate(calibration.batches):
        by_length.setdefault(batch.lengths, []).append(number)
    chosen: set[int] = set()
    for numbers in by_length.values():
        count = max(1, SPECTRAL_TOKENS // max(1, calibration.batches[numbers[0]].tokens))
        first = max(0, (len(numbers) - count) // 2)
        chosen.update(numbers[first : first + count])
    return chosen


def _calibration(
    model: PreTrainedModel,
    shape: ModelShape,
    source: str,
    texts: list[str],
    inputs: Path | None,
    tokens: int,
    lengths: tuple[int, ...] | None,
) -> Calibration:
    if inputs is not None:
        return file_calibration(model, source, inputs, tokens)
    return text_calibration(model, shape, source, *read_texts(texts), tokens, lengths)


def _check_output(output: Path, source: str) -> None:
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; give a folder.")
    if output.resolve() == Path(source).expanduser().resolve():
        raise InputError(f"{output} is the model's own folder; give another one with -o.")


def _known(output: Path, inputs_hash: str) -> Profile | None:
    """The finished profile in ``output``, if there is one of the same inputs."""
    if not (output / PROFILE).exists():
        return None
    profile = Profile.load(output / PROFILE)
    if profile.inputs_hash != inputs_hash:
        raise InputError(
            f"{output} holds a profile of something else: {profile.model.get('source')} on "
            f"{profile.settings.get('tokens')} tokens of {profile.text.get('name')}, by headwise "
            f"{profile.versions.get('headwise')}. Give another folder with -o, or remove that one."
        )
    if not (output / TENSORS).exists():
        return None
    if profile.settings["maps"] and not (output / PAGE).exists():
        write_page(profile, output / PAGE)
    return profile


def _hash(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"headwise": __version__, "python": platform.python_version(), **packages}
