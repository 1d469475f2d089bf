"""A cut model fitted to the one it came from, layer by layer on its own activations, by least squares alone.

Each layer's queries are fitted so that the heads look where they looked before, through the coordinates that are left;
then its output projection, so that the residual stream comes out as it was: what earlier layers have changed is made up
for as far as a linear map can. A fit to the layer's own former output, blind to that drift, gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.blocks import Stream
from headwise.families.cut import keep_heads, kept_heads
from headwise.families.modeling_headwise import rotate
from headwise.families.probe import watching
from headwise.families.shapes import shape_of
from headwise.families.sites import Site, sites_of
from headwise.families.weights import AttentionWeights, read_attention, write_attention
from headwise.linalg.attention import Attention
from headwise.linalg.refit import OutputFit, attention_pull, fit_queries, fit_temperature
from headwise.records.plan import LayerPlan, Plan
from headwise.records.shape import LayerShape

QUERIES = 1024  # rows of attention that queries are fitted to, spread over all batches
BEGINNINGS = 256
QUERY_PENALTY = 0.1
Progress = Callable[[int, int, str], None]
Piece = Literal["queries", "temperature", "outputs"]


def can_refit(model: PreTrainedModel) -> bool:
    """Whether layers follow one another in one stack; those of an encoder-decoder do not."""
    return len(sites_of(model)[0].family.stacks) == 1


def refit_student(
    model: PreTrainedModel,
    student: PreTrainedModel,
    plan: Plan,
    batches: Sequence[dict[str, Tensor]],
    pieces: Collection[Piece] = ("queries", "outputs"),
    progress: Progress = lambda done, total, what: None,
) -> None:
    """Fit the attention of ``student``, cut from ``model`` by ``plan``, to what ``model`` does, in place.

    ``pieces``: "queries", or only a "temperature" for each head, and "outputs". Queries are left alone where norms
    stand behind them or where nothing was cut, outputs where a norm stands between them and the residual stream.
    """
    everything = [*batches, *_beginnings(model, batches)]
    teacher, learner = Stream(model, everything), Stream(student, everything)
    tokens = sum(len(x) * x.shape[1] for x in teacher.hidden[: len(batches)])
    old = list(zip(sites_of(model), shape_of(model).layers, plan.layers, strict=True))
    new = iter(enumerate(zip(sites_of(student), shape_of(student).layers, strict=True)))
    seen: dict[str, Attention] = {}
    with torch.no_grad(), watching(model, seen.__setitem__):
        for i, (site, layer, change) in enumerate(old):
            progress(i, len(old), "refitting")
            if change.dropped:
                teacher.hidden = [teacher.run(i, n) for n in range(len(everything))]
                continue
            j, (own, own_layer) = next(new)
            asks = None
            if 0 < own_layer.qk_dim < layer.qk_dim and not site.family.norms and set(pieces) - {"outputs"}:
                asks = _Queries(site, layer, change, own, own_layer, tokens)
            after, given = [], []
            for n in range(len(everything)):
                out, attended = teacher.run_watched(site.out, i, n)
                after.append(out)
                given.append(attended)
                if asks and n < len(batches):
                    asks.add(seen[site.path], *learner.run_until(own.module, j, n), n)
                seen.clear()
            if asks:
                asks.answer(only_temperature="queries" not in pieces)
            if not own.removed and "outputs" in pieces and not site.stack.norm_behind:
                _fit_outputs(teacher, learner, own, own_layer, j, given)
            learner.hidden = [learner.run(j, n) for n in range(len(everything))]
            teacher.hidden = after
    progress(len(old), len(old), "refitting")


def _beginnings(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Tokens of the texts as if each began one, for decoders: what the first token does must stay.

    Heads that have nothing to look for look at it, and a few long texts show it too seldom: texts that begin otherwise
    would be lost.
    """
    if any(site.cache != "tokens" for site in sites_of(model)) or any(set(batch) != {"input_ids"} for batch in batches):
        return []
    tokens = torch.cat([batch["input_ids"].flatten() for batch in batches])
    chosen = torch.linspace(0, len(tokens) - 1, min(BEGINNINGS, len(tokens))).round().long()
    return [{"input_ids": tokens[chosen, None]}]


