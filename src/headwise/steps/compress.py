"""From a plan to a reduced model: in memory, or to a folder that others can open."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from torch import Tensor
from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.load import open_model, open_shape
from headwise.checkpoints.opened import placed
from headwise.checkpoints.origin import Origin, origin_of, remember, source_of
from headwise.checkpoints.profile_tensors import check_profile_inputs
from headwise.checkpoints.profiled import TENSORS, Profile, check_measured
from headwise.checkpoints.save import write_model
from headwise.data.fitness import check_settings
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_free
from headwise.records.plan import Plan, changed
from headwise.records.settings import CompressConfig, OpenConfig
from headwise.records.shape import ModelShape
from headwise.reduction.apply import Method
from headwise.reduction.reduce import DEFAULT_REFIT, reduce_model
from headwise.reduction.widths.refit import Piece


@dataclass(frozen=True, slots=True)
class _Names:
    """What to call things in sentences about what is wrong with them."""

    plan: str = "`plan`"
    model: str = "`model`"
    profile: str = "`profile`"


def compress_model(
    model: PreTrainedModel,
    plan: Plan,
    profile: Profile | None = None,
    config: CompressConfig | None = None,
    *,
    progress: Progress = silent,
) -> PreTrainedModel:
    """``model`` reduced as ``plan`` says, on its device and in its dtype; ``model`` itself is left as it was.

    Cut along the directions that ``profile`` found to matter and refitted to ``model``; ``config`` can say otherwise.
    Without a profile the one in the folder that the plan names is taken; if that is gone, the weights alone decide,
    which is ruinous for trained models. `hw.plan_of` gives the plan as it was carried out, `hw.save` saves the result.

    >>> small = hw.compress(model, plan, profile)
    >>> hw.cost(small).kv_bytes < hw.cost(model).kv_bytes
    True
    """
    config, names = config or CompressConfig(), _Names()
    measured = profile
    if measured is None and config.method != "svd" and (folder := _folder(plan)) is not None:
        measured = Profile.load(folder)
    shape = shape_of(model)
    plan.check(shape)
    _check_profile(measured, shape, names)
    way = _Way.chosen(config, measured is not None, asked_for=profile is not None)
    before = origin_of(model)
    working = copy.deepcopy(model).eval()  # what is reduced shares tensors with it, and may turn it into float32
    small, origin, _ = _reduce(working, fingerprint(model), plan, measured, way, names, progress)
    source = source_of(model) or ("" if before is None else before.source)
    tokenizer = None if before is None else before.tokenizer
    return remember(small.train(model.training), replace(origin, source=source, tokenizer=tokenizer))


@locking("output")
def compress(
    source: str,
    plan_file: Path,
    output: Path,
    *,
    profile: Path | None = None,
    config: CompressConfig | None = None,
    opening: OpenConfig | None = None,
    command: str = "",
    model: PreTrainedModel | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Reduce the model at ``source`` as planned, write it to ``output``, and return what the check of it found.

    ``profile`` says where the plan's profile is now, if it has moved; ``opening`` on which device it is reduced, and in
    which dtype it is saved if not in its own. ``model`` is the one at ``source``, where it is open already: it is used
    up.
    """
    check_free(output)
    config, opening, plan = config or CompressConfig(), opening or OpenConfig(), Plan.load(plan_file)
    shape = open_shape(source)
    plan.check(shape)  # before any weight is read
    folder = None if config.method == "svd" else _folder(plan, plan_file, profile)
    way = _Way.chosen(config, folder is not None, asked_for=profile is not None)
    measured = None if folder is None else Profile.load(folder)
    names = _Names(str(plan_file), source, str(folder))
    _check_profile(measured, shape, names)
    model = open_model(source) if model is None else model
    check_settings(model, source)
    weights = fingerprint(model)
    model = placed(model, opening.device, opening.dtype)
    small, origin, notes = _reduce(model, weights, plan, measured, way, names, progress)
    report = write_model(small, output, replace(origin, source=source), command=command)
    return {**report, **origin.facts, "notes": [*report["notes"], *notes]}


