"""The models of `depth/lean`, arm by arm, and what they are trained on: digits, CIFAR-10, text and ListOps.

All arms of one data set share a residual width. Beside the baseline and the lean models stand the controls that
reviewers of the paper missed: the same depth with more heads, half the depth with the heads of before, and lean models
with the parameters or the work of the baseline.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.papers.depth.listops import WORDS, listops
from headwise.papers.kit.cifar import cifar10
from headwise.papers.kit.data import SYMBOLS, Labelled, batches, digits, patches
from headwise.papers.kit.language import Reading, held_out, teach, validation_loss
from headwise.papers.kit.small import Classifier, Positions, Shape, Small
from headwise.papers.kit.training import fit
from headwise.theory.lean_depth import Stack, lean

ARMS = (
    "baseline",
    "more heads",
    "wider heads",
    "shallow",
    "shallow equal size",
    "lean",
    "lean wide",
    "lean equal size",
    "lean equal work",
    "lean equal time",
    "shallow equal time",
    "lean half MLP",
)
STEP_TIME = {  # of one step against one of the baseline, as measured with the arms above
    "lean": {"images": 0.70, "photos": 0.85, "text": 0.64, "listops": 0.76},
    "shallow": {"images": 0.65, "photos": 0.54, "text": 0.50, "listops": 0.53},
}
LONG_RANGE = {  # the shapes of the Long-Range Arena, on ListOps only
    "2 layers of 2": Stack(layers=2, width=64, heads=2, head_dim=32, mlp=128),
    "1 layer of 4": Stack(layers=1, width=64, heads=4, head_dim=32, mlp=128),
    "1 layer of 8": Stack(layers=1, width=64, heads=8, head_dim=32, mlp=128),
}
BASE = {
    "images": Stack(layers=4, width=64, heads=4, head_dim=16, mlp=128),
    "photos": Stack(layers=6, width=64, heads=4, head_dim=16, mlp=128),
    "text": Stack(layers=6, width=96, heads=4, head_dim=24, mlp=384),
    "listops": Stack(layers=4, width=64, heads=4, head_dim=16, mlp=128),
}
PATCHES = {"images": 2, "photos": 4}
PHOTOS, LISTOPS, LONGEST = 10_000, 20_000, 48
LENGTH, WINDOWS, RATE = 128, 4, 5e-3
EVALUATION = 128  # windows
LOOKED_AT = 8


def arm(data: str, name: str, steps: int) -> tuple[Stack, int]:
    """The shape of an arm and its training steps."""
    base = BASE[data]
    if name == "baseline" or name in LONG_RANGE:
        return LONG_RANGE.get(name, base), steps
    depth = 1.0 if name in {"more heads", "wider heads"} else 0.5
    heads = 1 if "shallow" in name else 2
    kept = "head_dim" if "wide" in name else "width"
    mlp = 0.5 if "half MLP" in name else 1.0
    stack = lean(base, more_heads=heads, keep_layers=depth, keep_mlp=mlp, keep=kept)
    if "equal size" in name:
        spare = (base.weights - stack.weights) // (2 * stack.width * stack.layers)
        return replace(stack, mlp=stack.mlp + spare), steps
    if name == "lean equal work":
        return stack, round(steps * base.weights / stack.weights)
    if "equal time" in name:
        return stack, round(steps / STEP_TIME[name.removesuffix(" equal time")][data])
    return stack, steps


class Text:
    """Characters of headwise's texts; the score is minus the loss."""

    tokens, causal = LENGTH, True
    positions: Positions = "relative"  # learned ones take far longer to learn

    def build(self, shape: Shape) -> nn.Module:
        """A language model."""
        return Small(shape, nn.Embedding(SYMBOLS, shape.width), SYMBOLS)

    def train(self, model: nn.Module, steps: int, seed: int) -> list[float]:
        """Losses of a training."""
        return teach(model, Reading(LENGTH, WINDOWS, steps, RATE), seed)

    def score(self, model: nn.Module) -> float:
        """Minus nats per held-out character."""
        return -validation_loss(model, LENGTH, EVALUATION)

    def examples(self) -> Tensor:
        """Inputs to look at."""
        return held_out(LENGTH, LOOKED_AT)[0]


class Labels:
    """Digits, CIFAR-10 or ListOps; the score is held-out accuracy."""

    causal = False
    positions: Positions = "learned"

    def __init__(self, name: str) -> None:
        self.data = listops(LISTOPS, LONGEST) if name == "listops" else _in_patches(name)
        self.tokens = self.data.inputs.shape[1]

    def build(self, shape: Shape) -> nn.Module:
        """A classifier of ten labels."""
        inputs = self.data.inputs
        words = inputs.ndim == 2  # noqa: PLR2004
        reads = nn.Embedding(WORDS, shape.width) if words else nn.Linear(inputs.shape[2], shape.width)
        return Classifier(shape, reads, 10)

    def train(self, model: nn.Module, steps: int, seed: int) -> list[float]:
        """Losses of a training."""
        return fit(model, batches(self.data, 32), F.cross_entropy, steps=steps, rate=1e-3, seed=seed, decay=0.01)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Held-out accuracy."""
        data = self.data
        answers = torch.cat([model(part).argmax(1) for part in data.inputs[data.train :].split(100)])
        return float((answers == data.labels[data.train :]).float().mean())

    def examples(self) -> Tensor:
        """Inputs to look at."""
        return self.data.inputs[-LOOKED_AT:]


def _in_patches(name: str) -> Labelled:
    labelled = digits() if name == "images" else cifar10(PHOTOS)
    return Labelled(patches(labelled.inputs, PATCHES[name]), labelled.labels, labelled.train)
