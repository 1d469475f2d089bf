"""The config of a reduced model: where each attention sits, its shape, and its place in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.mlp import stock_channels
from headwise.families.reduced import auto_map, stock_class_of
from headwise.families.shapes import rotary_width
from headwise.families.sites import Site, base_type, sites_of
from headwise.records.change import Change
from headwise.records.plan import Changes, changed, runs
from headwise.records.shape import LayerShape, ModelShape
from headwise.runtime import modeling_headwise


@dataclass(frozen=True, slots=True)
class Kept:
    """One attention layer of a block that stays, as it will be; ``index`` is the block's new number in its stack.

    ``entry`` is what its changes put into the config, ``listed`` whether its heads name their RoPE pairs.
    """

    site: Site
    layer: LayerShape
    index: int
    entry: Mapping[str, Any]
    listed: bool


def per_layer_config(
    model: PreTrainedModel,
    shape: ModelShape,
    after: Sequence[LayerShape | None],
    layers: Sequence[Changes],
) -> PreTrainedConfig:
    """The config of ``model``, of ``shape``, in headwise's per-layer form, when its layers are those of ``after``.

    None: its block is dropped, or joined to another; ``layers`` holds the changes that make them so.
    """
    kept = _kept(model, shape, after, layers)
    family, base, stock = kept[0].site.family, base_type(model.config), stock_class_of(model)
    config = _plain_copy(model.config)
    kinds: Sequence[str | None] = [None] * len(kept)
    if len(kept) < len(after):
        config.num_hidden_layers = len(kept)
    if len(family.stacks) == 1 and getattr(config, "layer_types", None) is not None:
        stay = [kind for kind, layer in zip(config.layer_types, after, strict=True) if layer is not None]
        kinds = config.layer_types = _lend_kinds(stay, [bool(each.layer.heads) for each in kept])
    pairs = rotary_width(model) // 2
    rows = [
        {**_layer_entry(each, slot, pairs), **_mlp_entry(each, config)}
        for each, slot in zip(kept, _slots(kept, kinds), strict=True)
    ]
    config.headwise = {
        "base": base,
        "names": {"q": family.q, "k": family.k, "v": family.v, "fused": family.fused, "norms": list(family.norms)},
        "layers": rows,
    }
    config.auto_map = auto_map(base, stock)
    config.architectures = [modeling_headwise.PREFIX + stock.__name__]
    if len(family.stacks) == 1:
        _state_per_layer(config, rows, shape)
    return config


def entry_of(changes: Iterable[Change]) -> dict[str, Any]:
    """What the changes of a layer put into the config, by kind."""
    return {change.kind: entry for change in changes if (entry := change.entry())}


def _kept(
    model: PreTrainedModel, shape: ModelShape, after: Sequence[LayerShape | None], layers: Sequence[Changes]
) -> list[Kept]:
    kept: list[Kept] = []
    sites = sites_of(model)
    for run in runs(layers):
        layer, changes = after[run[0]], [change for number in run for change in layers[number]]
        if layer is None:
            continue
        site = sites[run[0]]
        if len(run) > 1:  # the scale of joined heads is that of the first block that has some
            halves = [changed(shape.layers[number], layers[number]) for number in run]
            attending = (sites[number] for number, half in zip(run, halves, strict=True) if half and half.heads)
            site = next(attending, site)
        index = sum(each.site.stack is site.stack for each in kept)
        listed = any(getattr(sites[number].module, "rope_pairs", None) is not None for number in run)
        named = any(change.kept_pairs() is not None for change in changes)
        kept.append(Kept(site, layer, index, entry_of(changes), listed or named))
    return kept


def _plain_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same numbers in the config class of reduced models, without any per-layer statement."""
    content = config.to_dict()
    for name in ("per_layer_config", "model_type", "auto_map", "architectures", "headwise"):
        content.pop(name, None)
    copied = modeling_headwise.reduced_config(base_type(config))(**content)
    copied._attn_implementation = config._attn_implementation
    return copied


