"""The shape of a model, read off its modules (also on the meta device, where nothing is loaded)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, fields, replace
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.absorbed import absorbed_shape
from headwise.families.known import family_of
from headwise.families.mlp import mlp_of
from headwise.families.sites import Site, base_type, matrix, sites_of
from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.packing import Packed
from headwise.records.shape import Latent, LayerShape, MlpShape, ModelShape, Norm

CACHE_ENTRY = "headwise_cache"  # in config.json, which stock classes carry along
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Every width and count of ``model`` that costs something.

    >>> shape = hw.shape_of(model)
    >>> shape.layers[0].heads, shape.layers[0].kv_heads, shape.layers[0].qk_dim
    (4, 2, 8)
    """
    sites = sites_of(model)
    family = family_of(base_type(model.config))
    rotary = rotary_width(model)
    packed = _packed(model.config, len(sites))
    layers = tuple(
        replace(_layer(model, site, sites, rotary), packed=each) for site, each in zip(sites, packed, strict=True)
    )
    in_blocks = sum(layer.rest_parameters + layer.own_norm for layer in layers)
    width = int(model.config.hidden_size)
    attention = sum(layer.parameters(width) for layer in layers)
    total = sum(parameter.numel() for parameter in model.parameters())
    blocks = {id(module) for site in sites for module in site.block.modules()}
    outside = [
        module
        for name, module in model.named_modules()
        if id(module) not in blocks and not any(part in family.once for part in name.split("."))
    ]
    return ModelShape(
        family=family.name,
        width=width,
        layers=layers,
        outside_parameters=total - attention - in_blocks,
        outside_matmul=_matmul_weights((m for m in outside if not isinstance(m, CONVOLUTIONS)), model.config),
        input_matmul=_convolved([module for module in outside if isinstance(module, CONVOLUTIONS)]),
        source_tokens=getattr(model.config, "max_source_positions", 0),
        max_tokens=_max_tokens(model),
    )


def _max_tokens(model: PreTrainedModel) -> int:
    if model.main_input_name == "pixel_values":
        return cast(Any, model.base_model).embeddings.position_embeddings.shape[1]
    names = ("max_position_embeddings", "max_target_positions")
    rows = next(getattr(model.config, name) for name in names if hasattr(model.config, name))
    # RoBERTa numbers its positions from the one after the padding token's.
    return rows - model.config.pad_token_id - 1 if base_type(model.config) == "roberta" else rows


def rotary_width(model: PreTrainedModel) -> int:
    """Coordinates of a full head that RoPE turns."""
    if family_of(base_type(model.config)).positions != "rotary":
        return 0
    for name, buffer in model.base_model.named_buffers():
        if name.endswith("inv_freq"):
            return 2 * buffer.shape[-1]
    return model.config.qk_rope_head_dim


def _layer(model: PreTrainedModel, site: Site, sites: list[Site], rotary: int) -> LayerShape:
    others = {
        id(module)
        for other in sites
        if other.block is site.block
        for part in (other.module, other.out, *_own_norms(model, other))
        for module in part.modules()
    }
    first_of_block = next(other for other in sites if other.block is site.block) is site
    rest = [m for m in site.block.modules() if id(m) not in others] if first_of_block else []
    common = {
        "cache": site.cache,
        "own_norm": _own_parameters(_own_norms(model, site)),
        "rest_parameters": sum(p.numel() for module in rest for p in module.parameters(recurse=False)),
        "rest_matmul": _matmul_weights(rest, model.config),
        "mlp": _mlp(model, site),
    }
    if site.removed:
        return LayerShape(0, 0, 0, 0, **common)
    if site.family.latent:
        return _latent_layer(site, common)
    K = site.head_width
    out = matrix(site.out)
    H = site.module.heads if site.reduced else out.shape[1] // K
    G = site.module.kv_heads if site.reduced else _key_heads(site, H, K)
    pairs = getattr(site.module, "rope_pairs", None)
    norms = [getattr(site.module, name) for name in site.family.norms if hasattr(site.module, name)]
    return LayerShape(
        heads=H,
        kv_heads=G,
        qk_dim=K,
        v_dim=out.shape[1] // H,
        rotary=min(rotary, K) if pairs is None else 2 * pairs.shape[-1],
        window=_window(model.config, site),
        biases=_biases(site),
        norm=_norm_kind(norms),
        absorbed=absorbed_shape(site.module),
        **common,
    )


