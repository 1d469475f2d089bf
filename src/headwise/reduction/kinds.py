"""The kinds of reduction there are: each a package with the same few modules, found by name and imported when needed.

- ``change``: one `Change`, the record that stands in plans;
- ``options``: ``options(request)``, what it can do to a profiled layer, or ``spans(request)``, what to several at once,
  and ``predicted_loss(layer, values, change)``;
- ``apply``: ``apply(weights, change, layer, statistics)``, weights in, weights out;
- ``settle``, if there is one: ``settle(model, plan, statistics, shared=...)``, the plan with nothing left open.

The first two must not need torch, so that a plan from a profile stays instant; of the others `headwise.reduction.apply`
has the types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headwise.planning.depth import Span
from headwise.planning.menus import MenuItem, MenuRequest
from headwise.records.change import Change, forget, know
from headwise.records.shape import LayerShape

BUILT_IN = (
    "headwise.reduction.widths",
    "headwise.reduction.removal",
    "headwise.reduction.bits",
    "headwise.reduction.latent",
    "headwise.reduction.sharing",
    "headwise.reduction.absorbed",
    "headwise.reduction.mlp",
    "headwise.reduction.flatten",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of reduction: the package it lives in and its record in plans."""

    package: str
    change: type[Change]

    @property
    def options(self) -> Callable[[MenuRequest], Iterable[MenuItem]]:
        """From a profile to what each part of each layer may become."""
        return getattr(self.part("options"), "options", _none)

    @property
    def spans(self) -> Callable[[MenuRequest], Iterable[Span]]:
        """From a profile to what neighbouring blocks may become together."""
        return getattr(self.part("options"), "spans", _none)

    @property
    def predicted_loss(self) -> Callable[[LayerShape, Mapping[str, Any], Change], float]:
        """From a measured layer and a change of this kind to the predicted loss increase."""
        return self.part("options").predicted_loss

    def has(self, name: str) -> bool:
        """Whether the package has a module ``name``."""
        return find_spec(f"{self.package}.{name}") is not None

    def part(self, name: str) -> Any:
        """The module ``name`` of the package."""
        return import_module(f"{self.package}.{name}")


def _none(request: MenuRequest) -> tuple[()]:
    return ()


_KINDS: dict[str, Kind] = {}


def register(package: str) -> Kind:
    """Make the kind in ``package`` known to plans and to everything that makes or carries them out."""
    module = import_module(f"{package}.change")
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Change) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise ValueError(f"{module.__name__} must define one change, it defines {len(own)}.")
    know(own[0])
    return _KINDS.setdefault(own[0].kind, Kind(package, own[0]))


def unregister(kind: str) -> None:
    """Forget the kind called ``kind``."""
    _KINDS.pop(kind, None)
    forget(kind)


def kinds() -> tuple[Kind, ...]:
    """All kinds, in the order in which they were registered: of equal options the first kind's is taken."""
    return tuple(_KINDS.values())


def kind_of(change: Change) -> Kind:
    """The kind that ``change`` belongs to."""
    return _KINDS[change.kind]


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], changes: Sequence[Change]) -> float:
    """The predicted loss increase of ``changes`` of a measured layer; nothing measured, nothing predicted.

    Each is held against the layer as it was measured, and what they cost is added up.
    """
    if not values or not layer.heads:
        return 0.0
    return sum(kind_of(change).predicted_loss(layer, values, change) for change in changes)


for built_in in BUILT_IN:
    register(built_in)
