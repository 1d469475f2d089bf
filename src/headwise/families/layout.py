"""Where RoPE pairs and free coordinates stand in the queries and keys that enter an attention's logits."""

from __future__ import annotations

from headwise.families.sites import Site, base_type
from headwise.linalg.coordinates import Layout
from headwise.records.shape import LayerShape


def layout_of(site: Site, layer: LayerShape) -> Layout:
    """The layout of a layer's heads as `watching` shows them."""
    if not layer.latent:
        return Layout.halves(0, layer.rotary, layer.qk_dim)
    start = layer.qk_dim - layer.latent.rope_dim  # latent attention puts its rotary part last
    if base_type(site.module.config) == "deepseek_v2":
        return Layout.neighbours(start, layer.latent.rope_dim, layer.qk_dim)
    return Layout.halves(start, layer.latent.rope_dim, layer.qk_dim)
