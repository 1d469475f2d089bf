"""From a plan to a model folder that others can open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.load import open_model, open_shape
from headwise.families.measured import kept_directions
from headwise.families.refit import Piece, can_refit, refit_student
from headwise.families.save import save_student
from headwise.families.shapes import shape_of
from headwise.families.student import Format, build_student, settle_plan
from headwise.families.token_weighted import token_weighted
from headwise.records.errors import InputError
from headwise.records.files import check_free
from headwise.records.plan import LayerPlan, Plan
from headwise.records.profile import Profile
from headwise.records.shape import ModelShape

Method = Literal["auto", "weighted", "token-weighted", "svd"]
INPUTS = "inputs."
DEFAULT_REFIT: tuple[Piece, ...] = ("queries", "outputs")


def compress(
    source: str,
    plan_file: Path,
    output: Path,
    form: Format = "auto",
    command: str = "",
    method: Method = "auto",
    profile: Path | None = None,
    refit: Collection[Piece] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
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
    tensors = {} if folder is None else _tensors(folder, shape)
    model = open_model(source)
    student, plan, done = reduce_model(model, plan, tensors, method, form, refit, progress)
    facts = {"method": method, "refit": list(done)}
    found = save_student(student, output, plan=plan, source=source, command=command, facts=facts)
    return {**found, **facts}


def reduce_model(
    model: PreTrainedModel,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    method: Method = "weighted",
    form: Format = "auto",
    refit: Collection[Piece] = DEFAULT_REFIT,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> tuple[PreTrainedModel, Plan, Collection[Piece]]:
    """The student of ``model`` under ``plan``, the plan as it was carried out, and what of it was refitted.

    The student shares all weights outside the attention with ``model``. ``tensors`` are those of a profile.
    """
    dtype, shape = model.dtype, shape_of(model)
    if refit and dtype != torch.float32 and model.device.type == "cpu":
        model.float()  # half precision is slow on a CPU, and least squares want more digits
    kept = None
    if method == "token-weighted":
        plan, kept = token_weighted(model, shape.layers, plan, tensors)
    elif method == "weighted":
        kept = kept_directions(shape, plan, tensors)
    plan = settle_plan(model, plan, form)
    student = build_student(model, plan, kept=kept, form=form, share=True)
    cut = any(change != LayerPlan.full(layer) for layer, change in zip(shape.layers, plan.layers, strict=True))
    done: Collection[Piece] = refit if cut and can_refit(model) else ()
    if done:
        refit_student(model, student, plan, _inputs(tensors), done, progress)
    for parameter in student.parameters():
        parameter.data = parameter.data.to(dtype)
    return student, plan, done


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
    return next((place for place in places if (place / "profile.safetensors").is_file()), None)


def _tensors(folder: Path, shape: ModelShape) -> dict[str, Tensor]:
    if Profile.load(folder / "profile.json").shape != shape:
        raise InputError(f"{folder} holds the profile of another model.")
    return load_file(folder / "profile.safetensors")


def _inputs(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The batches a profile was measured on, from its tensors ``inputs.<number>.<name>``."""
    batches: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(INPUTS):
            number, name = key.removeprefix(INPUTS).split(".", 1)
            batches.setdefault(int(number), {})[name] = tensor
    if not batches:
        raise InputError("This profile does not hold the text it was measured on; inspect the model again.")
    return [cast(dict[str, Tensor], batches[number]) for number in sorted(batches)]
