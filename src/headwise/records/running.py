"""What the whole line can be told: the settings of every step it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headwise.records.healing import HealConfig
from headwise.records.settings import (
    CompressConfig,
    EvaluateConfig,
    InspectConfig,
    OpenConfig,
    PlanConfig,
    ReadConfig,
)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of each step. Without ``heal`` nothing is healed; windows to evaluate on are as those measured on.

    What a plan asks for is measured.
    """

    inspect: InspectConfig = field(default_factory=InspectConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    compress: CompressConfig = field(default_factory=CompressConfig)
    heal: HealConfig | None = None
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    reading: ReadConfig = field(default_factory=ReadConfig)
    opening: OpenConfig = field(default_factory=OpenConfig)

    def __post_init__(self) -> None:
        if self.plan.absorb:
            object.__setattr__(self, "inspect", replace(self.inspect, positions=True))
