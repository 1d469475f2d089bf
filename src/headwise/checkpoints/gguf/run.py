"""What llama.cpp computes of a Llama-type GGUF file, in float32 and from the file alone: to check what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from headwise.checkpoints.gguf.package import library


class GgufModel:
    """A GGUF file of architecture ``llama`` or ``deci``, one tensor at a time."""

    def __init__(self, path: Path) -> None:
        """Open ``path``."""
        self._gguf = library()
        reader = self._gguf.GGUFReader(path)
        self._fields, self._tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}
        self._architecture = reader.fields["general.architecture"].contents()
        self._blocks = self._said("block_count")

    @torch.inference_mode()
    def logits(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, vocabulary)."""
        eps, width = self._said("attention.layer_norm_rms_epsilon"), self._said("embedding_length")
        embedding = self._tensor("token_embd.weight")
        x = embedding[ids_BT]
        turns = self._turns(ids_BT.shape[1])
        for number in range(self._blocks):
            heads, kv_heads = (self._listed(f"attention.{name}", number) for name in ("head_count", "head_count_kv"))
            if heads:
                normed = rms_norm(x, (width,), self._tensor(f"blk.{number}.attn_norm.weight"), eps)
                q, k = (
                    _turned(self._project(number, name, normed).unflatten(-1, (count, -1)).transpose(1, 2), turns)
                    for name, count in (("attn_q", heads), ("attn_k", kv_heads))
                )
                v = self._project(number, "attn_v", normed).unflatten(-1, (kv_heads, -1)).transpose(1, 2)
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = x + self._project(number, "attn_output", out.transpose(1, 2).flatten(2))
            if self._listed("feed_forward_length", number):
                normed = rms_norm(x, (width,), self._tensor(f"blk.{number}.ffn_norm.weight"), eps)
                inner = silu(self._project(number, "ffn_gate", normed)) * self._project(number, "ffn_up", normed)
                x = x + self._project(number, "ffn_down", inner)
        x = rms_norm(x, (width,), self._tensor("output_norm.weight"), eps)
        return x @ (self._tensor("output.weight") if "output.weight" in self._tensors else embedding).mT

    def _said(self, name: str) -> Any:
        return self._fields[f"{self._architecture}.{name}"].contents()

    def _listed(self, name: str, number: int) -> int:
        counts = self._said(name)
        return counts[number] if isinstance(counts, list) else counts

    def _tensor(self, name: str) -> Tensor:
        stored = self._tensors[name]
        return torch.tensor(self._gguf.dequantize(stored.data, stored.tensor_type), dtype=torch.float32)

    def _project(self, number: int, name: str, x: Tensor) -> Tensor:
        out = x @ self._tensor(f"blk.{number}.{name}.weight").mT
        bias = f"blk.{number}.{name}.bias"
        return out + self._tensor(bias) if bias in self._tensors else out

    def _turns(self, tokens: int) -> Tensor:
        """Complex turns (tokens, pairs)."""
        width = self._said("rope.dimension_count")
        frequencies = self._said("rope.freq_base") ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        if "rope_freqs.weight" in self._tensors:
            frequencies = frequencies / self._tensor("rope_freqs.weight").double()
        angles = torch.outer(torch.arange(tokens).double(), frequencies)
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _turned(x_BHTK: Tensor, turns_TP: Tensor) -> Tensor:
    """Neighbouring coordinates are the pairs of llama.cpp."""
    return torch.view_as_real(torch.view_as_complex(x_BHTK.unflatten(-1, (-1, 2)).contiguous()) * turns_TP).flatten(-2)
