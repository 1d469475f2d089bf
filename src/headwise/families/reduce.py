"""A model, a plan and a profile's tensors in, the reduced model out: cut along chosen directions, then refitted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.fitness import check_inputs
from headwise.families.measured import kept_directions
from headwise.families.refit import Piece, can_refit, refit_student
from headwise.families.shapes import shape_of
from headwise.families.student import Format, build_student, settle_plan
from headwise.families.token_weighted import token_weighted
from headwise.records.errors import InputError
from headwise.records.plan import LayerPlan, Plan

Method = Literal["weighted", "token-weighted", "svd"]
DEFAULT_REFIT: tuple[Piece, ...] = ("queries", "outputs")
INPUTS = "inputs."


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
        batches = profiled_inputs(tensors)
        for batch in batches:
            check_inputs(model, batch, "The text of the profile")
        refit_student(model, student, plan, batches, done, progress)
    for parameter in student.parameters():
        parameter.data = parameter.data.to(dtype)
    return student, plan, done


def profiled_inputs(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The batches a profile was measured on, from its tensors ``inputs.<number>.<name>``."""
    batches: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(INPUTS):
            number, name = key.removeprefix(INPUTS).split(".", 1)
            batches.setdefault(int(number), {})[name] = tensor
    if not batches:
        raise InputError("This profile does not hold the text it was measured on; inspect the model again.")
    return [batches[number] for number in sorted(batches)]
