"""headwise demo"""

from __future__ import annotations

from pathlib import Path

import typer

from headwise.cli.cost import cost
from headwise.cli.heavy import importing
from headwise.cli.progress import announce
from headwise.cli.run import whole_line
from headwise.records.healing import HealConfig
from headwise.records.running import RunConfig
from headwise.records.settings import CostConfig, EvaluateConfig, InspectConfig, PlanConfig

PROMPT = "The capital of France is Paris, and the capital of Germany is"


def demo() -> None:
    """The whole line on SmolLM2-135M, from its PyPI wheel: keep 75 % of its KV cache and heal it, in some minutes."""
    announce("Opening SmolLM2-135M-Instruct (converted once, then kept in your cache folder) ...")
    with importing():
        from headwise.steps.demo import demo_model
        from headwise.steps.generate import continue_text

    dense, folder = str(demo_model()), Path("headwise-demo")
    cost(dense, CostConfig())
    announce("\nMeasuring, planning, cutting, healing and evaluating, with little text to be quick ...")
    quick = RunConfig(
        inspect=InspectConfig(tokens=2048, lengths=(64, 128, 256, 512)),
        plan=PlanConfig(cache="none"),  # narrower heads: what can be healed in a minute, and seen
        heal=HealConfig(tokens=4096),
        evaluate=EvaluateConfig(tokens=4096, speed=False),
    )
    whole_line(dense, folder, None, quick)
    for name in (dense, str(folder / "model"), str(folder / "healed")):
        typer.echo(f"\n{Path(name).name}: {continue_text(name, PROMPT)}")
    typer.echo(
        f'\nAutoModelForCausalLM.from_pretrained("{folder / "healed"}", trust_remote_code=True) opens it anywhere; '
        "with headwise imported it needs no trust_remote_code."
    )
