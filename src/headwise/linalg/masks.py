"""How much a loss feels each unit of an attention layer: gradients of masks that would switch the units off.

The mask of a unit is 1; its gradient is the sum over tokens of (what the unit carries) x (gradient of the loss there).
With labels drawn from the model's own output, the mean square of that gradient is the mask's Fisher information, and
half of it the loss (KL to the model's own output) that switching the unit off costs, to second order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.linalg.coordinates import Units
from headwise.linalg.spectra import Basis
from headwise.linalg.sums import Sums

CAUSAL_BLOCK = 128  # tokens summed into one gradient sample; longer sums would leave too few samples


def key_gradients(k_BGSK: Tensor, grad_BGSK: Tensor, mean_GK: Tensor, units: Units, block: int) -> Tensor:
    """Mask gradients of the key units, (samples, G, U); keys about their mean, which no softmax feels."""
    centred = k_BGSK.float() - mean_GK[:, None].to(k_BGSK)
    return block_sums(units.parts(grad_BGSK.float(), centred), block)


def value_gradients(out_BTHV: Tensor, grad_BTHV: Tensor, basis: Basis, block: int) -> tuple[Tensor, Tensor]:
    """Mask gradients of the value directions of each group, (samples, G, V), and of whole heads, (samples, H)."""
    H, G = out_BTHV.shape[2], basis.values_NR.shape[0]
    out, grad = (t.float().transpose(1, 2).unflatten(1, (G, H // G)) for t in (out_BTHV, grad_BTHV))
    directions, duals = (t[:, None].to(out) for t in (basis.directions_NRR, basis.duals_NRR))
    parts_BGhTV = (out @ duals) * (grad @ directions)
    sums = block_sums(parts_BGhTV.flatten(1, 2), block).unflatten(1, (G, H // G))
    return sums.sum(2), sums.sum(-1).flatten(1)


def block_sums(parts_BNTU: Tensor, block: int) -> Tensor:
    """Sums over blocks of ``block`` tokens, each block a sample of its own: (B * blocks, N, U)."""
    pieces = parts_BNTU.split(block, dim=2)
    return torch.cat([piece.sum(2) for piece in pieces])


def add_fisher(sums: Sums, samples: list[Tensor], sequences: int, outputs: int) -> None:
    """Add the Fisher information of all masks of a layer, (N, N) per output, from samples (n, ...) of each kind.

    Blocks of one sequence are counted as if they were independent, for the sake of many samples. How far that is wrong
    is added up beside it, one number for each kind: squared sums over whole sequences, and over blocks.
    """
    flat = torch.cat([sample.flatten(1) for sample in samples], dim=1).double()
    sums.add("fisher", flat.T @ flat, outputs)
    wholes = [sample.unflatten(0, (-1, sequences)).sum(0) for sample in samples]
    for name, parts in (("whole", wholes), ("blocks", samples)):
        sums.add(name, torch.stack([part.double().square().sum() for part in parts]), outputs)


def coherence(sums: Sums) -> Tensor:
    """By how much whole sequences feel the masks of each kind more than their blocks, counted as independent, would."""
    return sums.mean("whole") / sums.mean("blocks").clamp(min=torch.finfo(torch.float64).tiny)
