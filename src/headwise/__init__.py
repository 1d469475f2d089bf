"""headwise: how many heads, how wide, how deep a Transformer needs to be, and that model.

    import headwise as hw

    profile = hw.inspect(model, tokenizer, text=texts)
    plan = hw.plan(profile, keep_kv=0.75)
    small = hw.compress(model, plan, profile)
    hw.save(small, "out", tokenizer=tokenizer)

Importing headwise is cheap (no torch) and makes ``AutoModel...from_pretrained`` open its per-layer models without
``trust_remote_code``, whichever of headwise and transformers is imported first.
"""

from importlib import import_module
from typing import Any

from headwise.families.family import Family, Stack
from headwise.records import Change, Cost, InputError, LayerPlan, LayerShape, ModelShape, Plan, Scores
from headwise.records.healing import HealConfig
from headwise.records.rendering import draw_by as _draw_by
from headwise.records.running import RunConfig
from headwise.records.settings import (
    BoundConfig,
    BudgetConfig,
    CacheConfig,
    CompressConfig,
    CostConfig,
    DesignConfig,
    EvaluateConfig,
    InspectConfig,
    OpenConfig,
    PlanConfig,
    ReadConfig,
    TrainConfig,
    TrustConfig,
)
from headwise.reduction import kinds as _kinds  # noqa: F401 - so that plans know what they can hold
from headwise.runtime import registration

__version__ = "0.1.0"

_WHEN_ASKED_FOR = {  # most of it needs torch
    "Profile": "headwise.checkpoints.profiled:Profile",
    "cache": "headwise.checkpoints.packed:cache",
    "compare": "headwise.pipelines.compare:compare_plans",
    "compress": "headwise.steps.compress:compress_model",
    "cost": "headwise.steps.cost:cost",
    "design": "headwise.steps.design:design",
    "evaluate": "headwise.steps.evaluate:evaluate",
    "heal": "headwise.steps.heal:heal_model",
    "inspect": "headwise.pipelines.profile:inspect",
    "open": "headwise.checkpoints.opened:open",
    "plan": "headwise.pipelines.plans:plan",
    "plan_of": "headwise.checkpoints.origin:plan_of",
    "read_attention": "headwise.families.weights:read_attention",
    "register_family": "headwise.families.known:register_family",
    "run": "headwise.pipelines.run:run",
    "save": "headwise.checkpoints.save:save",
    "shape_of": "headwise.families.shapes:shape_of",
    "sites_of": "headwise.families.sites:sites_of",
    "train": "headwise.steps.train:train_model",
    "watching": "headwise.tracing.probe:watching",
    "write_attention": "headwise.families.weights:write_attention",
}

__all__ = [  # noqa: PLE0604 - names of both kinds, as dir() shows them
    "BoundConfig",
    "BudgetConfig",
    "CacheConfig",
    "Change",
    "CompressConfig",
    "Cost",
    "CostConfig",
    "DesignConfig",
    "EvaluateConfig",
    "Family",
    "HealConfig",
    "InputError",
    "InspectConfig",
    "LayerPlan",
    "LayerShape",
    "ModelShape",
    "OpenConfig",
    "Plan",
    "PlanConfig",
    "ReadConfig",
    "RunConfig",
    "Scores",
    "Stack",
    "TrainConfig",
    "TrustConfig",
    *_WHEN_ASKED_FOR,
]


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in _WHEN_ASKED_FOR:
        module, _, attribute = _WHEN_ASKED_FOR[name].partition(":")
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


registration.register_with_transformers()
_draw_by("headwise.report.shown")
