"""A profile and its tensors, checked to belong to each other and to a model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from headwise.checkpoints.profile_tensors import check_profile_tensors
from headwise.checkpoints.tensor_files import open_tensors
from headwise.files.errors import InputError
from headwise.records.profile import Profile

PROFILE, TENSORS = "profile.json", "profile.safetensors"


def open_profile(folder: Path) -> tuple[Profile, dict[str, Tensor]]:
    """The profile in ``folder`` and its tensors, or an `InputError` where they are of different measurements."""
    profile = Profile.load(folder / PROFILE)
    facts, tensors = open_tensors(folder / TENSORS)
    check_profile_tensors(folder / TENSORS, profile.shape, tensors)
    if facts.get("inputs_hash") != profile.inputs_hash or facts.get("fingerprint", "") != profile.fingerprint:
        raise InputError(f"{folder / TENSORS} is not of the measurement that {folder / PROFILE} tells of.")
    return profile, tensors


def check_measured(profile: Profile, folder: Path, source: str, weights: str) -> list[str]:
    """Raise where the profile in ``folder`` is not of the model at ``source``, whose fingerprint is ``weights``.

    Returns notes for the user: profiles of earlier versions have no fingerprint to compare.
    """
    if not profile.fingerprint:
        return [f"{folder} does not say which weights it was measured on; inspect the model again to be sure."]
    if profile.fingerprint != weights:
        raise InputError(
            f"{folder} holds the profile of another model: {source} has the same shape, but other weights."
        )
    return []
