"""A latent is a matter of the cache: the weights stay as they are."""

from __future__ import annotations

from headwise.families.weights import AttentionWeights
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.latent.change import Latent


def apply(
    weights: AttentionWeights, change: Latent, layer: LayerShape, statistics: Statistics | None
) -> AttentionWeights:
    """The weights."""
    return weights
