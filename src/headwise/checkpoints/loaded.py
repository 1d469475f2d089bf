"""A model with its tokenizer, wherever both come from: opened here, or given as objects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import files_fingerprint, fingerprint, located
from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.files.errors import InputError
from headwise.records.settings import OpenConfig


@dataclass(slots=True)
class Loaded:
    """A model in its own precision, what to call it, and its tokenizer: given, or opened when it is first needed.

    ``opened``: it was opened from ``name`` by headwise. ``own``: by the step that has it, so that nobody else needs it.
    """

    model: PreTrainedModel
    name: str
    opened: bool = False
    given_tokenizer: Any = None
    trust_remote_code: bool = False
    own: bool = False
    _weights: str = ""

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, opening: OpenConfig | None = None) -> Loaded:
        """``model`` itself, or the model at the folder or Hub id ``model``."""
        trusted = opening is not None and opening.trust_remote_code
        if isinstance(model, Loaded):
            return replace(model, own=False)
        if isinstance(model, PreTrainedModel):
            return cls(model, model.name_or_path or type(model).__name__, False, tokenizer, trusted)
        if isinstance(model, str | Path):
            return cls(open_model(str(model)), str(model), True, tokenizer, trusted, own=True)
        raise InputError(f"A model is a PreTrainedModel of transformers, a folder or a Hub id, not a {type(model)}.")

    def opening(self, given: OpenConfig | None) -> OpenConfig | None:
        """Where to run: as ``given``; else one opened by headwise on a GPU if there is one, others where they are."""
        return OpenConfig() if given is None and self.opened else given

    def tokenizer(self) -> Any:
        """The tokenizer, or an `InputError` where there is none."""
        if self.given_tokenizer is None:
            if not self.opened:
                raise InputError(
                    f"{self.name} is to read text: give its `tokenizer`, or ready-made batches as `inputs`."
                )
            self.given_tokenizer = open_tokenizer(self.name, trust_remote_code=self.trust_remote_code)
        return self.given_tokenizer

    def place(self) -> str:
        """Where the model is, for whoever looks for it later; "" where it is only in memory."""
        named = self.name if self.opened else self.model.name_or_path
        return located(named) if named else ""

    def fingerprint(self) -> str:
        """What tells these weights from others, as they were before anybody placed them in another precision."""
        self._weights = self._weights or fingerprint(self.model)
        return self._weights

    def files(self) -> str:
        """A hash of what lies beside the weights; "" where the model was given as an object."""
        return files_fingerprint(self.name) if self.opened else ""
