"""A model family as data: where its attention sits and how its weights are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwise.records.shape import Cache


@dataclass(frozen=True, slots=True)
class Mlp:
    """Where the MLP of a block is; paths start at the block. ``fused``: ``up`` holds the gate in front of itself.

    ``norms`` feed (or follow) it alone and are removed with it, but where the config flag ``norms_if`` is off: then, as
    with ``norm_after``, a norm stands behind the sum of what ``up`` reads and ``down`` adds. ``norm_behind`` says that
    one stands between ``down`` and the residual stream. ``width`` is the name of the channels in the config.
    """

    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate: str | None = None
    fused: bool = False
    norms: tuple[str, ...] = ()
    norms_if: str | None = None
    norm_behind: bool = False
    norm_after: bool = False
    width: str = "intermediate_size"

    @property
    def module(self) -> str | None:
        """The module that is nothing but this MLP; None where its projections stand among others."""
        parent = self.down.rpartition(".")[0]
        return parent if parent and parent == self.up.rpartition(".")[0] else None


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of blocks that each hold one attention of this kind. Paths below ``blocks`` start at a block.

    ``norms`` feed (or follow) this attention alone and are removed with it; where a config flag decides that,
    ``norms_if`` names it. ``norm_behind`` says that one stands between the output projection and the
    residual stream; ``common_norm`` is one that feeds this attention and the MLP alike. ``cache`` is "tokens" for
    decoders, "source" for cross attention, "none" for encoders. ``mlp`` is the MLP behind this attention (None: there
    is none, or it is left alone).
    """

    blocks: str
    attention: str
    out: str
    norms: tuple[str, ...] = ()
    norms_if: str | None = None
    norm_behind: bool = False
    common_norm: str | None = None
    cache: Cache = "tokens"
    mlp: Mlp | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One way of writing attention. Names of projections are relative to the attention module.

    ``fused`` names the one projection that holds q, k and v: one block after the other ("blocks") or head by head
    ("heads"); ``q, k, v`` then name the projections a reduced model has instead. ``norms`` are the norms on queries
    and keys. ``latent`` marks multi-head latent attention, of which only the cache can be reduced.
    ``head_dim`` says that the config can state a head width of its own (then a uniform smaller width is a stock model),
    ``rope_list`` that the rotary module takes any list of frequencies. ``once`` names modules that run once per
    sequence, not per token.
    """

    name: str
    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    fused: str | None = None
    fused_by: Literal["blocks", "heads"] = "blocks"
    positions: Literal["rotary", "learned"] = "rotary"
    norms: tuple[str, ...] = ()
    latent: bool = False
    head_dim: bool = False
    rope_list: bool = False
    once: tuple[str, ...] = ("pooler", "classifier", "score", "qa_outputs")
