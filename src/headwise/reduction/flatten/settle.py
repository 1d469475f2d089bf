"""A plan that joins only blocks of a model that can be joined exactly; else an error."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from headwise.families.norms import check_joins
from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.records.plan import Plan
from headwise.reduction.apply import Statistics


def settle(model: PreTrainedModel, plan: Plan, statistics: Mapping[int, Statistics | None], *, shared: bool) -> Plan:
    """``plan``, after a look at the norms and the kinds of the blocks that it joins."""
    sites = sites_of(model)
    for run in plan.made_of():
        if len(run) == 1:
            continue
        if any(change.entry() for number in run for change in plan.layers[number]):
            raise InputError(
                f"Blocks {run[0]} to {run[-1]} cannot be joined: one has a change that needs a block alone."
            )
        check_joins(model, [sites[number] for number in run])
    return plan