class _Queries:
    """The queries of one layer, on their way to being fitted."""

    def __init__(
        self, site: Site, layer: LayerShape, change: LayerPlan, new: Site, new_layer: LayerShape, tokens: int
    ) -> None:
        self.site, self.new = site, new
        whole = keep_heads(read_attention(site, layer.rotary), change, layer)
        self.w_q, self.b_q = whole.w_q_HKD, whole.b_q_HK
        self.weights = read_attention(new, new_layer.rotary)
        self.heads = kept_heads(change, layer)
        self.stride = max(1, tokens // QUERIES)
        self.curves: list[Tensor] = []
        self.pulls: list[Tensor] = []
        self.features: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.turns: list[tuple[Tensor, Tensor]] = []

    def add(self, before: Attention, args: tuple, kwargs: dict[str, Any], number: int) -> None:
        """Add rows of one batch: what attention was, and what the cut layer is given now (``args``, ``kwargs``)."""
        x_BTD = args[0] if args else kwargs["hidden_states"]
        weights, T = self.weights, x_BTD.shape[1]
        rows = torch.arange(number % self.stride % T, T, self.stride, device=x_BTD.device)
        cos, sin = _angles(weights, kwargs.get("position_embeddings"), x_BTD)
        keys = _turn(_project(x_BTD, weights.w_k_GKD, weights.b_k_GK), cos, sin) * weights.scale
        logits = before.logits(slice(None), rows)[:, self.heads.to(x_BTD.device)]
        curve, pull = attention_pull(logits, keys)
        per_group = logits.shape[1] // keys.shape[1]
        cos, sin = (t[:, :, rows].repeat_interleave(per_group, dim=1) for t in (cos, sin))
        now = _turn(_project(x_BTD[:, rows], weights.w_q_HKD, weights.b_q_HK), cos, sin)
        pull -= (curve @ now[..., None])[..., 0]
        for kept, tensor in (
            (self.curves, curve),
            (self.pulls, pull),
            (self.features, _project(x_BTD[:, rows], self.w_q, self.b_q)),
            (self.queries, now),
        ):
            kept.append(tensor.transpose(0, 1).flatten(1, 2))
        self.turns.append((_rows(cos, len(x_BTD)), _rows(sin, len(x_BTD))))

    def answer(self, *, only_temperature: bool) -> None:
        """Write the fitted queries into the cut layer, or the old ones ``only`` made sharper or flatter."""
        if not self.curves:
            return
        weights = self.weights
        if only_temperature:
            factor = 1 + fit_temperature(*(torch.cat(part, dim=1) for part in (self.curves, self.pulls, self.queries)))
            bias = None if weights.b_q_HK is None else weights.b_q_HK * factor[:, None]
            write_attention(self.new, replace(weights, w_q_HKD=weights.w_q_HKD * factor[:, None, None], b_q_HK=bias))
            return
        cos, sin = (torch.cat(part, dim=1) for part in zip(*self.turns, strict=True))
        maps = fit_queries(
            torch.cat(self.curves, dim=1),
            torch.cat(self.pulls, dim=1),
            torch.cat(self.features, dim=1),
            lambda x: _turn(x, cos, sin),
            lambda x: _turn(x, cos, -sin),
            QUERY_PENALTY,
        )
        bias = weights.b_q_HK
        if bias is not None and self.b_q is not None:
            bias = bias + (maps @ self.b_q[..., None])[..., 0]
        write_attention(self.new, replace(weights, w_q_HKD=weights.w_q_HKD + maps @ self.w_q, b_q_HK=bias))


def _project(x_BTD: Tensor, w_NKD: Tensor, b_NK: Tensor | None) -> Tensor:
    """(B, N, T, K)"""
    y = torch.einsum("btd,nkd->bntk", x_BTD, w_NKD)
    return y if b_NK is None else y + b_NK[:, None]


def _angles(weights: AttentionWeights, positions: tuple[Tensor, Tensor] | None, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the pairs each key/value head keeps, (B or 1, G, T, rotary); empty without RoPE."""
    G, P = weights.w_k_GKD.shape[0], weights.rotary // 2
    if positions is None or not P:
        empty = x_BTD.new_zeros(1, G, x_BTD.shape[1], 0)
        return empty, empty
    pairs = weights.rope_pairs_GP
    pairs = torch.arange(P, device=x_BTD.device).expand(G, -1) if pairs is None else pairs
    cos, sin = (t[..., pairs].transpose(1, 2) for t in positions)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, sin) if cos.shape[-1] else x


def _rows(angles_BHRP: Tensor, batch: int) -> Tensor:
    return angles_BHRP.expand(batch, -1, -1, -1).transpose(0, 1).flatten(1, 2)


def _fit_outputs(
    teacher: Stream, learner: Stream, new: Site, layer: LayerShape, block: int, given: list[Tensor]
) -> None:
    """Fit the output projection so that stream + attention is what it was in the whole model.

    Tokens count by the inverse of their energy: the norm ahead will divide by it, and a few huge ones (the first token
    of most models) would decide everything.
    """
    weights, fit = read_attention(new, layer.rotary), OutputFit()
    w_o = weights.w_o_HVD.flatten(0, 1)
    for n, attended in enumerate(given):
        heads = learner.run_until(new.out, block, n)[0][0].flatten(0, 1)
        before = (teacher.hidden[n] + attended).flatten(0, 1)
        missing = before - learner.hidden[n].flatten(0, 1) - heads @ w_o
        if weights.b_o_D is not None:
            missing = missing - weights.b_o_D
            heads = torch.cat((heads, heads.new_ones(len(heads), 1)), dim=1)
        fit.add(heads, missing, 1 / before.square().mean(-1).clamp(min=torch.finfo(before.dtype).tiny))
    correction = fit.solve().to(w_o.dtype)
    bias = None if weights.b_o_D is None else weights.b_o_D + correction[-1]
    w_o = (w_o + correction[: len(w_o)]).view_as(weights.w_o_HVD)
    write_attention(new, replace(weights, w_o_HVD=w_o, b_o_D=bias))
