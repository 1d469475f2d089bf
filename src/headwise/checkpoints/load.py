"""Opening models and configs: local folder, config.json or Hub id, with one clear sentence for what is wrong.

Classes are those of transformers and of headwise as installed here: no code that comes with a model is ever run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from headwise.checkpoints.mistaken import (
    check_is_config,
    folder_without_config,
    is_unreachable,
    record_instead_of_config,
    to_fetch,
)
from headwise.checkpoints.weight_files import check_weights
from headwise.data.fitness import check_finite, check_numbers
from headwise.data.foreign import check_config, find_file
from headwise.families.known import BY_MODEL_TYPE, family_of
from headwise.families.reduced import auto_map, check_layers, stock_class
from headwise.families.shapes import shape_of
from headwise.families.sites import base_type
from headwise.files.errors import InputError
from headwise.files.reading import Reader, read_json
from headwise.records.settings import OpenConfig
from headwise.records.shape import ModelShape
from headwise.runtime import modeling_headwise
from headwise.tracing.placement import place

LONGEST_REASON = 300
GENERATION = "generation_config.json"
FILES = (".json", ".safetensors", ".gguf", ".bin", ".pt")  # Hub ids may have dots too: Qwen2.5-0.5B


def open_config(source: str) -> PreTrainedConfig:
    """The config of ``source``: a local folder, a config.json or a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        folder, path = path, path / "config.json"
        if not path.is_file():
            raise folder_without_config(folder)
    if path.is_file():
        check_is_config(path)
        content = read_json(path)
        if not isinstance(content.get("model_type"), str):
            raise record_instead_of_config(path, content)
        check_numbers(content, str(path))
        if content["model_type"] == modeling_headwise.HeadwiseConfig.model_type:
            check_layers(Reader(content, f"{path}").child("headwise"))
        else:
            family_of(content["model_type"])
    elif path.suffix in FILES or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise InputError(f"There is no file or folder {source}.")
    try:
        config = AutoConfig.from_pretrained(str(path) if path.is_file() else source, trust_remote_code=False)
    except Exception as error:  # configs are foreign input, and transformers raises anything over them
        what = source if path.is_file() else f"{source} is no local folder, and as a Hub id it"
        own_code = "it needs code of its own, which headwise does not run."
        reason = own_code if "trust_remote_code" in str(error) else _reason(error)
        if not path.is_file() and is_unreachable(error):
            reason = f"the Hub cannot be reached. {to_fetch(source)}"
        raise InputError(f"{what} cannot be opened: {reason}") from error
    family_of(base_type(config))
    check_config(config, source)
    return config


def model_class(config: PreTrainedConfig, source: str) -> type[PreTrainedModel]:
    """The class of transformers (or of headwise) that the config names."""
    names = getattr(config, "architectures", None)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InputError(
            f"The config of {source} names no architecture; add for example {json.dumps([_suggest(config)])} to it as "
            '"architectures".'
        )
    name = names[0]
    module = modeling_headwise if name.startswith(modeling_headwise.PREFIX) else transformers
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise InputError(f"transformers {transformers.__version__} has no class {name}, which {source} asks for.")
    base, own = base_type(config), getattr(stock_class(cls).config_class, "model_type", "")
    if BY_MODEL_TYPE.get(own) is not family_of(base):  # others might do anything with this config
        raise InputError(f"The config of {source} is one of a {base} model and asks for a {name}.")
    return cls


def open_shape(source: str) -> ModelShape:
    """The shape of a model from its config alone: nothing is downloaded or loaded but the config."""
    config = open_config(source)
    shape = shape_of(empty_model(model_class(config, source), config))
    if not shape.layers:
        raise InputError(f"The config of {source} asks for a model without layers.")
    return shape


def empty_model(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model of ``config`` on the meta device: all shapes, no numbers."""
    try:
        with torch.device("meta"):
            return cls(config)
    except Exception as error:  # as above
        raise InputError(f"No model can be built from this config: {_reason(error)}") from error


def open_model(source: str, opening: OpenConfig | None = None) -> PreTrainedModel:
    """A trained model, in its own dtype on the CPU unless ``opening`` says otherwise. Weights: safetensors only."""
    config = open_config(source)
    cls = model_class(config, source)
    folder = Path(source).expanduser()
    if folder.is_file():
        raise InputError(f"{source} is a config without weights; give the folder of the model.")
    check_weights(source, config)
    settings = find_file(source, GENERATION)
    if settings is not None:
        check_numbers(read_json(settings), str(settings))
    if folder.is_dir():
        source = str(folder)
    if issubclass(cls, modeling_headwise.ReducedModel):
        config.auto_map = auto_map(base_type(config), stock_class(cls))
    options = {
        "config": config,
        "dtype": "auto",
        "use_safetensors": True,
        "output_loading_info": True,
        "trust_remote_code": False,
    }
    try:
        model, info = cast(Any, cls).from_pretrained(source, **options)
    except Exception as error:  # as above
        raise InputError(f"{source} cannot be loaded: {_reason(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"{source} lacks {len(missing)} weights its config asks for, {missing[0]} among them.")
    check_finite(model, source)
    return model.eval() if opening is None else place(model.eval(), opening)


def _suggest(config: PreTrainedConfig) -> str:
    names = modeling_headwise.modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type, "LlamaForCausalLM")
    return modeling_headwise.as_tuple(names)[0]


def _reason(error: Exception) -> str:
    """The message of a library's error on one line; of a chain the first, which names the cause."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = " ".join(str(error).split())
    if not isinstance(error, (ValueError, OSError, RuntimeError)):
        text = f"{type(error).__name__} {text}"
    return text if len(text) < LONGEST_REASON else text[:LONGEST_REASON] + " ..."
