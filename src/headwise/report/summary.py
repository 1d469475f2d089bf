"""A profile in a few words and numbers, for the terminal and for the top of the page."""

from __future__ import annotations

from statistics import median

from headwise.records.profile import LayerProfile, Profile

FLAT, STEEP = -0.25, -0.75


def sentence(profile: Profile) -> str:
    """What a person should know first."""
    layers = [layer for layer in profile.layers if layer.values]
    heads = sum(layer.heads for layer in profile.shape.layers)
    parts = [f"{heads} heads in {len(layers)} attention layers."]
    if not layers:
        return f"{parts[0]} Nothing to measure."
    shape = next(layer for layer in profile.shape.layers if layer.heads)
    qk_weights, qk, v = (median(_all(layers, name, 0)) for name in ("qk_weight_dims", "qk_data_dims", "vo_data_dims"))
    parts.append(
        f"On this text the median head holds 90 % of its query-key energy in {qk:.0f} of {shape.qk_dim} dimensions "
        f"(its weights alone would say {qk_weights:.0f}) and 90 % of its output in {v:.0f} of {shape.v_dim}."
    )
    if shape.rotary == shape.qk_dim:
        pairs = median(_all(layers, "rope_pair_dims", 0))
        parts.append(f"Rotary positions keep pairs of dimensions apart: as whole pairs those 90 % need {pairs:.0f}.")
    fitted = [layer for layer in layers if "jacobian_exponent" in layer.values]
    exponents = [value for layer in fitted for value in layer.values["jacobian_exponent"]]
    if exponents:
        lengths = fitted[0].lengths
        flat = sum(value > FLAT for value in exponents) / len(exponents)
        steep = sum(value < STEEP for value in exponents) / len(exponents)
        parts.append(
            f"From {lengths[0]:,} to {lengths[-1]:,} tokens the softmax of {_percent(flat)} of the heads stays about "
            f"as sharp; {_percent(steep)} fade like 1/L."
        )
    first = median(_all(layers, "first_token", -1))
    if layers[0].causal:
        parts.append(f"The median head puts {_percent(first)} of its attention on the first token.")
    return " ".join(parts)


def _all(layers: list[LayerProfile], name: str, place: int) -> list[float]:
    return [head[place] for layer in layers for head in layer.values[name]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