def _lend_kinds(kinds: list[str], attends: list[bool]) -> list[str]:
    """Give each layer without attention the kind (window or full) of the next one with attention.

    transformers reads the length of the past from the first slot of the cache, and slots follow the layers' kinds: so
    the first slot is always one that gets filled.
    """
    lent = list(kinds)
    following = next(kind for kind, attending in zip(reversed(kinds), reversed(attends), strict=True) if attending)
    for index in reversed(range(len(kinds))):
        if attends[index]:
            following = kinds[index]
        lent[index] = following
    return lent


def _slots(kept: list[Kept], kinds: Sequence[str | None]) -> list[int | None]:
    """Cache slot of each attention layer: the first free one of its kind, so that no gap comes before a filled slot."""
    free: dict[Any, list[int]] = {}
    for each, kind in zip(kept, kinds, strict=True):
        free.setdefault((each.site.stack, kind), []).append(each.index)
    return [
        free[each.site.stack, kind].pop(0) if each.layer.heads and each.layer.cache != "none" else None
        for each, kind in zip(kept, kinds, strict=True)
    ]


def _layer_entry(kept: Kept, slot: int | None, full_pairs: int) -> dict[str, Any]:
    site, layer = kept.site, kept.layer
    block = f"{site.stack.blocks}.{kept.index}"
    entry: dict[str, Any] = {
        "attention": f"{block}.{site.stack.attention}",
        "out": f"{block}.{site.stack.out}",
        "heads": layer.heads,
    }
    if not layer.heads:
        norms = [block + path.removeprefix(site.block_path) for path in site.norm_paths]
        return {**entry, "norms": norms, **kept.entry}
    pairs = layer.rotary // 2
    absorbed = {} if layer.absorbed is None else {"absorbed": asdict(layer.absorbed)}
    return {
        **entry,
        **absorbed,
        "kv_heads": layer.kv_heads,
        "qk_dim": layer.qk_dim,
        "v_dim": layer.v_dim,
        "pairs": pairs if kept.listed or pairs != full_pairs else None,
        "norm": layer.norm,
        "scale": float(site.module.scaling),
        "slot": slot,
        **kept.entry,
    }


def _mlp_entry(kept: Kept, config: PreTrainedConfig) -> dict[str, Any]:
    """What says how wide the MLP of a layer is, where it is not as the stock class would build it."""
    site, spec, mlp = kept.site, kept.site.stack.mlp, kept.layer.mlp
    channels = 0 if mlp is None else mlp.channels
    if spec is None or channels == stock_channels(config, spec):
        return {}
    block = f"{site.stack.blocks}.{kept.index}"
    entry = {
        "channels": channels,
        "up": [f"{block}.{path}" for path in (spec.gate, spec.up) if path is not None],
        "down": f"{block}.{spec.down}",
        "fused": spec.fused,
        "module": None if spec.module is None else f"{block}.{spec.module}",
        "norms": [block + path.removeprefix(site.block_path) for path in site.mlp_norm_paths],
    }
    return {"mlp": entry}


def _state_per_layer(config: PreTrainedConfig, layers: list[dict[str, Any]], shape: ModelShape) -> None:
    """Say the shapes once more in transformers' own ``per_layer_config``, which caches and servers read."""
    first = next(layer for layer in shape.layers if layer.heads)
    for name, value in (
        ("num_key_value_heads", first.kv_heads),
        ("head_dim", first.qk_dim),
        ("qk_head_dim", first.qk_dim),
        ("v_head_dim", first.v_dim),
    ):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    config.per_layer_config = {
        index: {
            "num_attention_heads": layer["heads"],
            **_cached(layer),
        }
        if layer["heads"]
        else {"skip": ["attention"]}
        for index, layer in enumerate(layers)
    }


def _cached(layer: Mapping[str, Any]) -> dict[str, int]:
    """The heads and widths of what a layer gives to the cache; latents stand in the place of keys."""
    heads, qk_dim, v_dim, absorbed = layer["kv_heads"], layer["qk_dim"], layer["v_dim"], layer.get("absorbed")
    if absorbed is not None:
        heads, qk_dim, v_dim = heads // absorbed["joined"], absorbed["rank"], 2 * absorbed["pairs"]
    return {"num_key_value_heads": heads, "head_dim": qk_dim, "qk_head_dim": qk_dim, "v_head_dim": v_dim}
