"""More heads, fewer layers: the shapes that paper `depth` (Leaner Transformers: More Heads, Less Depth) trades for.

The paper has no rule for how far to go; it chose by architecture (heads times 1.33 to 2, a third to two thirds of the
layers, in half of the cases also half of the MLP), by first raising heads at full depth while accuracy and conditioning
improve, then removing layers until accuracy falls below the original. Two conventions of "more heads" are mixed in
its tables and differ in cost, so here the caller names one: "width" keeps ``heads * head_dim`` and makes heads narrower
(XCiT, DaViT, BERT, GPT-2: an attention keeps its size), "head_dim" keeps their width and widens the attention inside an
unchanged residual stream (Long-Range Arena: an attention grows with its heads).

Two of its rows do not fit their own parameter counts as transcribed: XCiT-M fits 16 layers, not 12, and TNT-B only an
MLP halved as well. At a fixed width very narrow heads lose (Bhojanapalli et al. 2020), and half an MLP is nearly free
by itself (arXiv 2512.01059): compare at equal weights.
"""

from dataclasses import dataclass, replace
from typing import Literal

from headwise.files.errors import InputError

Kept = Literal["width", "head_dim"]


@dataclass(frozen=True, slots=True)
class Stack:
    """The blocks of a Transformer: every attention ``heads * head_dim`` wide, every MLP ``mlp``, gated or not."""

    layers: int
    width: int
    heads: int
    head_dim: int
    mlp: int
    gated: bool = False

    @property
    def weights(self) -> int:
        """Weights in the matrices of all blocks (no biases, norms or embeddings)."""
        matrices = 3 if self.gated else 2
        return self.layers * self.width * (4 * self.heads * self.head_dim + matrices * self.mlp)


def lean(stack: Stack, *, more_heads: float, keep_layers: float, keep_mlp: float = 1.0, keep: Kept = "width") -> Stack:
    """``stack`` with ``more_heads`` times the heads and shares of its layers and MLP width, by one convention.

    Where the residual stream is meant to grow with the heads (the paper's ablation on ViT-B, by one reader), keep
    "head_dim" and replace ``width`` by ``heads * head_dim``.
    """
    heads = round(stack.heads * more_heads)
    inner = stack.heads * stack.head_dim
    if keep == "width" and (not heads or inner % heads):
        raise InputError(f"{heads} heads cannot share a width of {inner} evenly; choose another number of heads.")
    return replace(
        stack,
        layers=max(1, round(stack.layers * keep_layers)),
        heads=heads,
        head_dim=inner // heads if keep == "width" else stack.head_dim,
        mlp=round(stack.mlp * keep_mlp),
    )
