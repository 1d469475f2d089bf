"""headwise: how many heads, how wide, how deep a Transformer needs to be, and that model.

Importing headwise is cheap (no torch) and makes ``AutoModel...from_pretrained`` open its per-layer models without
``trust_remote_code``, whichever of headwise and transformers is imported first.
"""

from importlib import import_module
from typing import Any

from headwise.records import Change, Cost, InputError, LayerPlan, LayerShape, ModelShape, Plan, Scores, cost_of
from headwise.records.rendering import draw_by as _draw_by
from headwise.reduction import kinds as _kinds  # noqa: F401 - so that plans know what they can hold
from headwise.runtime import registration

__version__ = "0.1.0"

_NEED_TORCH = {
    "build_student": "headwise.reduction.build",
    "evaluate": "headwise.steps.evaluate",
    "fresh_model": "headwise.training.fresh",
    "open_model": "headwise.checkpoints.load",
    "open_shape": "headwise.checkpoints.load",
    "read_attention": "headwise.families.weights",
    "save_student": "headwise.checkpoints.save",
    "shape_of": "headwise.families.shapes",
    "sites_of": "headwise.families.sites",
    "watching": "headwise.tracing.probe",
    "write_attention": "headwise.families.weights",
}

_RENAMED = {"build_student": "build_reduced"}

__all__ = [
    "Change",
    "Cost",
    "InputError",
    "LayerPlan",
    "LayerShape",
    "ModelShape",
    "Plan",
    "Scores",
    "__version__",
    "build_student",
    "cost_of",
    "evaluate",
    "fresh_model",
    "open_model",
    "open_shape",
    "read_attention",
    "save_student",
    "shape_of",
    "sites_of",
    "watching",
    "write_attention",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), _RENAMED.get(name, name))
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


registration.register_with_transformers()
_draw_by("headwise.report.shown")
