"""A cut model fitted to the one it came from, layer by layer on its own activations, by least squares alone.

Each layer's queries are fitted so that the heads look where they looked before, through the coordinates that are left;
then its output projection, so that the residual stream comes out as it was: what earlier layers have changed is made up
for as far as a linear map can. A fit to the layer's own former output, blind to that drift, gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.families.mlp import mlp_of
from headwise.families.shapes import shape_of
from headwise.families.sites import Site, sites_of
from headwise.families.weights import AttentionWeights, read_attention, write_attention
from headwise.files.progress import Progress, silent
from headwise.linalg.attention import Attention
from headwise.linalg.refit import OutputFit, attention_hessian_and_gradient, fit_queries, fit_temperature
from headwise.records.plan import Changes, Plan
from headwise.records.shape import LayerShape
from headwise.reduction.absorbed.change import Absorbed
from headwise.reduction.mlp.refit import behind_mlp, fit_down
from headwise.reduction.sharing.change import Sharing
from headwise.reduction.widths.apply import keep_heads, kept_heads
from headwise.reduction.widths.change import Widths
from headwise.runtime.cache import CacheSpec
from headwise.runtime.modeling_headwise import rotate
from headwise.tracing.probe import watching
from headwise.tracing.rounding import rounding
from headwise.tracing.stream import Stream

QUERIES = 1024  # rows of attention that queries are fitted to, spread over all batches
HESSIANS = 1 << 28  # numbers in the Hessians of all rows, at most: of wide heads there are fewer rows
BEGINNINGS = 256
QUERY_PENALTY = 0.1
Cut = Widths | Sharing | Absorbed
Piece = Literal["queries", "temperature", "outputs", "downs"]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One attention before and after its changes; ``cut`` is its only change, where that is a cut."""

    site: Site
    layer: LayerShape
    cut: Cut | None
    own: Site
    own_layer: LayerShape


def refit_model(
    model: PreTrainedModel,
    reduced: PreTrainedModel,
    plan: Plan,
    batches: Sequence[dict[str, Tensor]],
    pieces: Collection[Piece] = ("queries", "outputs"),
    progress: Progress = silent,
    held_out: Sequence[dict[str, Tensor]] = (),
    codes: CacheSpec | None = None,
) -> None:
    """Fit the attention of ``reduced``, cut from ``model`` by ``plan``, to what ``model`` does, in place.

    ``pieces``: "queries", or only a "temperature" for each head, and "outputs". Queries are fitted in layers that are
    narrower and not changed otherwise, unless norms stand behind them; outputs wherever attention is left, unless a
    norm stands between them and the residual stream; "downs", the last projections of MLPs, where channels went or
    blocks became one. Outputs and downs of a layer stay as they are where a fit does not help on batches that are
    ``held_out``. With ``codes`` the reduced model reads its cache as they give it back. An encoder is fitted before its
    decoder, self attention before cross attention.
    """
    sites, shape = sites_of(model), shape_of(model)
    new = zip(sites_of(reduced), shape_of(reduced).layers, strict=True)
    pairs: dict[str, _Pair] = {}
    joined: dict[str, list[_Pair]] = {}
    for run, (own, own_layer) in zip(plan.made_of(), new, strict=True):
        cuts = [_only_cut(plan.layers[number]) if len(run) == 1 else None for number in run]
        members = [_Pair(sites[n], shape.layers[n], cut, own, own_layer) for n, cut in zip(run, cuts, strict=True)]
        pairs |= {pair.site.path: pair for pair in members}
        if len(run) > 1:
            joined |= {pair.site.block_path: [] if place else members for place, pair in enumerate(members)}
    blocks = list(dict.fromkeys((site.stack.blocks, site.block_path) for site in sites))
    fitted = [*batches, *_beginnings(model, batches)]
    everything = [*fitted, *held_out]
    done = 0
    seen: dict[str, Attention] = {}
    with torch.no_grad(), watching(model, seen.__setitem__), rounding(reduced, codes):
        for stack in dict.fromkeys(stack for stack, _ in blocks):
            dense, own = Stream(model, everything, stack), Stream(reduced, everything, stack)
            seen.clear()
            fitter = _Fitter(dense, own, len(batches), len(fitted), pieces, seen)
            for path in (path for stacked, path in blocks if stacked == stack):
                progress(done, len(blocks), "refitting")
                if path not in joined:
                    own_pairs = [pairs.get(site.path) for site in sites if site.block_path == path]
                    fitter.fit_block([pair for pair in own_pairs if pair is not None])
                elif joined[path]:
                    fitter.fit_joined(joined[path])
                done += 1
    progress(done, len(blocks), "refitting")


