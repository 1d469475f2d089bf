"""What lies where a model folder was expected, and what to give instead: one sentence."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub.errors import LocalEntryNotFoundError

from headwise.files.errors import InputError
from headwise.files.reading import read_json

ADAPTER, MODULES = "adapter_config.json", "modules.json"
BEFORE_A_MODEL = "transformers.AutoModelForCausalLM.from_pretrained"


def folder_without_config(folder: Path) -> InputError:
    """Why a folder without config.json is no model."""
    for sentence in (_adapter, _gguf, _sentence_transformers):
        if reason := sentence(folder):
            return InputError(reason)
    return InputError(f"{folder} has no config.json, so it is not a model folder.")


def check_is_config(path: Path) -> None:
    """Raise where a single file is given that is no config: weights, or a record of headwise."""
    if path.suffix == ".gguf":
        raise InputError(_from_gguf(path))
    if path.suffix == ".safetensors":
        raise InputError(f"{path} holds weights alone; give the folder of the model, {path.parent}.")


def record_instead_of_config(path: Path, content: dict[str, object]) -> InputError:
    """Why a JSON file without a model_type is no config."""
    kind = content.get("headwise")
    if isinstance(kind, str):
        return InputError(f"{path} is a headwise {kind}; give the folder of a model, or a profile where one is wanted.")
    return InputError(f"{path} names no model_type, so it is not the config of a transformers model.")


def to_fetch(source: str) -> str:
    """What to do where a Hub id cannot be reached."""
    return f"Where there is a network, fetch it first: hf download {source}"


def _adapter(folder: Path) -> str | None:
    if not (folder / ADAPTER).is_file():
        return None
    base = read_json(folder / ADAPTER).get("base_model_name_or_path") or "a model it does not name"
    return (
        f"{folder} holds a PEFT adapter of {base}, not a model; merge both first: peft.AutoPeftModelForCausalLM"
        f".from_pretrained({json.dumps(str(folder))}).merge_and_unload().save_pretrained(NEW), and give NEW."
    )


def _gguf(folder: Path) -> str | None:
    files = sorted(folder.glob("*.gguf"))
    return _from_gguf(files[0]) if files else None


def _from_gguf(path: Path) -> str:
    return (
        f"{path} is a GGUF file; headwise reads folders of transformers. Give the model it was made from, or turn it "
        f"into one: {BEFORE_A_MODEL}({json.dumps(str(path.parent))}, gguf_file={json.dumps(path.name)})"
        ".save_pretrained(NEW), and give NEW."
    )


def _sentence_transformers(folder: Path) -> str | None:
    if not (folder / MODULES).is_file():
        return None
    inner = next((path.parent for path in sorted(folder.glob("*/config.json"))), None)
    if inner is None:
        return None
    return f"{folder} is in the older layout of sentence-transformers, with the model below it; give {inner}."


def is_unreachable(error: BaseException | None) -> bool:
    """Whether an error came of a Hub that was neither reached nor had left the files here before."""
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError):
            return True
        error = error.__cause__ or error.__context__
    return False
