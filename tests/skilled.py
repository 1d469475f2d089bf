"""Models that can do some things by construction: for tests of what is measured of skills."""

import torch
from torch.nn.functional import one_hot
from transformers import LlamaForCausalLM

from tests.tiny import tiny


class Copier(LlamaForCausalLM):
    """Goes on as the text did after the longest earlier stretch that ends as it does now; says so with certainty."""

    def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        logits = 20.0 * one_hot(continuation(input_ids), self.config.vocab_size)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output.logits = logits.to(output.logits.dtype)[:, kept]
        return output


def continuation(ids_BT: torch.Tensor) -> torch.Tensor:
    """For each token the one after the longest earlier stretch that ends as the text does there; itself if none."""
    predicted_BT = ids_BT.clone()
    length_BT = torch.zeros_like(ids_BT)  # of the stretch that ends at each earlier token
    for now in range(1, ids_BT.shape[1]):
        shifted = torch.cat((torch.zeros_like(length_BT[:, :1]), length_BT[:, :-1]), 1)
        length_BT = torch.where(ids_BT == ids_BT[:, now : now + 1], shifted + 1, 0)
        longest, place = length_BT[:, :now].max(1)
        following = ids_BT.gather(1, place[:, None] + 1)[:, 0]
        predicted_BT[:, now] = torch.where(longest > 0, following, ids_BT[:, now])
    return predicted_BT


def copier(**changes):
    """A tiny one."""
    model = tiny("llama", **changes)
    model.__class__ = Copier
    return model
