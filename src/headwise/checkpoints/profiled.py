"""A profile that owns its tensors: in a folder both files, checked against each other and against a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from torch import Tensor

from headwise.checkpoints.profile_tensors import HELD_OUT, check_profile_tensors, profiled_batches
from headwise.checkpoints.tensor_files import open_tensors, write_tensors
from headwise.data.calibration import Batch
from headwise.files.errors import InputError
from headwise.records import profile as records

PROFILE, TENSORS = "profile.json", "profile.safetensors"


@dataclass(frozen=True, slots=True)
class Profile(records.Profile):
    """A measured model: what every head uses, and the ``tensors`` that planning and compressing take up again.

    >>> profile = hw.inspect(model, tokenizer, text=texts, config=hw.InspectConfig(tokens=256))
    >>> profile.save("profile")
    >>> hw.Profile.load("profile").checks == profile.checks
    True
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, record: records.Profile, tensors: Mapping[str, Tensor]) -> Profile:
        """``record`` with its tensors."""
        return cls(**{each.name: getattr(record, each.name) for each in fields(records.Profile)}, tensors=tensors)

    def record(self) -> records.Profile:
        """The same without tensors."""
        return records.Profile(**{each.name: getattr(self, each.name) for each in fields(records.Profile)})

    def check(self, where: str) -> None:
        """Raise an `InputError` where numbers or tensors are not those of a model of this shape."""
        records.Profile.check(self, where)
        check_profile_tensors(Path(TENSORS), self.shape, self.tensors)

    def held_out(self) -> list[Batch]:
        """The inputs that were not measured on, to check predictions on."""
        return profiled_batches(self.tensors, HELD_OUT)

    def save(self, path: Path | str) -> None:
        """Write profile.json and profile.safetensors into the folder ``path``; each is there whole or not at all."""
        self.save_tensors(Path(path))
        self.record().save(Path(path) / PROFILE)

    def save_tensors(self, folder: Path) -> None:
        """Write profile.safetensors into ``folder``; a profile is finished when its profile.json is there too."""
        facts = {"headwise": "profile", "inputs_hash": self.inputs_hash, "fingerprint": self.fingerprint}
        write_tensors(folder / TENSORS, dict(self.tensors), facts)

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """The profile in the folder ``path``, or an `InputError` where its two files are of different measurements."""
        folder = Path(path)
        record = records.Profile.load(folder / PROFILE)
        facts, tensors = open_tensors(folder / TENSORS)
        check_profile_tensors(folder / TENSORS, record.shape, tensors)
        if facts.get("inputs_hash") != record.inputs_hash or facts.get("fingerprint", "") != record.fingerprint:
            raise InputError(f"{folder / TENSORS} is not of the measurement that {folder / PROFILE} tells of.")
        return cls.of(record, tensors)


def check_measured(profile: records.Profile, where: Path | str, source: str, weights: str) -> list[str]:
    """Raise where ``profile`` (from ``where``) is not of the model at ``source``, whose fingerprint is ``weights``.

    Returns notes for the user: profiles of earlier versions have no fingerprint to compare.
    """
    if not profile.fingerprint:
        return [f"{where} does not say which weights it was measured on; inspect the model again to be sure."]
    if profile.fingerprint != weights:
        raise InputError(f"{where} holds the profile of another model: {source} has the same shape, but other weights.")
    return []
