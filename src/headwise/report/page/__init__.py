"""A profile as one HTML file that opens anywhere, offline: data, styles and code are inside, nothing is fetched."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from headwise.files.writing import write_text
from headwise.records.plan import Plan
from headwise.records.profile import QUANTITIES, LayerProfile, Profile
from headwise.records.scores import Scores
from headwise.report.page.result import Curve, result_section
from headwise.report.page.template import filled
from headwise.report.summary import sentence

DECADES = 6.0  # of a spectrum that the page shows, in 255 steps
DIGITS = 4
BY_HEAD = (
    "qk_data_dims",
    "qk_weight_dims",
    "vo_data_dims",
    "vo_weight_dims",
    "jacobian_mean",
    "jacobian_p95",
    "jacobian_exponent",
    "logit_spread",
    "hard_rank",
    "effective_rank",
    "numerical_rank",
    "stable_rank",
    "entropy",
    "first_token",
    "twin",
    "twin_overlap",
    "cut_rows",
    "cut_output",
    "vo_cut_output",
    "head_damage",
)
SPECTRA = ("qk_weight_spectrum", "qk_data_spectrum", "vo_weight_spectrum", "vo_data_spectrum")
BY_LAYER = ("conditioning", "conditioning_gaussian", "rope_pair_energy", "rope_pair_dims")


def write_page(
    profile: Profile,
    path: Path,
    slider: Mapping[str, Any],
    scores: Scores | None = None,
    plan: Plan | None = None,
    curve: Curve = (),
) -> None:
    """Write ``profile`` as a self-contained page; with ``scores`` and a ``plan`` also what came of it.

    ``slider`` holds the choices that its slider moves over, as `headwise.planning.slider` has them; ``curve`` tells
    how healing went, as `headwise.records.healing.read_curve` gives it.
    """
    write_text(path, render(profile, slider, scores, plan, curve))


def render(
    profile: Profile,
    slider: Mapping[str, Any],
    scores: Scores | None = None,
    plan: Plan | None = None,
    curve: Curve = (),
) -> str:
    """The page as text."""
    source = str(profile.model["source"])
    parts = {
        "TITLE": escape(Path(source).name or source),
        "SENTENCE": escape(sentence(profile)),
        "FACTS": "",
        "FIRST": "map",
        "SOURCE": "profile.json",
        "RESULT": "" if scores is None or plan is None else result_section(scores, plan, profile.shape, curve),
        "DATA": json.dumps(page_data(profile, slider), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return filled("inspect", parts, code=["inspect.js"])


def page_data(profile: Profile, slider: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of a profile, in few bytes."""
    shape = profile.shape
    return {
        "model": {**profile.model, "width": shape.width, "max_tokens": shape.max_tokens},
        "text": dict(profile.text),
        "versions": dict(profile.versions),
        "notes": list(profile.notes),
        "seed": profile.settings.get("seed"),
        "definitions": {name: QUANTITIES[name].text for name in (*BY_HEAD, *SPECTRA, *BY_LAYER)},
        "layers": [_layer(layer, asdict(dims)) for layer, dims in zip(profile.layers, shape.layers, strict=True)],
        "budget": dict(slider),
        "source_tokens": shape.source_tokens,
        "decades": DECADES,
    }


def _layer(layer: LayerProfile, dims: dict[str, Any]) -> dict[str, Any]:
    kept = ("heads", "kv_heads", "qk_dim", "v_dim", "cache", "window", "latent")
    values = {name: _short(layer.values[name]) for name in (*BY_HEAD, *BY_LAYER) if name in layer.values}
    spectra = {name: [_packed(s) for s in layer.values[name]] for name in SPECTRA if name in layer.values}
    return {
        **{name: dims[name] for name in kept},
        "causal": layer.causal,
        "lengths": layer.lengths,
        "widths": layer.widths,
        "v_widths": layer.v_widths,
        "values": {**values, **spectra},
    }


def _packed(spectrum: Sequence[float]) -> str:
    """Singular values as bytes: how far below the largest each lies, on a logarithmic scale."""
    largest = max(spectrum, default=0.0) or 1.0
    steps = (-math.log10(max(value / largest, 1e-30)) * 255 / DECADES for value in spectrum)
    return base64.b64encode(bytes(min(255, round(step)) for step in steps)).decode()


def _short(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [_short(number) for number in numbers]
    if isinstance(numbers, float):
        short = float(f"{numbers:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e9 else short  # noqa: PLR2004
    return numbers
