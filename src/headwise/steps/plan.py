"""From a profile and a budget to the widths of every layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headwise.records.allocation import Budget, allocate, default_budget, lots_of
from headwise.records.errors import InputError
from headwise.records.plan import LayerPlan, Plan
from headwise.records.profile import Profile
from headwise.records.shape import LayerShape

DEFAULT_CONTEXT = 8192


def make_plan(
    source: Path,
    output: Path,
    keep_kv: float | None,
    keep_attention_params: float | None,
    multiple: int = 8,
    context: int | None = None,
) -> tuple[Plan, Profile]:
    """Write the plan that keeps the asked share at the least predicted damage; return it and its profile.

    ``context`` matters where layers with a window cache fewer tokens than others; by default what the model was made
    for, up to 8,192.
    """
    file = source / "profile.json" if source.is_dir() else source
    profile = Profile.load(file)
    name, share = _budget(keep_kv, keep_attention_params)
    if multiple < 1:
        raise InputError(f"Widths cannot be multiples of {multiple}.")
    budget: Budget = "kv" if name == "keep_kv" else "parameters"
    if budget == "kv" and default_budget(profile) != "kv":
        raise InputError("This model has no KV cache; use --keep-attention-params.")
    lots = lots_of(profile, budget, context or min(DEFAULT_CONTEXT, profile.shape.max_tokens))
    if not lots:
        raise InputError("This model has nothing to plan: its attention is latent (MLA) or was removed.")
    full = sum(lot.price * (len(lot.damage) - 1) for lot in lots)
    widths = allocate(lots, share * full, multiple)
    layers = [LayerPlan.full(layer) for layer in profile.shape.layers]
    damage = 0.0
    for lot, width in zip(lots, widths, strict=True):
        damage += lot.damage[width] or 0.0
        layers[lot.layer] = _cut(layers[lot.layer], lot.kind, width, profile, lot.layer)
    kept = sum(lot.price * width for lot, width in zip(lots, widths, strict=True)) / full
    predicted = {"damage": damage, "kept": kept}
    plan = Plan.make(
        profile.shape, tuple(layers), budget={name: share}, predicted=predicted, profile=str(file.parent.resolve())
    )
    plan.save(output)
    return plan, profile


def _budget(keep_kv: float | None, keep_attention_params: float | None) -> tuple[str, float]:
    given = {"keep_kv": keep_kv, "keep_attention_params": keep_attention_params}
    asked = [(name, share) for name, share in given.items() if share is not None]
    if len(asked) != 1:
        raise InputError("Give one budget: --keep-kv or --keep-attention-params.")
    name, share = asked[0]
    if not 0 < share <= 1:
        raise InputError(f"A share lies between 0 and 1, got {share}.")
    return name, share


def _cut(layer: LayerPlan, kind: str, width: int, profile: Profile, index: int) -> LayerPlan:
    if kind == "v":
        return replace(layer, v_dim=width)
    shape: LayerShape = profile.shape.layers[index]
    values = profile.layers[index].values
    pairs = values["qk_pairs"][width]
    if not shape.rotary or width == shape.qk_dim:
        return replace(layer, qk_dim=width)
    felt = [row[: shape.rotary // 2] for row in values["qk_unit_damage"]]
    kept = tuple(tuple(sorted(sorted(range(len(row)), key=lambda p: -row[p])[:pairs])) for row in felt)
    return replace(layer, qk_dim=width, rope_pairs=kept)
