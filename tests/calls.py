"""Steps on folders with all their settings as flat keywords, sorted into the settings objects they belong to."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headwise.records.running import RunConfig
from headwise.records.settings import CompressConfig, EvaluateConfig, InspectConfig, OpenConfig, PlanConfig, ReadConfig


def settings(kind: type, options: dict[str, Any], prefix: str = "") -> Any:
    """Settings of one kind out of ``options``, which lose them."""
    names = [each.name for each in fields(kind) if f"{prefix}{each.name}" in options]
    return kind(**{name: options.pop(f"{prefix}{name}") for name in names})


def inspect(source, output, **options):
    """`inspect_folder`, as ``inspect(source, output, tokens=96)``."""
    from headwise.pipelines.profile import inspect_folder

    kinds = {"config": InspectConfig, "reading": ReadConfig, "opening": OpenConfig}
    chosen = {name: settings(kind, options) for name, kind in kinds.items()}
    return inspect_folder(source, output, **chosen, **options)


def evaluate(sources, **options):
    """`evaluate_folders`, as ``evaluate(sources, tokens=96)``."""
    from headwise.steps.evaluate import evaluate_folders

    kinds = {"config": EvaluateConfig, "reading": ReadConfig, "opening": OpenConfig}
    chosen = {name: settings(kind, options) for name, kind in kinds.items()}
    return evaluate_folders(sources, **chosen, **options)


def run(source, folder, budget=None, **options):
    """`run_folder`, as ``run(source, folder, budget, tokens=96, eval_tokens=128, speed=False, healing=None)``."""
    from headwise.pipelines.run import run_folder

    if "speed" in options:
        options["eval_speed"] = options.pop("speed")
    config = RunConfig(
        evaluate=settings(EvaluateConfig, options, "eval_"),
        inspect=settings(InspectConfig, options),
        plan=settings(PlanConfig, options),
        compress=settings(CompressConfig, options),
        heal=options.pop("healing", None),
        reading=settings(ReadConfig, options),
        opening=settings(OpenConfig, options),
    )
    return run_folder(source, folder, budget, config=config, **options)