@dataclass(frozen=True, slots=True)
class _Way:
    """How weights are cut, what is refitted, and in which format."""

    method: Method
    refit: tuple[Piece, ...]
    config: CompressConfig

    @classmethod
    def chosen(cls, config: CompressConfig, measured: bool, *, asked_for: bool) -> _Way:
        """What ``config`` says or leaves to whether there is a profile; raises where one is needed and not there."""
        if not measured and (config.method not in ("auto", "svd") or (asked_for and config.method != "svd")):
            raise InputError(
                "The measurements this plan was made from are not there; name their folder with `profile`."
            )
        method = config.method
        if method == "auto":
            method = "weighted" if measured else "svd"
        default = DEFAULT_REFIT if method == "weighted" else ()
        refit = default if config.refit is None else read_pieces(config.refit)
        if refit and not measured:
            raise InputError(
                "Fitting needs the text of a profile; name its folder with `profile`, or use `refit` none."
            )
        return cls(method, refit, config)


def _reduce(
    model: PreTrainedModel,
    weights: str,
    plan: Plan,
    measured: Profile | None,
    way: _Way,
    names: _Names,
    progress: Progress,
) -> tuple[PreTrainedModel, Origin, list[str]]:
    """``model`` of the fingerprint ``weights`` reduced and used up; how; what a person should know of the profile."""
    if plan.fingerprint not in ("", weights):
        raise InputError(
            f"{names.plan} was made for another model: {names.model} has the same shape, but other weights."
        )
    notes: list[str] = []
    tensors: Mapping[str, Tensor] = {}
    if measured is not None:
        tensors = measured.tensors
        notes = check_measured(measured, names.profile, names.model, weights)
    check_profile_inputs(model, tensors)
    _check_packed(plan, shape_of(model), names)
    reduced = reduce_model(model, plan, tensors, way.method, way.config.format, way.refit, progress)
    facts = {
        "method": way.method,
        "refit": list(reduced.refit),
        "cut": reduced.cut,
        "refitted": reduced.refitted,
    }
    made = replace(reduced.plan, fingerprint=weights)
    return reduced.model, Origin(made, facts=facts, codes=reduced.codes), notes


def read_pieces(text: str) -> tuple[Piece, ...]:
    """The pieces that ``text`` like "queries,outputs" (or "none") names."""
    if text == "none":
        return ()
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in get_args(Piece)]
    if unknown or {"queries", "temperature"} <= set(names):
        raise InputError(f"Fit queries or temperature, outputs and downs, or none; got {text!r}.")
    return cast(tuple[Piece, ...], names)


def _check_packed(plan: Plan, shape: ModelShape, names: _Names) -> None:
    """Raise where ``plan`` would leave a layer without the codes of its packed cache."""
    for index, (layer, changes) in enumerate(zip(shape.layers, plan.layers, strict=True)):
        after = changed(layer, changes)
        if layer.packed and after is not None and after.packed and not any(c.code_bits(layer) for c in changes):
            raise InputError(
                f"{names.model} has a packed cache, which {names.plan} does not say how to pack in layer {index}: "
                "reduce the model that it was made from, and round its cache in the same plan."
            )


def _check_profile(measured: Profile | None, shape: ModelShape, names: _Names) -> None:
    if measured is not None and measured.shape != shape.as_known_to(measured.shape):
        raise InputError(f"{names.profile} holds the profile of another model.")


def _folder(plan: Plan, plan_file: Path | None = None, given: Path | None = None) -> Path | None:
    """Where the profile is: where the caller says, where it was, or beside the plan."""
    beside = [] if plan_file is None else [plan_file.parent]
    named = [Path(plan.profile)] if plan.profile else []
    places = [given] if given is not None else [*named, *beside]
    return next((place for place in places if (place / TENSORS).is_file()), None)