def _only_cut(changes: Changes) -> Cut | None:
    own = [change for change in changes if change.acts_on == "attention"]
    change = own[0] if len(own) == 1 else None
    return change if isinstance(change, Cut) else None


def _keeps_keys(cut: Cut, layer: LayerShape) -> bool:
    """Whether queries meet the keys that they met before."""
    if isinstance(cut, Absorbed):
        return cut == Absorbed.whole(layer, cut.joined)
    return cut.qk_dim == layer.qk_dim * (cut.joined if isinstance(cut, Sharing) else 1)


class _Fitter:
    """Goes through the blocks of one stack, in the dense model and in the reduced one."""

    def __init__(
        self,
        dense: Stream,
        own: Stream,
        measured: int,
        fitted: int,
        pieces: Collection[Piece],
        seen: dict[str, Attention],
    ) -> None:
        self.dense, self.own, self.pieces, self.seen = dense, own, pieces, seen
        self.measured = measured  # batches that queries are fitted to: what is behind them are beginnings
        self.fitted = fitted  # behind these nothing is fitted to
        self.i = self.j = 0
        self.tokens = sum(len(x) * x.shape[1] for x in dense.hidden[:measured])

    def fit_block(self, kept: Sequence[_Pair]) -> None:
        """Fit all attentions of the next block, one after the other, and run on behind it; none: it was dropped."""
        numbers = range(len(self.dense.hidden))
        before, after = list(self.dense.hidden), []  # the stream in front of each attention of the dense model
        for place, pair in enumerate(kept):
            asks = self._queries(pair)
            given, after = [], []
            for n in numbers:
                out, attended = self.dense.run_watched(pair.site.out, self.i, n)
                after.append(out)
                given.append(attended)
                if asks and n < self.measured:
                    asks.add(self.seen[pair.site.path], *self.own.run_until(pair.own.module, self.j, n), n)
                self.seen.clear()
            if asks:
                asks.answer(only_temperature="queries" not in self.pieces)
            before = [stream + attended for stream, attended in zip(before, given, strict=True)]
            if not pair.own.removed and "outputs" in self.pieces and not pair.site.stack.norm_behind:
                earlier = [other.own.out for other in kept[:place] if not other.own.removed]
                _fit_outputs(self.own, pair.own, pair.own_layer, self.j, before, self.fitted, earlier)
        if "downs" in self.pieces:
            self._fit_down(kept, after)
        if kept:
            self.own.hidden = [self.own.run(self.j, n) for n in numbers]
            self.j += 1
        self.dense.hidden = after or [self.dense.run(self.i, n) for n in numbers]
        self.i += 1

    def fit_joined(self, pairs: Sequence[_Pair]) -> None:
        """Fit the one block made of the next blocks to what all their attentions add, and then to what comes out."""
        own, numbers = pairs[0], range(len(self.dense.hidden))
        wanted = list(self.dense.hidden)
        for pair in pairs:
            both = [self.dense.run_watched(pair.site.out, self.i, n) for n in numbers]
            self.dense.hidden = [out for out, _ in both]
            wanted = [stream + attended for stream, (_, attended) in zip(wanted, both, strict=True)]
            self.i += 1
        self.seen.clear()
        if not own.own.removed and "outputs" in self.pieces:
            _fit_outputs(self.own, own.own, own.own_layer, self.j, wanted, self.fitted, [])
        if "downs" in self.pieces and (mlp := mlp_of(own.own)) is not None:
            fit_down(self.own, mlp, self.j, self.dense.hidden, self.fitted)
        self.own.hidden = [self.own.run(self.j, n) for n in numbers]
        self.j += 1

    def _fit_down(self, kept: Sequence[_Pair], after: Sequence[Tensor]) -> None:
        for pair in kept:
            dense, own = mlp_of(pair.site), mlp_of(pair.own)
            if dense is None or own is None or own.channels == dense.channels or own.norm_behind:
                continue
            wanted = after
            if own.norm_after:
                wanted = [behind_mlp(self.dense, dense, self.i, n)[0] for n in range(len(after))]
            fit_down(self.own, own, self.j, wanted, self.fitted)

    def _queries(self, pair: _Pair) -> _Queries | None:
        cut = pair.cut
        if cut is None or _keeps_keys(cut, pair.layer):
            return None
        if pair.site.family.norms or not set(self.pieces) & {"queries", "temperature"}:
            return None
        return _Queries(pair.site, pair.layer, cut, pair.own, pair.own_layer, self.tokens)


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
        self, site: Site, layer: LayerShape, change: Cut, new: Site, new_layer: LayerShape, tokens: int
    ) -> None:
        self.site, self.new = site, new
        dense, self.heads = read_attention(site, layer.rotary), torch.arange(layer.heads)
        if isinstance(change, Widths):
            dense, self.heads = keep_heads(dense, change, layer), kept_heads(change, layer)
        self.w_q, self.b_q = dense.w_q_HKD, dense.b_q_HK
        self.weights = read_attention(new, new_layer.rotary)
        rows = min(QUERIES, max(1, HESSIANS // (new_layer.heads * new_layer.qk_dim**2)))
        self.stride = max(1, tokens // rows)
        self.hessians: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.features: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.turns: list[tuple[Tensor, Tensor]] = []

    def add(self, before: Attention, args: tuple, kwargs: dict[str, Any], number: int) -> None:
        """Add rows of one batch: what attention was, and what the cut layer is given now (``args``, ``kwargs``)."""
        x_BTD = args[0] if args else kwargs["hidden_states"]
        weights, T = self.weights, x_BTD.shape[1]
        rows = torch.arange(number % self.stride % T, T, self.stride, device=x_BTD.device)
        cos, sin = _angles(weights, kwargs.get("position_embeddings"), x_BTD)
        source = kwargs.get("key_value_states")  # of cross attention
        keys = _project(x_BTD if source is None else source, weights.w_k_GKD, weights.b_k_GK)
        keys = _turn(keys, cos, sin) * weights.scale
        logits = before.logits(slice(None), rows)[:, self.heads.to(x_BTD.device)]
        hessian, gradient = attention_hessian_and_gradient(logits, keys)
        per_group = logits.shape[1] // keys.shape[1]
        cos, sin = (t[:, :, rows].repeat_interleave(per_group, dim=1) for t in (cos, sin))
        now = _turn(_project(x_BTD[:, rows], weights.w_q_HKD, weights.b_q_HK), cos, sin)
        gradient -= (hessian @ now[..., None])[..., 0]
        for kept, tensor in (
            (self.hessians, hessian),
            (self.gradients, gradient),
            (self.features, _project(x_BTD[:, rows], self.w_q, self.b_q)),
            (self.queries, now),
        ):
            kept.append(tensor.transpose(0, 1).flatten(1, 2))
        self.turns.append((_rows(cos, len(x_BTD)), _rows(sin, len(x_BTD))))

    def answer(self, *, only_temperature: bool) -> None:
        """Write the fitted queries into the cut layer, or the old ones ``only`` made sharper or flatter."""
        if not self.hessians:
            return
        weights = self.weights
        if only_temperature:
            factor = 1 + fit_temperature(
                *(torch.cat(part, dim=1) for part in (self.hessians, self.gradients, self.queries))
            )
            bias = None if weights.b_q_HK is None else weights.b_q_HK * factor[:, None]
            write_attention(self.new, replace(weights, w_q_HKD=weights.w_q_HKD * factor[:, None, None], b_q_HK=bias))
            return
        cos, sin = (torch.cat(part, dim=1) for part in zip(*self.turns, strict=True))
        maps = fit_queries(
            torch.cat(self.hessians, dim=1),
            torch.cat(self.gradients, dim=1),
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
    stream: Stream,
    new: Site,
    layer: LayerShape,
    block: int,
    wanted: Sequence[Tensor],
    fitted: int,
    earlier: Sequence[nn.Module],
) -> None:
    """Fit the output projection so that stream + attention is what it was in the dense model, ``wanted``.

    It is fitted to the first ``fitted`` batches, and left as it is where that does not help on those behind.
    ``earlier`` are the output projections of attentions in front of it in the same block. Tokens count by the inverse
    of their energy: the norm ahead will divide by it, and a few huge ones (the first token of most models) would decide
    everything.
    """
    weights, fit = read_attention(new, layer.rotary), OutputFit()
    w_o = weights.w_o_HVD.flatten(0, 1)
    for n, before in enumerate(wanted):
        heads = stream.run_until(new.out, block, n)[0][0].flatten(0, 1)
        before_it = stream.hidden[n] + sum(stream.run_through(module, block, n) for module in earlier)
        missing = (before - before_it).flatten(0, 1) - heads @ w_o
        if weights.b_o_D is not None:
            missing = missing - weights.b_o_D
            heads = torch.cat((heads, heads.new_ones(len(heads), 1)), dim=1)
        energy = before.flatten(0, 1).square().mean(-1)
        weight = 1 / energy.clamp(min=torch.finfo(before.dtype).tiny)
        fit.add(heads, missing, weight, held_out=n >= fitted)
    correction = fit.solve().to(w_o.dtype)
    bias = None if weights.b_o_D is None else weights.b_o_D + correction[-1]
    w_o = (w_o + correction[: len(w_o)]).view_as(weights.w_o_HVD)
    write_attention(new, replace(weights, w_o_HVD=w_o, b_o_D=bias))
