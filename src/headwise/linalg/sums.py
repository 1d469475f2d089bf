"""Running means in constant memory, which can be saved and continued."""

from __future__ import annotations

import torch
from torch import Tensor

COUNT = "#"


class Sums:
    """Named running totals with their counts."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, count: float) -> None:
        """Add ``total``, a sum over ``count`` items, to the sum called ``name``."""
        for key, value in ((name, total.double()), (name + COUNT, torch.tensor(float(count), dtype=torch.float64))):
            if key in self.totals:
                self.totals[key] += value.cpu()
            else:
                self.totals[key] = value.cpu().clone()

    def has(self, name: str) -> bool:
        """Whether anything was added under ``name``."""
        return name in self.totals

    def mean(self, name: str) -> Tensor:
        """The mean of all that was added under ``name``."""
        return self.totals[name] / self.totals[name + COUNT]

    def count(self, name: str) -> float:
        """How many items were added under ``name``."""
        return self.totals[name + COUNT].item()
