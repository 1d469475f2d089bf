"""What a model may cost: read from what a person asks for, counted layer by layer, and checked at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from headwise.files.errors import BudgetError, InputError
from headwise.files.reading import Reader
from headwise.records.cost import DTYPE_BYTES, cost_of
from headwise.records.shape import LayerShape, ModelShape
from headwise.records.timing import Timing

Kind = Literal[
    "keep_kv", "keep_params", "keep_attention_params", "kv_bytes_per_token", "fit", "layers", "keep_decode_time"
]
SHARES = ("keep_kv", "keep_params", "keep_attention_params", "keep_decode_time")
WORDS = {
    "keep_kv": "KV cache",
    "keep_params": "parameters of the blocks",
    "keep_attention_params": "attention parameters",
    "kv_bytes_per_token": "KV cache per token",
    "fit": "memory for weights and KV cache",
    "keep_decode_time": "decode time",
    "layers": "layers",
}
DEFAULT_CONTEXT = 8192
UNITS = {"": 1, "k": 10**3, "ki": 2**10, "m": 10**6, "mi": 2**20, "g": 10**9, "gi": 2**30, "t": 10**12, "ti": 2**40}
FIT = re.compile(r"([\d.]+) *([kmgt]i?)?b +at +(\d+)(k?) *(?:[x*] *(\d+))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """``amount`` is a share to keep, bytes (of KV cache per token, or to "fit" weights and cache into) or layers.

    ``context`` and ``batch`` are the tokens and sequences in the cache (None: what the model was made for, up to
    8,192), which matter for "fit", for decode time, and for "keep_kv" where layers with a window cache fewer tokens
    than others. Decode time is a share that may exceed 1, and is counted by what ``timing`` measured. ``also`` are
    further budgets that hold at once.
    """

    kind: Kind
    amount: float
    context: int | None = None
    batch: int = 1
    dtype: str = "bf16"
    timing: Timing | None = None
    also: tuple[Budget, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"Unknown budget {self.kind!r}; use one of {', '.join(get_args(Kind))}.")
        if self.kind == "keep_decode_time":
            if not 0 < self.amount < math.inf:
                raise InputError(f"A share of decode time is more than 0, got {self.amount}.")
            if self.context is not None and self.context < 1:
                raise InputError(f"Decode time is measured after at least one token, got {self.context}.")
        elif self.kind in SHARES and not 0 < self.amount <= 1:
            raise InputError(f"A share lies between 0 and 1, got {self.amount}.")
        if self.kind == "layers" and (self.amount < 1 or self.amount != int(self.amount)):
            raise InputError(f"A model needs at least one layer, and whole ones; got {self.amount:g}.")
        if self.amount <= 0:
            raise InputError(f"A budget of {self.amount:g} bytes holds no model.")
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"Unknown dtype {self.dtype!r}; use one of {', '.join(DTYPE_BYTES)}.")

    @classmethod
    def fitting(cls, text: str, dtype: str = "bf16") -> Budget:
        """The budget that ``text`` like "8GB at 32k x 4" asks for: memory, tokens in the cache, sequences at once."""
        match = FIT.fullmatch(text.strip())
        try:
            size, unit, tokens, thousands, batch = match.groups() if match else ()
            amount = int(Fraction(size) * UNITS[(unit or "").lower()])
        except ValueError:
            raise InputError(
                f'Cannot read {text!r}: expected memory, tokens and sequences as in "8GB at 32k x 4".'
            ) from None
        return cls("fit", amount, int(tokens) * (1024 if thousands else 1), int(batch or 1), dtype)

    def each(self) -> Iterator[Budget]:
        """This budget by itself, then each of those that hold at once."""
        yield replace(self, also=())
        for budget in self.also:
            yield from budget.each()

    @property
    def depth(self) -> Budget | None:
        """The budget that says how many layers may stay; None where none does."""
        return next((budget for budget in self.each() if budget.kind == "layers"), None)

    @property
    def beside_depth(self) -> Budget | None:
        """The budgets that do not count layers; None where there are none."""
        others = [budget for budget in self.each() if budget.kind != "layers"]
        return replace(others[0], also=tuple(others[1:])) if others else None

    @property
    def timed(self) -> bool:
        """Whether decode time is limited."""
        return any(budget.kind == "keep_decode_time" for budget in self.each())

    def with_timing(self, timing: Timing) -> Budget:
        """The same, with ``timing`` for what it limits of decode time."""
        own = timing if self.kind == "keep_decode_time" else None
        return replace(self, timing=own, also=tuple(budget.with_timing(timing) for budget in self.also))

    def check(self, shape: ModelShape) -> None:
        """Raise where the model of ``shape`` has nothing of what is limited."""
        for budget in self.each():
            if budget.kind == "keep_decode_time":
                _check_decodes(shape)
            else:
                budget.limit(shape)

    def tokens(self, shape: ModelShape) -> int:
        """Tokens in the cache of the model of ``shape``."""
        return min(DEFAULT_CONTEXT, shape.max_tokens) or DEFAULT_CONTEXT if self.context is None else self.context

    def measure(self, shape: ModelShape) -> int:
        """What the budget limits of the model of ``shape``: exactly, but for time (in nanoseconds)."""
        if self.kind == "keep_decode_time":
            return self._timing().of_model(shape)
        cost = cost_of(shape, self.tokens(shape), self.batch, self.dtype)
        limited = {
            "keep_kv": cost.kv_bytes,
            "keep_params": shape.block_parameters(),
            "keep_attention_params": cost.attention_parameters,
            "kv_bytes_per_token": cost.kv_bytes_per_token,
            "layers": len(shape.layers),
            "fit": cost.total_parameters * DTYPE_BYTES[self.dtype] + cost.kv_bytes,
        }
        return limited[self.kind]

    def cost(self, layer: LayerShape | None, shape: ModelShape) -> int:
        """The part of `measure` that ``layer`` with its block has in the model of ``shape``; None: it was dropped."""
        if layer is None:
            return 0
        if self.kind == "keep_decode_time":
            return self._timing().of_layer(layer, shape)
        if self.kind == "layers":
            return 1
        parameters = layer.parameters(shape.width)
        if self.kind == "keep_attention_params":
            return parameters
        in_block = parameters + layer.own_norm + layer.rest_parameters
        if self.kind == "keep_params":
            return in_block
        bytes_each = DTYPE_BYTES[self.dtype]
        if self.kind == "kv_bytes_per_token":
            return layer.token_bytes(bytes_each) if layer.cache == "tokens" else 0
        tokens = layer.cached_tokens(self.tokens(shape), shape.source_tokens)
        cached = layer.cache_bytes(tokens, self.batch, bytes_each)
        if self.kind == "keep_kv":
            return cached
        return cached + in_block * bytes_each

    def limit(self, shape: ModelShape) -> int:
        """The most that `measure` may give after planning for the model of ``shape``."""
        full = self.measure(shape)
        if not full:
            raise InputError("This model has no KV cache; use `keep_attention_params`.")
        return int(Fraction(str(self.amount)) * full) if self.kind in SHARES else int(self.amount)

    def refusal(self, shape: ModelShape, feasible: int, terms: str) -> BudgetError:
        """The error that says what is feasible under ``terms`` instead, rounded up so that it can be asked for."""
        full, what = self.measure(shape), WORDS[self.kind]
        if self.kind in SHARES:
            wanted, can = f"{self.amount:.4g}", f"{math.ceil(1e5 * feasible / full) / 1e5:g}"
            return BudgetError(f"Keeping {wanted} of the {what} is not possible with {terms}; the least is {can}.")
        if self.kind == "layers":
            return BudgetError(f"{int(self.amount)} layers are not possible with {terms}; the least is {feasible}.")
        if self.kind == "kv_bytes_per_token":
            wanted, can = f"{int(self.amount):,} bytes", f"{feasible:,} bytes"
        else:
            what += f" at {self.tokens(shape):,} tokens x {self.batch}"
            wanted, can = f"{self.amount / 1e9:.4g} GB", f"{math.ceil(feasible / 1e6) / 1e3:g} GB"
        return BudgetError(
            f"{wanted} of {what} are not possible with {terms}; the least is {can} (now {full:,} bytes)."
        )

    def facts(self, shape: ModelShape) -> dict[str, Any]:
        """This budget, with those that hold at once, as a plan records it."""
        facts: dict[str, Any] = {self.kind: self.amount, "dtype": self.dtype}
        if self.kind in ("keep_kv", "fit", "keep_decode_time"):
            facts["context"] = self.tokens(shape)
        if self.kind == "fit":
            facts["batch"] = self.batch
        if self.timing is not None:
            facts |= {"device": self.timing.device, "timed_in": self.timing.dtype}
        return {name: value for budget in self.also for name, value in budget.facts(shape).items()} | facts

    def _timing(self) -> Timing:
        if self.timing is None:
            raise InputError("Decode time has to be measured before it can be planned: give the `model`.")
        return self.timing


def _check_decodes(shape: ModelShape) -> None:
    if any(layer.cache != "tokens" for layer in shape.layers):
        raise InputError("Decode time is planned for decoders alone; use `keep_attention_params`.")
    if any(layer.latent for layer in shape.layers):
        raise InputError("The decode time of latent attention (MLA) is not known; use another budget.")
    if any(layer.packed for layer in shape.layers):
        raise InputError("The cache of this model is packed already: plan for the model that it was made from.")


def budget_words(facts: Mapping[str, Any]) -> str:
    """The budget of a plan (`Budget.facts`) in words; nothing where it answers none."""
    return " and ".join(_words(kind, facts) for kind in WORDS if kind in facts)


def _words(kind: str, facts: Mapping[str, Any]) -> str:
    if kind in SHARES:
        more = f" after {facts['context']:,} tokens on {facts['device']}" if "device" in facts else ""
        return f"{facts[kind]:g} of the {WORDS[kind]}{more if kind == 'keep_decode_time' else ''}"
    more = f" at {facts['context']:,} tokens x {facts['batch']}" if kind == "fit" else ""
    return f"{facts[kind]:,} layers" if kind == "layers" else f"{facts[kind]:,} bytes of {WORDS[kind]}{more}"


def check_budget(facts: Reader) -> None:
    """Raise where what a plan says of its budget is not what `Budget.facts` gives."""
    for name in (name for name in WORDS if facts.has(name)):
        facts.number(name, least=0)
        if name == "fit":
            facts.integer("batch", least=1)
            facts.integer("context", least=1)


def natural_budget(shape: ModelShape) -> Kind:
    """What there is to save: the KV cache, or the weights of models without one."""
    return "keep_kv" if any(layer.cached_per_token for layer in shape.layers) else "keep_attention_params"
