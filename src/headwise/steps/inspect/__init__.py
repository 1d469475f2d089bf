"""From a model and some text to a profile: what every head really uses, and how much the loss would feel its cuts."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headwise import __version__
from headwise.checkpoints.fingerprint import files_fingerprint, fingerprint, located
from headwise.checkpoints.load import open_model
from headwise.checkpoints.profile_tensors import HELD_OUT, INPUTS, batch_tensors, check_profile_tensors
from headwise.checkpoints.tensor_files import write_tensors
from headwise.data.calibration import Calibration, check_reads_text, file_calibration, text_calibration
from headwise.data.processors import open_tokenizer
from headwise.data.texts import read_texts
from headwise.data.windows import has_chat
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_writable
from headwise.linalg.maps import TOLERANCES
from headwise.linalg.masks import CAUSAL_BLOCK
from headwise.records.profile import Profile
from headwise.records.settings import TextFormat
from headwise.reduction.plans import slider
from headwise.report.page import write_page
from headwise.steps.inspect.checks import check_predictions
from headwise.steps.inspect.collect import Collector
from headwise.steps.inspect.summarise import layer_profile, layer_tensors
from headwise.steps.inspect.work import Work

SPECTRAL_TOKENS = 1024  # spectra of whole attention maps are dear: taken on a few batches of each length only
PROFILE, TENSORS, PAGE = "profile.json", "profile.safetensors", "report.html"


@locking("output")
def inspect(
    source: str,
    output: Path,
    *,
    texts: Iterable[str] = (),
    inputs: Path | None = None,
    tokens: int = 8192,
    context: int | None = None,
    lengths: tuple[int, ...] | None = None,
    text_format: TextFormat = "auto",
    accept_text: bool = False,
    seed: int = 0,
    maps: bool = True,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Profile:
    """Measure the model at ``source`` and write profile.json, profile.safetensors and report.html into ``output``.

    Without ``maps`` only what planning and compressing need is measured, in less than half the time, without a page.

    ``texts`` are files ("-": standard input; none: the text that comes with headwise, with dialogues for models that
    chat), ``inputs`` a folder of pictures or a .npz file for models that do not read text. ``context``: tokens of a
    window, by default what the model was made for, up to 4,096. ``accept_text``: even if most of its tokens say
    nothing. ``trust_remote_code`` lets a tokenizer or image processor run code of its own. A result that is there
    already for the same inputs is returned as it is; an unfinished one is continued.
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
    if inputs is not None:
        calibration = file_calibration(model, source, inputs, tokens, trust_remote_code=trust_remote_code)
    else:
        check_reads_text(model, source)
        tokenizer = open_tokenizer(source, trust_remote_code=trust_remote_code)
        calibration = text_calibration(
            model,
            shape,
            source,
            tokenizer,
            read_texts(texts, text_format, chat=has_chat(tokenizer)),
            tokens,
            context=context,
            lengths=lengths,
            accept=accept_text,
        )
    settings = {
        "tokens": tokens,
        "context": max((batch.inputs[model.main_input_name].shape[1] for batch in calibration.batches), default=0),
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
        text={
            "name": calibration.name,
            "sha256": calibration.sha256,
            "tokens": calibration.tokens,
            "unseen": calibration.unseen,
        },
        settings=settings,
        versions=_versions(),
        layers=tuple(layer_profile(collector, i) for i in range(len(shape.layers))),
        inputs_hash=inputs_hash,
        notes=tuple(calibration.notes),
    )
    tensors = {name: value for i in range(len(shape.layers)) for name, value in layer_tensors(collector, i).items()}
    tensors |= batch_tensors(calibration.batches, INPUTS) | batch_tensors(calibration.held_out, HELD_OUT)
    _check_measured(source, profile, tensors)
    if maps:
        profile = replace(profile, checks=check_predictions(model, profile, tensors, calibration.held_out, progress))
        _check_measured(source, profile, tensors)
    facts = {"headwise": "profile", "inputs_hash": inputs_hash, "fingerprint": weights}
    write_tensors(output / TENSORS, tensors, facts)
    if maps:
        write_page(profile, output / PAGE, slider(profile))
    profile.save(output / PROFILE)
    work.finish()
    return profile


def _collect(collector: Collector, calibration: Calibration, work: Work, seed: int, progress: Progress) -> Collector:
    """Both passes over all batches, from where an earlier run stopped."""
    done, state = work.load()
    collector.resume(state)
    batches = calibration.batches
    total = 2 * len(batches)
    spectral = _spectral(calibration)
    for number in range(done, total):
        progress(number, total, "watching" if number < len(batches) else "differentiating")
        if number < len(batches):
            collector.watch(batches[number], spectra=number in spectral)
        else:
            if not collector.units:
                collector.prepare()
            collector.differentiate(batches[number - len(batches)], seed + number)
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


def _check_measured(source: str, profile: Profile, tensors: dict[str, Tensor]) -> None:
    """Raise where what was measured could not be read again: huge weights or inputs overflow on the way."""
    try:
        profile.check("profile")
        check_profile_tensors(Path(TENSORS), profile.shape, tensors)
    except InputError as error:
        raise InputError(
            f"What was measured of {source} cannot be used, its weights or inputs are too large: {error}"
        ) from None


def _check_output(output: Path, source: str) -> None:
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; give a folder.")
    if output.resolve() == Path(source).expanduser().resolve():
        raise InputError(f"{output} is the model's own folder; give another one with -o.")
    check_writable(output / PROFILE)


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
        write_page(profile, output / PAGE, slider(profile))
    return profile


def _hash(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"headwise": __version__, "python": platform.python_version(), **packages}
