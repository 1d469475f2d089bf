"""From a plan to a model folder that others can open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from headwise.families.cut import Kept
from headwise.families.load import open_model, open_shape
from headwise.families.measured import kept_directions
from headwise.families.save import save_student
from headwise.families.student import Format, build_student, settle_plan
from headwise.records.errors import InputError
from headwise.records.files import check_free
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.shape import ModelShape

Method = Literal["auto", "weighted", "svd"]


def compress(
    source: str,
    plan_file: Path,
    output: Path,
    form: Format = "auto",
    command: str = "",
    method: Method = "auto",
    profile: Path | None = None,
) -> dict[str, Any]:
    """Reduce the model at ``source`` as planned, write it to ``output``, and return what the check of it found.

    "weighted" cuts along the directions that the plan's profile found to matter (``profile`` says where it is now),
    "svd" by the weights alone; "auto" does the first where there is a profile.
    """
    check_free(output)
    plan = Plan.load(plan_file)
    shape = open_shape(source)
    plan.check(shape)  # before any weight is read
    folder = None if method == "svd" else _profile_folder(plan, plan_file, profile)
    if folder is None and (method == "weighted" or profile is not None):
        raise InputError("The measurements this plan was made from are not there; name their folder with --profile.")
    kept = None if folder is None else _measured(folder, shape, plan)
    model = open_model(source)
    plan = settle_plan(model, plan, form)
    student = build_student(model, plan, kept=kept, form=form)
    found = save_student(student, output, plan=plan, source=source, command=command)
    return {**found, "method": "svd" if kept is None else "weighted"}


def _profile_folder(plan: Plan, plan_file: Path, given: Path | None) -> Path | None:
    """Where the profile is: where the caller says, where it was, or beside the plan."""
    named = [Path(plan.profile)] if plan.profile else []
    places = [given] if given is not None else [*named, plan_file.parent]
    return next((place for place in places if (place / "profile.safetensors").is_file()), None)


def _measured(folder: Path, shape: ModelShape, plan: Plan) -> dict[int, Kept]:
    if Profile.load(folder / "profile.json").shape != shape:
        raise InputError(f"{folder} holds the profile of another model.")
    return kept_directions(shape, plan, load_file(folder / "profile.safetensors"))
