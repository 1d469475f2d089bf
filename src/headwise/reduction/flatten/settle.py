"""A plan whose joined blocks are of a model in which blocks can be joined exactly; else an error."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from headwise.families.norms import feeding_norms
from headwise.families.sites import has_one_stack, sites_of
from headwise.files.errors import InputError
from headwise.records.plan import Plan
from headwise.reduction.apply import Statistics


def settle(model: PreTrainedModel, plan: Plan, statistics: Mapping[int, Statistics | None], *, shared: bool) -> Plan:
    """``plan``, after a look at the norms and the kinds of the blocks that it joins."""
    runs = [run for run in plan.made_of() if len(run) > 1]
    if runs and not has_one_stack(model):
        raise InputError("The blocks of an encoder-decoder cannot be joined.")
    sites, kinds = sites_of(model), getattr(model.config, "layer_types", None)
    for run in runs:
        where = f"Blocks {run[0]} to {run[-1]} cannot be joined"
        if kinds is not None and len({kinds[number] for number in run}) > 1:
            raise InputError(f"{where}: their attention is of different kinds.")
        for number in run:
            if any(change.entry() for change in plan.layers[number]):
                raise InputError(f"{where}: a change of block {number} needs a block of its own.")
            feeding_norms(model, sites[number])
    return plan
