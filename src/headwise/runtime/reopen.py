"""Open a saved model in a fresh process and report what came out. Run as a script; knows nothing of headwise.

    python reopen.py FOLDER INPUTS.safetensors RESULT.safetensors [BACKEND]

prints one line of JSON: class, weights that were missing or left over, bytes in the cache; writes the outputs.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

CACHE = (
    "absorbed_attention",
    "cache",
    "joint_layer",
    "latent_layer",
    "packed_attention",
    "packed_layer",
    "packing",
    "slots",
)  # what the modelling file imports
OWN_CODE = Path(__file__).with_name("modeling_headwise.py")
OWN_FILES = (OWN_CODE, *(OWN_CODE.with_name(f"{name}.py") for name in CACHE))


def main(folder: str, inputs_file: str, result_file: str, backend: str | None = None) -> None:
    """Open ``folder`` the way a user would, run the inputs, report."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    name, own = config["architectures"][0], config["model_type"] == "headwise"
    check_code(Path(folder), config, own)
    opener = getattr(transformers, openers(config, name)[0] if own else name)
    options = {"dtype": "auto", "output_loading_info": True, "use_safetensors": True, "attn_implementation": backend}
    model, info = opener.from_pretrained(folder, **options, trust_remote_code=own)
    with torch.inference_mode():
        output = model.eval()(**load_file(inputs_file))
    save_file({"output": output[0].contiguous()}, result_file)
    report = {
        "class": type(model).__name__,
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "cache_bytes": cache_bytes(output.get("past_key_values")),
    }
    print(json.dumps(report))  # noqa: T201 - this is the script's answer


def check_code(folder: Path, config: dict[str, Any], own: bool) -> None:
    """Raise where ``folder`` holds or names any code but, for a per-layer model, headwise's files as they are."""
    code, allowed = sorted(folder.rglob("*.py")), sorted(folder / path.name for path in OWN_FILES) if own else []
    if code != allowed or any(path.read_bytes() != OWN_CODE.with_name(path.name).read_bytes() for path in code):
        raise ValueError(f"{folder} holds code that is not headwise's: {[path.name for path in code]}")
    named = config.get("auto_map", {}).values()
    if any(not own or str(reference).split(".")[0] != OWN_CODE.stem for reference in named):
        raise ValueError(f"{folder} names code that is not headwise's: {config['auto_map']}")


def openers(config: dict[str, Any], name: str) -> list[str]:
    """The auto classes of transformers that open a model of the class ``name``."""
    return [key for key, value in config.get("auto_map", {}).items() if value.split(".")[-1] == name]


def cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values in a cache of transformers."""
    if cache is None:
        return 0
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]
    if parts:
        return sum(cache_bytes(part) for part in parts)
    tensors = [t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
