"""Tokenizer and processor files copied beside the weights of a new model, by known names only.

Only regular files are taken, never links, code or pickles, and no JSON goes along that names code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from headwise.data.foreign import is_own, without_code
from headwise.files.errors import InputError
from headwise.files.reading import parse_json
from headwise.files.writing import write_text

TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
SETTINGS = (  # JSON that may name code, as those of the tokenizer may
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "normalizer.json",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "chat_template.jinja",
)
TEMPLATES = "additional_chat_templates/*.jinja"
MODULES = "modules.json"  # of sentence-transformers: what follows the Transformer, each in a folder of its own
SENTENCES = ("config_sentence_transformers.json", "sentence_bert_config.json")
OF_MODULES = ("config.json", "model.safetensors")
PICKLE = "pytorch_model.bin"
OWN_MODULE, PLAIN = "sentence_transformers.", re.compile(r"\w*")


def copy_companions(source: str, target: Path, *, pooling: bool = True, tokenizer: bool = True) -> list[str]:
    """Copy the companion files of the model at ``source``, a folder or Hub id; returns notes about files left out.

    Without ``pooling`` the files of sentence-transformers stay: another model may use the same tokenizer. Without
    ``tokenizer`` its files stay, because another one is there already.
    """
    folder = Path(source).expanduser()
    if not source or folder.is_file():
        return []
    if not folder.is_dir():
        modules = (f"*/{name}" for name in OF_MODULES)
        patterns = [*TOKENIZER, *SETTINGS, *VOCABULARIES, TEMPLATES, MODULES, *SENTENCES, *modules]
        folder = Path(snapshot_download(source, allow_patterns=patterns))
    copier = _Copier(folder, target)
    if tokenizer:
        templates = (str(path.relative_to(folder)) for path in sorted(folder.glob(TEMPLATES)))
        copier.copy((*TOKENIZER, *VOCABULARIES, *templates))
    copier.copy(SETTINGS)
    if pooling:
        copier.copy_modules()
    return copier.notes


class _Copier:
    """Copies single files from one folder to another, and notes those it leaves out."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target, self.notes = folder, target, list[str]()

    def copy(self, names: Iterable[str]) -> None:
        for name in names:
            path, new = self.folder / name, self.target / name
            if not path.is_file() or new.exists():
                continue  # what the model itself has written is newer
            if not is_own(path, self.folder):
                self.notes.append(f"{name} is a link and was not copied.")
                continue
            content = None
            if name not in VOCABULARIES and name.endswith(".json"):
                content = self._read(path)
                if content is None:
                    continue
            new.parent.mkdir(exist_ok=True)
            cleaned = without_code(content)
            if cleaned == content:
                shutil.copyfile(path, new)
                continue
            write_text(new, json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n")
            self.notes.append(f"{name} names code, which was not copied along.")

    def copy_modules(self) -> None:
        """What sentence-transformers does with the outputs: pooling, and maybe projections."""
        modules = self._read(self.folder / MODULES) if is_own(self.folder / MODULES, self.folder) else None
        if modules is None:
            return
        if not self._known(modules):
            self.notes.append(
                f"{MODULES} names code that is not part of sentence-transformers, so what follows the Transformer was "
                "not copied."
            )
            return
        self.copy((MODULES, *SENTENCES))
        for place in [module["path"] for module in modules if module["path"]]:
            self.copy(f"{place}/{name}" for name in OF_MODULES)
            if (self.folder / place / PICKLE).exists() and not (self.target / place / OF_MODULES[1]).exists():
                self.notes.append(f"{place}/{PICKLE} is a pickle and was not copied.")

    def _known(self, modules: Any) -> bool:
        """Whether all modules are those of sentence-transformers, in folders with plain names."""
        return isinstance(modules, list) and all(
            isinstance(each, dict)
            and str(each.get("type")).startswith(OWN_MODULE)
            and isinstance(each.get("path"), str)
            and PLAIN.fullmatch(each["path"])
            for each in modules
        )

    def _read(self, path: Path) -> Any:
        """The JSON in ``path``; None where it cannot be read: it might name code."""
        try:
            return parse_json(path.read_bytes(), path.name)
        except (InputError, OSError) as error:
            self.notes.append(f"{path.relative_to(self.folder)} was not copied: {error}")
            return None
