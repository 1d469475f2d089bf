"""From a plan to a model folder that others can open."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.load import open_model, open_shape
from headwise.checkpoints.profile_tensors import check_profile_inputs
from headwise.checkpoints.profiled import TENSORS, Profile, check_measured
from headwise.checkpoints.save import save_student
from headwise.data.fitness import check_settings
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_free
from headwise.records.plan import Plan
from headwise.reduction.build import Format
from headwise.reduction.reduce import DEFAULT_REFIT, Method, reduce_model
from headwise.reduction.widths.refit import Piece


@locking("output")
def compress(
    source: str,
    plan_file: Path,
    output: Path,
    form: Format = "auto",
    command: str = "",
    method: Method | Literal["auto"] = "auto",
    profile: Path | None = None,
    refit: Collection[Piece] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Reduce the model at ``source`` as planned, write it to ``output``, and return what the check of it found.

    "weighted" cuts along the directions that the plan's profile found to matter (``profile`` says where it is now),
    "token-weighted" by second moments of tokens, "svd" by the weights alone; "auto" does the first where there is a
    profile. ``refit`` names what is then fitted to the whole model: by default queries and outputs of "weighted".
    """
    check_free(output)
    plan = Plan.load(plan_file)
    shape = open_shape(source)
    plan.check(shape)  # before any weight is read
    folder = None if method == "svd" else _profile_folder(plan, plan_file, profile)
    if folder is None and (method not in ("auto", "svd") or profile is not None):
        raise InputError("The measurements this plan was made from are not there; name their folder with --profile.")
    if method == "auto":
        method = "svd" if folder is None else "weighted"
    if refit is None:
        refit = DEFAULT_REFIT if method == "weighted" else ()
    if refit and folder is None:
        raise InputError("Fitting needs the text of a profile; name its folder with --profile, or use --refit none.")
    measured = None if folder is None else Profile.load(folder)
    tensors = {} if measured is None else measured.tensors
    if measured is not None and measured.shape != shape:
        raise InputError(f"{folder} holds the profile of another model.")
    model = open_model(source)
    check_settings(model, source)
    weights, notes = fingerprint(model), []
    if plan.fingerprint not in ("", weights):
        raise InputError(f"{plan_file} was made for another model: {source} has the same shape, but other weights.")
    if folder is not None and measured is not None:
        notes = check_measured(measured, folder, source, weights)
    check_profile_inputs(model, tensors)
    made = reduce_model(model, plan, tensors, method, form, refit, progress)
    facts = {"method": method, "refit": list(made.refit), "cut": made.cut, "refitted": made.refitted}
    plan = replace(made.plan, fingerprint=weights)
    found = save_student(made.model, output, plan=plan, source=source, command=command, facts=facts)
    return {**found, **facts, "notes": [*found["notes"], *notes]}


def read_pieces(text: str) -> tuple[Piece, ...]:
    """The pieces that ``text`` like "queries,outputs" (or "none") names."""
    if text == "none":
        return ()
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in get_args(Piece)]
    if unknown or {"queries", "temperature"} <= set(names):
        raise InputError(f"Fit queries or temperature, and outputs, or none; got {text!r}.")
    return cast(tuple[Piece, ...], names)


def _profile_folder(plan: Plan, plan_file: Path, given: Path | None) -> Path | None:
    """Where the profile is: where the caller says, where it was, or beside the plan."""
    named = [Path(plan.profile)] if plan.profile else []
    places = [given] if given is not None else [*named, plan_file.parent]
    return next((place for place in places if (place / TENSORS).is_file()), None)
