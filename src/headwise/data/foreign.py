"""Checks of untrusted model folders: no code is run, no kernels are fetched, no links lead out."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

from headwise.files.errors import InputError

# Fields by which a JSON file names code to run, or another file to read in its place.
CODE = ("auto_map", "custom_pipelines", "trust_remote_code", "configuration_files")
ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
PAGED = "paged|"


def find_file(source: str, name: str) -> Path | None:
    """The file ``name`` of a model folder or Hub id, if it has one."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise InputError(f"{name} of {source} cannot be fetched: {' '.join(str(error).split())[:200]}") from error
    return None if path is None else Path(path)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether ``path`` is really a file of ``folder``, or of the Hub's cache that ``folder`` is a snapshot of."""
    real, root = path.resolve(), folder.resolve()
    return path.is_file() and (real.is_relative_to(root) or _is_blob(real, root))


def is_own(path: Path, folder: Path) -> bool:
    """Whether ``path`` is a regular file of ``folder`` and no link; those of the Hub's cache are as good as files."""
    real, root = path.resolve(), folder.resolve()
    return path.is_file() and (real == root / path.relative_to(folder) or _is_blob(real, root))


def _is_blob(real: Path, root: Path) -> bool:
    return root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"


def without_code(content: Any) -> Any:
    """JSON without the fields that name code."""
    if isinstance(content, dict):
        return {name: without_code(value) for name, value in content.items() if name not in CODE}
    return [without_code(item) for item in content] if isinstance(content, list) else content


def check_config(config: Any, source: str) -> None:
    """Take from a config what names code, and raise where it asks for kernels from elsewhere."""
    shipped = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}  # and what the user has registered
    for fields in _fields(config, set()):
        for name in CODE:
            fields.pop(name, None)
        for name in ATTENTION:
            backend = fields.get(name)
            for each in backend.values() if isinstance(backend, dict) else (backend,):
                if each is not None and str(each).removeprefix(PAGED) not in shipped:
                    raise InputError(
                        f"The config of {source} asks for attention by {each!r}, which is not part of transformers; "
                        f"take {name} out of it."
                    )


def _fields(content: Any, seen: set[int]) -> Generator[dict[str, Any], None, None]:
    """The fields of a config and of everything inside it, as they are kept."""
    if id(content) in seen:
        return
    seen.add(id(content))
    if isinstance(content, (list, tuple)):
        for item in content:
            yield from _fields(item, seen)
        return
    fields = content if isinstance(content, dict) else getattr(content, "__dict__", None)
    if isinstance(fields, dict) and not isinstance(content, type):
        yield fields
        for item in list(fields.values()):
            yield from _fields(item, seen)
