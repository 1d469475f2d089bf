"""From a model and some text to a profile: what every head really uses, and how much the loss would feel its cuts."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from headwise import __version__
from headwise.checkpoints.loaded import Loaded
from headwise.checkpoints.profile_tensors import HELD_OUT, INPUTS, batch_tensors
from headwise.checkpoints.profiled import Profile
from headwise.data.calibration import Calibration, check_reads_text, text_calibration
from headwise.data.ready import are_batches, input_calibration
from headwise.data.texts import texts_of
from headwise.data.windows import has_chat
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.linalg.maps import TOLERANCES
from headwise.linalg.masks import CAUSAL_BLOCK
from headwise.records.settings import InspectConfig, OpenConfig, ReadConfig
from headwise.records.shape import ModelShape
from headwise.steps.inspect.summarise import layer_profile, layer_tensors
from headwise.steps.inspect.work import Work
from headwise.tracing.collect import Collector
from headwise.tracing.placement import running

SPECTRAL_TOKENS = 1024  # spectra of whole attention maps are dear: taken on a few batches of each length only


@dataclass(frozen=True, slots=True)
class Measurement:
    """A model that is ready to be measured. ``inputs_hash`` tells this measurement from any other."""

    loaded: Loaded
    shape: ModelShape
    calibration: Calibration
    config: InspectConfig
    opening: OpenConfig | None
    settings: dict[str, Any]
    inputs_hash: str

    def take(self, progress: Progress = silent, work: Work | None = None) -> Profile:
        """The profile, unchecked. With ``work`` it continues where an earlier process was stopped."""
        collector = Collector(self.loaded.model, self.shape, maps=self.config.maps, positions=self.config.positions)
        self._collect(collector, work, progress)
        numbers = range(len(self.shape.layers))
        tensors = {name: value for i in numbers for name, value in layer_tensors(collector, i).items()}
        tensors |= batch_tensors(self.calibration.batches, INPUTS) | batch_tensors(self.calibration.held_out, HELD_OUT)
        profile = Profile(
            model={
                "source": self.loaded.place(),
                "class": type(self.loaded.model).__name__,
                "parameters": self.shape.total_parameters(),
                "fingerprint": self.loaded.fingerprint(),
            },
            shape=self.shape,
            text={
                "name": self.calibration.name,
                "sha256": self.calibration.sha256,
                "tokens": self.calibration.tokens,
                "unseen": self.calibration.unseen,
            },
            settings=self.settings,
            versions=_versions(),
            layers=tuple(layer_profile(collector, i) for i in numbers),
            inputs_hash=self.inputs_hash,
            notes=tuple(self.calibration.notes),
            tensors=tensors,
        )
        check_usable(profile, self.loaded.name)
        return profile

    def _collect(self, collector: Collector, work: Work | None, progress: Progress) -> None:
        """Both passes over all batches, from where an earlier run stopped."""
        done, state = (0, {}) if work is None else work.load()
        collector.resume(state)
        batches = self.calibration.batches
        total = 2 * len(batches)
        spectral = _spectral(self.calibration)
        for number in range(done, total):
            progress(number, total, "watching" if number < len(batches) else "differentiating")
            if number < len(batches):
                collector.watch(batches[number], spectra=number in spectral)
            else:
                if not collector.units:
                    collector.prepare()
                collector.differentiate(batches[number - len(batches)], self.config.seed + number)
            if work is not None:
                work.save(number + 1, collector.state())
        if not collector.units:
            collector.prepare()
        progress(total, total, "leaving out")
        collector.finish(batches, progress)
        progress(total, total, "writing")


@contextmanager
def prepared(
    loaded: Loaded, *, text: Any, inputs: Any, config: InspectConfig, reading: ReadConfig, opening: OpenConfig | None
) -> Generator[Measurement, None, None]:
    """A measurement that can be taken while the block lasts; after it the model is as it was.

    ``text`` and ``inputs`` are what `headwise.inspect` takes.
    """
    if config.tokens < 1:
        raise InputError(f"{config.tokens} tokens are asked for; at least 1 is needed.")
    if text is not None and inputs is not None:
        raise InputError("Give text or inputs, not both.")
    if are_batches(text):
        text, inputs = None, text
    weights, opening = loaded.fingerprint(), loaded.opening(opening)
    with running(loaded.model, opening) as model:
        shape = shape_of(model)
        trusted = loaded.trust_remote_code
        if inputs is not None:
            calibration = input_calibration(model, loaded.name, inputs, config.tokens, trust_remote_code=trusted)
        else:
            check_reads_text(model, loaded.name)
            tokenizer = loaded.tokenizer()
            calibration = text_calibration(
                model,
                shape,
                loaded.name,
                tokenizer,
                texts_of(text, reading.text_format, chat=has_chat(tokenizer)),
                config.tokens,
                context=config.context,
                lengths=config.lengths,
                accept=reading.accept_text,
            )
        settings: dict[str, Any] = {
            "tokens": config.tokens,
            "context": max((batch.inputs[model.main_input_name].shape[1] for batch in calibration.batches), default=0),
            "lengths": sorted({length for batch in calibration.batches for length in batch.lengths}),
            "seed": config.seed,
            "spectral_tokens": SPECTRAL_TOKENS,
            "tolerances": list(TOLERANCES),
            "mask_block": CAUSAL_BLOCK,
            "maps": config.maps,
        }
        if config.positions:
            settings["positions"] = True
        if opening is not None and opening.dtype != "auto":
            settings["dtype"] = opening.dtype
        inputs_hash = _hash(weights, loaded.files(), calibration.sha256, settings, __version__)
        yield Measurement(loaded, shape, calibration, config, opening, settings, inputs_hash)


def check_usable(profile: Profile, source: str) -> None:
    """Raise where what was measured could not be read again: huge weights or inputs overflow on the way."""
    try:
        profile.check("profile")
    except InputError as error:
        raise InputError(
            f"What was measured of {source} cannot be used, its weights or inputs are too large: {error}"
        ) from None


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


def _hash(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"headwise": __version__, "python": platform.python_version(), **packages}
