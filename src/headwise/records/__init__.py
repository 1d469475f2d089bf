"""Plain data: shapes, plans, exact cost arithmetic. Standard library only."""

from headwise.files.errors import InputError
from headwise.records.change import Change
from headwise.records.cost import Cost, LayerCost, cost_of
from headwise.records.plan import LayerPlan, Plan
from headwise.records.scores import ModelScores, Scores
from headwise.records.shape import Latent, LayerShape, ModelShape

__all__ = [
    "Change",
    "Cost",
    "InputError",
    "Latent",
    "LayerCost",
    "LayerPlan",
    "LayerShape",
    "ModelScores",
    "ModelShape",
    "Plan",
    "Scores",
    "cost_of",
]