def _mlp(model: PreTrainedModel, site: Site) -> MlpShape | None:
    mlp = mlp_of(site)
    if mlp is None:
        return None
    biases = [] if mlp.down.bias is None else [cast(Tensor, mlp.down.bias)]
    inside = sum(p.numel() for module in mlp.projections for p in module.parameters()) - sum(p.numel() for p in biases)
    norms = [model.base_model.get_submodule(path) for path in site.mlp_norm_paths]
    return MlpShape(
        channels=mlp.channels,
        matmul=_matmul_weights(mlp.projections, model.config) // mlp.channels,
        parameters=inside // mlp.channels,
        own=_own_parameters(norms) + sum(p.numel() for p in biases),
    )


def packed_entries(layers: Iterable[LayerShape]) -> list[list[int] | None] | None:
    """What a config says of the packed caches of ``layers``; None where there are none."""
    entries = [None if layer.packed is None else list(astuple(layer.packed)) for layer in layers]
    return entries if any(entries) else None


def _packed(config: PreTrainedConfig, layers: int) -> list[Packed | None]:
    """The packed cache of each layer as `packed_entries` wrote it into ``config``."""
    content = getattr(config, CACHE_ENTRY, None)
    if content is None:
        return [None] * layers
    rows = Reader(content, f"config.json: {CACHE_ENTRY}").items()
    numbers = [None if row.content is None else row.integers(least=0) for row in rows]
    if len(rows) != layers or any(each is not None and len(each) != len(fields(Packed)) for each in numbers):
        raise InputError(f"config.json: {CACHE_ENTRY} must hold {len(fields(Packed))} numbers or null for each layer.")
    return [None if each is None else Packed(*each) for each in numbers]


def _latent_layer(site: Site, common: dict) -> LayerShape:
    module = site.module
    queries = module.q_a_proj if module.q_lora_rank is not None else module.q_proj
    named = {"q": queries, "k": module.kv_a_proj_with_mqa, "o": site.out}
    return LayerShape(
        heads=module.num_heads,
        kv_heads=module.num_heads,
        qk_dim=module.qk_head_dim,
        v_dim=module.v_head_dim,
        rotary=module.qk_rope_head_dim,
        latent=Latent(module.kv_lora_rank, module.qk_rope_head_dim, module.q_lora_rank),
        biases="".join(name for name, linear in named.items() if linear.bias is not None),
        **common,
    )


def _own_norms(model: PreTrainedModel, site: Site) -> list[nn.Module]:
    return [model.base_model.get_submodule(path) for path in site.norm_paths]


def _own_parameters(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _norm_kind(norms: list[nn.Module]) -> Norm:
    if not norms:
        return "none"
    if getattr(norms[0], "bias", None) is not None:
        return "affine"
    return "shared" if cast(Tensor, norms[0].weight).ndim == 1 else "per-head"


def _key_heads(site: Site, H: int, K: int) -> int:
    if site.family.fused:
        return (matrix(getattr(site.module, site.family.fused)).shape[0] - H * K) // (2 * K)
    return matrix(getattr(site.module, site.family.k)).shape[0] // K


def _biases(site: Site) -> str:
    family = site.family
    fused = family.fused if not site.reduced else None
    named = {name: getattr(site.module, fused or getattr(family, name)) for name in "qkv"}
    named["o"] = site.out
    return "".join(name for name, linear in named.items() if linear.bias is not None)


def _window(config: PreTrainedConfig, site: Site) -> int | None:
    if site.cache != "tokens":
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None)
    index = int(site.block_path.rsplit(".", 1)[1])
    return config.sliding_window if kinds[index] == "sliding_attention" else None


def _convolved(convolutions: list[nn.Module]) -> int:
    """Weights of a chain of convolutions, times how often each runs for one token that comes out of the chain."""
    total, runs = 0, 1
    for module in reversed(convolutions):
        total += runs * cast(Tensor, module.weight).numel()
        if isinstance(module, nn.Conv1d):  # sound frames; patches of an image do not overlap and run once each
            runs *= module.stride[0]
    return total


def _matmul_weights(modules: Iterable[nn.Module], config: PreTrainedConfig) -> int:
    """Weights one token is multiplied with; of a bank of experts only the share that is active."""
    active = getattr(config, "num_experts_per_tok", None)
    total = 0
    for module in modules:
        for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            if parameter.ndim == 2:  # noqa: PLR2004
                total += parameter.numel()
            elif parameter.ndim == 3 and active:  # noqa: PLR2004 - (experts, out, in)
                total += parameter.numel() * active // parameter.shape[0]
    return total
