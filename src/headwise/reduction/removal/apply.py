"""Attention weights that are taken away."""

from __future__ import annotations

from headwise.families.weights import AttentionWeights
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.removal.change import Removal


def apply(
    weights: AttentionWeights, change: Removal, layer: LayerShape, statistics: Statistics | None
) -> AttentionWeights | None:
    """None: nothing stays."""
    return None
