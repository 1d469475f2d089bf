"""Sensitivity of the loss to each unit of an attention layer: gradients of masks that would switch the units off.

The mask of a unit is 1; its gradient is the sum over tokens of (what the unit carries) x (gradient of the loss there).
With labels sampled from the model, the mean square of that gradient is the mask's Fisher information, and
half of it the predicted loss increase (KL from the baseline) of switching the unit off, to second order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.linalg.coordinates import Units
from headwise.linalg.spectra import Basis
from headwise.linalg.sums import Sums

CAUSAL_BLOCK = 128  # tokens summed into one gradient sample; longer sums would leave too few samples


def key_gradients(k_BGSK: Tensor, grad_BGSK: Tensor, mean_GK: Tensor, units: Units, block: int) -> Tensor:
    """Mask gradients of the key units, (samples, G, U); keys about their mean, to which a softmax is invariant."""
    centred = (k_BGSK.double() - mean_GK[:, None].to(k_BGSK.device)).float()
    return block_sums(units.parts(grad_BGSK.float(), centred), block)


def value_gradients(out_BTHV: Tensor, grad_BTHV: Tensor, basis: Basis, block: int) -> tuple[Tensor, Tensor]:
    """Mask gradients of the value directions of each group, (samples, G, V), and of whole heads, (samples, H, 1)."""
    H, G = out_BTHV.shape[2], basis.values_NR.shape[0]
    out, grad = (t.float().transpose(1, 2).unflatten(1, (G, H // G)) for t in (out_BTHV, grad_BTHV))
    directions, duals = (t[:, None].to(out) for t in (basis.directions_NRR, basis.duals_NRR))
    parts_BGhTV = (out @ duals) * (grad @ directions)
    sums = block_sums(parts_BGhTV.flatten(1, 2), block).unflatten(1, (G, H // G))
    return sums.sum(2), sums.sum(-1).flatten(1)[..., None]


def block_sums(parts_BNTU: Tensor, block: int) -> Tensor:
    """Sums over blocks of ``block`` tokens, each block a sample of its own: (B * blocks, N, U)."""
    pieces = parts_BNTU.split(block, dim=2)
    return torch.cat([piece.sum(2) for piece in pieces])


def add_fisher(sums: Sums, samples: dict[str, Tensor], sequences: int, outputs: int) -> None:
    """Add the Fisher information per output of the masks of each kind, from samples (n, groups, units).

    A matrix for each group: units of different groups and kinds would need far more samples than there are. Blocks of
    one sequence are counted as if they were independent, for the sake of many samples; how far that is wrong is added
    up beside it, as squared sums over whole sequences and over blocks.
    """
    for kind, sample in samples.items():
        parts = sample.double()
        sums.add(f"{kind}_fisher", torch.einsum("ngu,ngw->guw", parts, parts), outputs)
        add_coherence(sums, kind, parts, sequences, outputs)


def add_coherence(sums: Sums, kind: str, sample: Tensor, sequences: int, outputs: int) -> None:
    """Add squared sums of mask gradients (n, groups, units) over whole sequences, and over their blocks."""
    sums.add(f"{kind}_whole", sample.unflatten(0, (-1, sequences)).sum(0).square().sum(), outputs)
    sums.add(f"{kind}_blocks", sample.square().sum(), outputs)


def coherence(sums: Sums, kind: str) -> Tensor:
    """Fisher information of a kind's masks from whole sequences, over that from blocks counted as independent."""
    return sums.mean(f"{kind}_whole") / sums.mean(f"{kind}_blocks").clamp(min=torch.finfo(torch.float64).tiny)
