"""Reduced models: their stock and per-layer classes, and a check of what their configs state about layers."""

from __future__ import annotations

from typing import get_args

from transformers import PreTrainedModel

from headwise.families.sites import base_type
from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.shape import Norm
from headwise.runtime import modeling_headwise

MODELING_FILE = "modeling_headwise"


def stock_class_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of transformers that ``model`` is, or was before it was reduced."""
    return stock_class(type(model))


def stock_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of transformers that ``cls`` is, or is the reduced form of."""
    classes = [c for c in cls.__mro__ if not issubclass(c, modeling_headwise.ReducedModel)]
    return next(c for c in classes if issubclass(c, PreTrainedModel))


def per_layer_class_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The per-layer class of headwise for ``model``."""
    name = stock_class_of(model).__name__
    references = auto_map(base_type(model.config), stock_class_of(model)).values()
    if not any(reference == f"{MODELING_FILE}.{modeling_headwise.PREFIX}{name}" for reference in references):
        raise InputError(f"No auto class of transformers opens {name}, so none could open its reduced form.")
    return getattr(modeling_headwise, modeling_headwise.PREFIX + name)


def auto_map(base: str, stock: type) -> dict[str, str]:
    """Which class of the modelling file each auto class takes; servers want ``AutoModel`` as well."""
    prefix = f"{MODELING_FILE}.{modeling_headwise.PREFIX}"
    mapped = {"AutoConfig": prefix + modeling_headwise.CONFIG_MAPPING[base].__name__}
    for auto_class, names in modeling_headwise.AUTO_CLASSES.items():
        known = modeling_headwise.as_tuple(getattr(modeling_headwise.modeling_auto, names).get(base))
        if stock.__name__ in known:
            mapped[auto_class] = prefix + stock.__name__
        elif auto_class == "AutoModel":
            mapped[auto_class] = prefix + known[0]
    return mapped


def check_layers(entry: Reader) -> None:
    """Raise where the reduced layers in a config are not as `headwise.reduction.config` writes them."""
    entry.text("base")
    layers = entry.rows("layers")
    for layer in layers:
        for name in ("attention", "out"):
            layer.text(name)
        if layer.has("mlp"):
            _check_mlp(layer.child("mlp"))
        if not layer.integer("heads", least=0):
            layer.texts("norms")
            continue
        for name in ("kv_heads", "qk_dim", "v_dim"):
            layer.integer(name, least=1)
        for name, most in (("pairs", layer.integer("qk_dim")), ("slot", len(layers) - 1)):
            if layer.has(name):
                layer.integer(name, 0, most)
        layer.choice("norm", get_args(Norm))
        layer.number("scale")


def _check_mlp(mlp: Reader) -> None:
    mlp.integer("channels", least=0)
    mlp.text("down")
    mlp.texts("up")
    mlp.texts("norms")
    mlp.flag("fused")
    if mlp.has("module"):
        mlp.text("module")
