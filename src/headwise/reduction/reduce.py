"""A model, a plan and a profile's tensors in, the reduced model out: cut along chosen directions, then refitted.

Where its cache is rounded, levels are fitted once the weights that make keys and values are final; then outputs, to
what attention reads out of that cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.profile_tensors import HELD_OUT, INPUTS, profiled_batches
from headwise.families.known import family_of
from headwise.families.mlp import mlp_of
from headwise.families.sites import base_type, sites_of
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.records.plan import Plan
from headwise.reduction.apply import Method
from headwise.reduction.build import Format, build_reduced, settle_plan
from headwise.reduction.levels import fit_cache, rounds_cache
from headwise.reduction.widths.refit import Piece, refit_model
from headwise.runtime.cache import CacheSpec
from headwise.tracing.fisher import Distance, measure_distance
from headwise.tracing.rounding import rounding

DEFAULT_REFIT: tuple[Piece, ...] = ("queries", "outputs", "downs")


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduced model, the plan as it was carried out, and what was refitted.

    ``cut`` and ``refitted`` tell how far it was from the dense model on held-out inputs before and after the last refit
    that was tried, ``distance`` how far it is now; None where none was. A refit that does not bring it nearer is not
    kept. ``codes`` say how its cache is packed.
    """

    model: PreTrainedModel
    plan: Plan
    refit: Collection[Piece] = ()
    cut: float | None = None
    refitted: float | None = None
    distance: Distance | None = None
    codes: CacheSpec | None = None


def reduce_model(
    model: PreTrainedModel,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    method: Method = "weighted",
    form: Format = "auto",
    refit: Collection[Piece] = DEFAULT_REFIT,
    progress: Progress = silent,
) -> Reduced:
    """``model`` reduced as ``plan`` says; it shares all weights that it does not change with it.

    ``tensors`` are those of a profile.
    """
    dtype = model.dtype
    if refit and dtype != torch.float32 and model.device.type == "cpu":
        model.float()  # half precision is slow on a CPU, and least squares want more digits
    plan = settle_plan(model, plan, form, tensors=tensors, method=method)
    built = build_reduced(model, plan, tensors=tensors, method=method, form=form, share=True)
    reduced = Reduced(built, plan)
    if refit and any(not change.exact for changes in plan.layers for change in changes):
        reduced = _refit(model, reduced, tensors, refit, progress)
    if rounds_cache(plan):
        if not tensors:
            raise InputError("Rounding the cache needs the text of a profile; name its folder with `profile`.")
        codes = fit_cache(built, plan, tensors, profiled_batches(tensors, INPUTS), progress=progress)
        reduced = replace(reduced, codes=codes, distance=None)
        if "outputs" in refit and not family_of(base_type(model.config)).latent:
            reduced = _refit(model, reduced, tensors, ("outputs",), progress)
    for parameter in reduced.model.parameters():
        parameter.data = parameter.data.to(dtype)
    if reduced.codes is not None:
        reduced = replace(reduced, codes=replace(reduced.codes, fingerprint=fingerprint(reduced.model)))
    return reduced


def _refit(
    model: PreTrainedModel,
    reduced: Reduced,
    tensors: Mapping[str, Tensor],
    pieces: Collection[Piece],
    progress: Progress,
) -> Reduced:
    """``reduced`` fitted to ``model``, if that brings it nearer on inputs that it was not fitted to."""
    batches, held_out = profiled_batches(tensors, INPUTS), profiled_batches(tensors, HELD_OUT)
    if not held_out:
        return reduced
    fitted = reduced.model
    before = {name: tensor.clone() for name, tensor in fitted_state(fitted).items()}

    def distance() -> Distance:
        with rounding(fitted, reduced.codes):
            return measure_distance(model, fitted, held_out)

    cut = refitted = distance()
    inputs, checked = ([batch.inputs for batch in each] for each in (batches, held_out))
    for tried in _tries(reduced.plan, pieces):
        refit_model(model, fitted, reduced.plan, inputs, tried, progress, checked, reduced.codes)
        refitted = distance()
        if refitted.error < cut.error:
            done = tuple(dict.fromkeys((*reduced.refit, *tried)))
            return replace(reduced, refit=done, cut=cut.error, refitted=refitted.error, distance=refitted)
        with torch.no_grad():
            for name, tensor in fitted_state(fitted).items():
                tensor.copy_(before[name])
    return replace(reduced, cut=cut.error, refitted=refitted.error, distance=cut)


def _tries(plan: Plan, pieces: Collection[Piece]) -> list[tuple[Piece, ...]]:
    """What to refit, all that is asked for first: each piece may do more harm than good, outputs above all."""
    cut = any(change.acts_on in ("mlp", "blocks") for changes in plan.layers for change in changes)
    wanted = tuple(piece for piece in pieces if cut or piece != "downs")
    smaller = [tuple(piece for piece in wanted if piece not in out) for out in (("downs",), ("outputs",))]
    return [tried for tried in dict.fromkeys((wanted, *smaller)) if tried]


def fitted_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of the attention layers, and of the last projections of MLPs, by name."""
    modules = {}
    for site in sites_of(model):
        modules |= {site.path: site.module, f"{site.path}.out": site.out}
        if (mlp := mlp_of(site)) is not None:
            modules[f"{site.path}.down"] = mlp.down
    return {
        f"{path} {name}": tensor for path, module in modules.items() for name, tensor in module.state_dict().items()
    }
