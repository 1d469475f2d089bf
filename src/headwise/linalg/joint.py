"""Best low-rank form of a product of two thin factors, from small cores only.

A head's query-key and value-output maps are products of two thin matrices. Truncating the product jointly (not each
matrix by itself) is what the papers call SVD initialisation; never is the D x D product formed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def joint_truncate(left_NAR: Tensor, right_NBR: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-``rank`` form of each ``left @ right.T`` in Frobenius norm, as factors (N, A, rank), (N, B, rank).

    QR of both factors, SVD of the small R x R core, singular values shared evenly between the two sides.
    """
    left, right = left_NAR.double(), right_NBR.double()
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    root = s[:, None, :rank].sqrt()
    factors = (q_left @ (u[..., :rank] * root), q_right @ (vh.mT[..., :rank] * root))
    # Fewer rows than ``rank`` leave nothing for the last columns.
    left, right = (F.pad(factor, (0, rank - factor.shape[-1])) for factor in factors)
    return left.to(left_NAR.dtype), right.to(right_NBR.dtype)


def pair_energy(q_NAK: Tensor, k_NBK: Tensor, pairs: int) -> Tensor:
    """How much each RoPE pair can add to the logits: norm of its query rows times norm of its key rows, (N, pairs)."""
    norms = [
        rows[..., : 2 * pairs].double().unflatten(-1, (2, pairs)).square().sum(dim=(1, 2)).sqrt()
        for rows in (q_NAK, k_NBK)
    ]
    return norms[0] * norms[1]
