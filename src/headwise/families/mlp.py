"""MLPs of any family in one neutral view, and back.

Shape letters as in `headwise.linalg`; M counts channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from headwise.families.family import Mlp
from headwise.families.sites import Site, matrix
from headwise.families.weights import fill
from headwise.runtime.modeling_headwise import NoMlp

WIDER = 4  # times the width of the model: channels where a config leaves them open


@dataclass(frozen=True, slots=True)
class MlpSite:
    """The projections of one MLP; of a ``fused`` one ``up`` also is the gate.

    ``norm_behind`` and ``norm_after`` are as in `headwise.families.family.Mlp`.
    """

    up: nn.Module
    down: nn.Module
    gate: nn.Module | None
    fused: bool
    norm_behind: bool
    norm_after: bool

    @property
    def projections(self) -> list[nn.Module]:
        """All linear maps."""
        return [self.up, *([] if self.gate is None else [self.gate]), self.down]

    @property
    def channels(self) -> int:
        """Channels between them."""
        return matrix(self.down).shape[1]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """One MLP: ``act(w_gate x + b_gate) * (w_up x + b_up)`` (plain ones: ``act(w_up x + b_up)``), times ``w_down``."""

    w_up_MD: Tensor
    w_down_MD: Tensor
    w_gate_MD: Tensor | None = None
    b_up_M: Tensor | None = None
    b_gate_M: Tensor | None = None
    b_down_D: Tensor | None = None


def mlp_of(site: Site) -> MlpSite | None:
    """The MLP behind the attention of ``site``; None where there is none (any more) or headwise does not know it."""
    spec = site.stack.mlp
    if spec is None:
        return None
    try:
        up, down = (site.block.get_submodule(path) for path in (spec.up, spec.down))
        gate = None if spec.gate is None else site.block.get_submodule(spec.gate)
    except AttributeError:
        return None
    if isinstance(down, NoMlp):
        return None
    norm_after = spec.norm_after or (spec.norms_if is not None and not site.mlp_norm_paths)
    return MlpSite(up, down, gate, spec.fused, spec.norm_behind, norm_after)


def stock_channels(config: PreTrainedConfig, spec: Mlp) -> int:
    """Channels of every MLP in a stock model of this ``config``."""
    return getattr(config, spec.width) or WIDER * config.hidden_size


def read_mlp(mlp: MlpSite) -> MlpWeights:
    """The weights of ``mlp`` as views."""
    w_up, b_up = matrix(mlp.up), cast(Tensor | None, mlp.up.bias)
    w_gate = b_gate = None
    if mlp.fused:
        w_gate, w_up = w_up.chunk(2)
        if b_up is not None:
            b_gate, b_up = b_up.chunk(2)
    elif mlp.gate is not None:
        w_gate, b_gate = matrix(mlp.gate), cast(Tensor | None, mlp.gate.bias)
    return MlpWeights(
        w_up_MD=w_up,
        w_down_MD=matrix(mlp.down).T,
        w_gate_MD=w_gate,
        b_up_M=b_up,
        b_gate_M=b_gate,
        b_down_D=cast(Tensor | None, mlp.down.bias),
    )


def write_mlp(mlp: MlpSite, weights: MlpWeights) -> None:
    """Copy ``weights`` into the projections of ``mlp``, in its own layout, dtype and device."""
    w_up, b_up = weights.w_up_MD, weights.b_up_M
    if weights.w_gate_MD is not None and mlp.fused:
        w_up = torch.cat((weights.w_gate_MD, w_up))
        b_up = None if b_up is None or weights.b_gate_M is None else torch.cat((weights.b_gate_M, b_up))
    elif weights.w_gate_MD is not None and mlp.gate is not None:
        fill(mlp.gate, weights.w_gate_MD, weights.b_gate_M)
    fill(mlp.up, w_up, b_up)
    fill(mlp.down, weights.w_down_MD.T, weights.b_down_D)
