"""Attention weights without the query heads that go."""

from dataclasses import replace


def apply(weights, change, layer, statistics):
    kept = list(change.kept)

    def pick(tensor):
        return tensor if tensor is None or tensor.ndim == 1 else tensor[kept]

    return replace(
        weights,
        w_q_HKD=weights.w_q_HKD[kept],
        w_o_HVD=weights.w_o_HVD[kept],
        b_q_HK=pick(weights.b_q_HK),
        norm_q=pick(weights.norm_q),
    )
