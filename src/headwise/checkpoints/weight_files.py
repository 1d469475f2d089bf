"""Where the weights of a model lie: safetensors files of its own folder, checked before they are read."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from transformers import PreTrainedConfig

from headwise.data.foreign import find_file, is_inside
from headwise.files.errors import InputError
from headwise.files.reading import parse_json, read_json

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
OF_PROCESSES = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers prefers them to all others


def check_weights(source: str, config: PreTrainedConfig) -> None:
    """Raise where the weights of a model folder or Hub id are not what headwise reads."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        by = f" by {method}" if isinstance(method, str) else ""
        raise InputError(
            f"The weights of {source} are quantised{by}; give the model they were made from, in full or half precision."
        )
    elsewhere = getattr(config, "transformers_weights", None)
    if elsewhere is not None:
        raise InputError(f"The config of {source} names its weights {elsewhere!r}; headwise reads {SINGLE} or {INDEX}.")
    if find_file(source, ADAPTER) is not None:
        raise InputError(f"{source} holds an adapter ({ADAPTER}); merge it into its model first.")
    index = find_file(source, INDEX)
    shards = [] if index is None else _shards(index)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return
    split = next((path.name for path in folder.iterdir() if OF_PROCESSES.fullmatch(path.name)), None)
    if split is not None:
        raise InputError(f"{folder} holds the weights as single processes saved them ({split}); join them first.")
    names = [SINGLE] if (folder / SINGLE).is_file() else shards
    if not names:
        pickles = [path.name for pattern in PICKLES for path in folder.glob(pattern)]
        if pickles:
            raise InputError(
                f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code; "
                "convert it to safetensors first."
            )
        raise InputError(f"{folder} holds no weights ({SINGLE} or {INDEX}).")
    for name in names:
        if not (folder / name).is_file():
            raise InputError(f"{folder} lacks {name}, which its {INDEX} names.")
        if not is_inside(folder / name, folder):
            raise InputError(f"{folder / name} is a link that leads out of its folder; put the file itself there.")
        _check_safetensors(folder / name)


def _shards(index: Path) -> list[str]:
    """The files an index names: plain names of safetensors files."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InputError(f"{index} names no weights: its weight_map is missing or empty.")
    for name in names.values():
        plain = isinstance(name, str) and name.isprintable() and not re.search(r"[/\\:]", name)
        if not plain or not name.endswith(".safetensors"):
            raise InputError(f"{index} names {name!r}; only safetensors files of the same folder are read.")
    return sorted(set(names.values()))


def _check_safetensors(path: Path) -> None:
    """Compare the size a safetensors file states in its header with the size it has."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size  # noqa: PLR2004
        if length + 8 > size:
            raise InputError(f"{path} is damaged or cut short: its header does not fit into its {size} bytes.")
        header = file.read(length)
    try:
        content = parse_json(header, f"{path}")
        ends = [item["data_offsets"][1] for name, item in content.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError):
        raise InputError(f"{path} is not a safetensors file: its header makes no sense.") from None
    if end != size:
        raise InputError(f"{path} is damaged or cut short: it should have {end} bytes and has {size}.")
