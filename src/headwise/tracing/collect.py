"""Statistics of every attention layer in two passes over the text: one watches, the other also differentiates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.calibration import Batch
from headwise.families.latent import caches_neighbours
from headwise.families.layout import layout_of
from headwise.families.sites import Site, has_one_stack, sites_of
from headwise.families.weights import read_attention
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.linalg.attention import Attention
from headwise.linalg.coordinates import Units, key_units
from headwise.linalg.maps import add_conditioning, add_maps, add_overlap, sample_rows
from headwise.linalg.masks import CAUSAL_BLOCK, add_fisher, key_gradients, value_gradients
from headwise.linalg.spectra import Basis, weighted_basis
from headwise.linalg.sums import Sums
from headwise.records.shape import LayerShape, ModelShape
from headwise.tracing.absorbed import add_first, watch_first
from headwise.tracing.channels import watching_channels
from headwise.tracing.coded import add_cached, coded_bases, gradient_sums, packable, watch_gradients
from headwise.tracing.fisher import backward_from_sampled_labels
from headwise.tracing.forward import forward
from headwise.tracing.gradient_checkpointing import block_inputs_require_grad, frozen, gradient_checkpointing
from headwise.tracing.latents import Latents, watching_latents
from headwise.tracing.positions import positions_lost
from headwise.tracing.probe import watching
from headwise.tracing.shared import Bases, add_between_heads, between_heads, measured_basis, watch_units
from headwise.tracing.substitution import substituted
from headwise.tracing.turns import turning

CUTS = (0.25, 0.5, 0.75)
CUT_ROWS = 64
MASKS = ("qk", "v", "head")
WIDTH_STEP = 4
ACTIVATIONS = 1 << 29  # numbers (2 GB) a backward pass may keep for speed; else every block runs twice


class Collector:
    """Statistics of every attention layer of a model, grown batch by batch; without ``maps`` what planning needs."""

    def __init__(
        self, model: PreTrainedModel, shape: ModelShape, *, maps: bool = True, positions: bool = False
    ) -> None:
        self.model = model
        self.maps = maps
        self.sites: list[Site] = sites_of(model)
        self.layers: tuple[LayerShape, ...] = shape.layers
        self.width = shape.width
        self.sums = [Sums() for _ in self.sites]
        self.index = {site.path: i for i, site in enumerate(self.sites)}
        self.units: dict[int, Units] = {}
        self.bases: dict[int, Basis] = {}
        self.grams: dict[int, Tensor] = {}
        self.packable = packable(model, shape)
        self.coded: dict[int, dict[str, Basis]] = {}
        alike = [getattr(site.module, "rope_pairs", None) is None for site in self.sites]
        self.mergeable = [same and bool(layer.joinable) for same, layer in zip(alike, self.layers, strict=True)]
        self.shared: dict[int, Bases] = {}
        self.substituted: list[dict[str, float]] = []
        # Layers that may cache latents, where that was asked for: keys are linear in the inputs, and turn as measured.
        self.absorbable = [
            positions and packs and same and layer.norm == "none" and not (layer.latent or layer.absorbed)
            for packs, same, layer in zip(self.packable, alike, self.layers, strict=True)
        ]
        self.positions: dict[int, dict[int, float]] = {}

    def state(self) -> dict[str, Tensor]:
        """All running sums by name, to be put away."""
        return {f"{i}.{name}": total for i, sums in enumerate(self.sums) for name, total in sums.totals.items()}

    def resume(self, state: dict[str, Tensor]) -> None:
        """Go on from sums that were put away."""
        for key, total in state.items():
            i, name = key.split(".", 1)
            self.sums[int(i)].totals[name] = total

    def watch(self, batch: Batch, *, spectra: bool) -> None:
        """First pass: moments of queries, keys and outputs; ranks, saturation, overlap and conditioning of maps."""

        def see(path: str, attention: Attention) -> None:
            i = self.index[path]
            sums = self.sums[i]
            if attention.overflows:
                raise InputError(f"The model gives NaN or infinity in {path}: its weights are damaged or overflow.")
            _add_moments(sums, attention)
            if self.packable[i] and not self.layers[i].latent:
                keys = turns.back(attention.k_BGSK.float(), self._pairs(path))
                add_cached(sums, self.layers[i], keys, attention.v_BGSV)
            if self.absorbable[i]:
                add_first(sums, self.layers[i], attention, turns, None)
            if self.mergeable[i]:
                add_between_heads(sums, self.layers[i], attention)
            if not self.maps:
                return
            add_overlap(sums, attention)
            lengths = batch.lengths or (attention.k_BGSK.shape[2],)
            part = attention.leading(lengths[-1]) if attention.causal else attention
            add_maps(sums, part, lengths, spectra=spectra)
            if spectra:
                add_conditioning(sums, part, lengths)

        def see_latents(path: str, latents: Latents) -> None:
            if self.packable[i := self.index[path]]:
                add_cached(self.sums[i], self.layers[i], latents.k_BGTK, latents.v_BGTV)

        with (
            torch.no_grad(),
            turning(self.model) as turns,
            watching(self.model, see),
            watching_latents(self.sites, see_latents),
        ):
            output = forward(self.model, batch.inputs, head=False)[0]
        if not output.isfinite().all():
            raise InputError("The model's output is NaN or infinite: its weights are damaged or overflow.")

    def prepare(self) -> None:
        """Between the passes: the units and bases in which each layer is best cut, from its moments."""
        for i, (site, layer, sums) in enumerate(zip(self.sites, self.layers, self.sums, strict=True)):
            if not layer.heads:
                continue
            G = layer.kv_heads
            self.units[i] = key_units(by_group(sums.mean("q_moment"), G), centred_keys(sums), layout_of(site, layer))
            self.grams[i] = _output_gram(site, layer)
            self.bases[i] = weighted_basis(by_group(self.grams[i], G), by_group(sums.mean("out_moment"), G))
            if self.mergeable[i]:
                moments, gram = between_heads(layer, sums), by_group(self.grams[i], G)
                self.shared[i] = {joined: measured_basis(moments, joined, gram) for joined in layer.joinable}

    def differentiate(self, batch: Batch, seed: int) -> None:
        """Second pass: gradients of the masks on every unit, and what cut heads would do to rows and outputs."""

        drawn: list[int] = []  # labels the loss adds up; known when gradients come

        def see(path: str, attention: Attention) -> None:
            if torch.is_grad_enabled():
                i = self.index[path]
                self._add_gradients(i, attention, drawn)
                if self.packable[i] and not self.layers[i].latent:
                    watch_gradients(self.sums[i], self.layers[i], attention, turns, self._pairs(path))
                if self.absorbable[i]:
                    watch_first(self.sums[i], self.layers[i], attention, turns, None)
                if self.mergeable[i]:
                    watch_units(self.sums[i], attention, self.shared[i], drawn)
                if self.maps:
                    with torch.no_grad():
                        self._add_cuts(i, attention)

        def see_latents(path: str, latents: Latents) -> None:
            if torch.is_grad_enabled() and self.packable[i := self.index[path]]:
                latents.watch_gradients(gradient_sums(self.sums[i], self.layers[i]))

        def see_channels(i: int, felt: dict[str, Tensor]) -> None:
            for name, total in felt.items():
                if not total.isfinite().all():
                    where = self.sites[i].block_path
                    raise InputError(f"The gradients in {where} are NaN or infinite; try it in float32.")
                self.sums[i].add(name, total, drawn[0])

        lean = self.maps or self._activations(batch) > ACTIVATIONS
        through = gradient_checkpointing if lean else block_inputs_require_grad
        with (
            frozen(self.model),
            turning(self.model) as turns,
            watching(self.model, see),
            watching_latents(self.sites, see_latents),
            watching_channels(self.sites, see_channels),
            through(self.model),
            torch.enable_grad(),
        ):
            outputs = forward(self.model, batch.inputs)
            drawn.append(outputs[0].shape[:-1].numel())
            backward_from_sampled_labels(outputs, seed)

    def finish(self, batches: Sequence[Batch], progress: Progress = silent) -> None:
        """After both passes: what is lost without parts of blocks, and the coordinates to round each cache in."""
        absorbable = [
            i for i, possible in enumerate(self.absorbable) if possible and self.sums[i].has("first_gradient")
        ]
        if absorbable:
            inputs = [batch.inputs for batch in batches]
            self.positions = positions_lost(self.model, inputs, absorbable, progress)
        if has_one_stack(self.model):
            self.substituted = substituted(self.model, [batch.inputs for batch in batches])
        neighbours = caches_neighbours(self.model.config)
        for i, (layer, sums) in enumerate(zip(self.layers, self.sums, strict=True)):
            if self.packable[i] and sums.has("cached_k_clipped"):
                weights = read_attention(self.sites[i], layer.rotary)
                self.coded[i] = coded_bases(layer, sums, weights, neighbours=neighbours)

    def _pairs(self, path: str) -> Tensor | None:
        """The RoPE pairs that the heads of a layer keep, where they are not all."""
        return getattr(self.sites[self.index[path]].module, "rope_pairs", None)

    def _activations(self, batch: Batch) -> float:
        """About how many numbers a backward pass without checkpoints would keep: widths of all matrix products."""
        width = self.width
        rest = sum(2 * layer.rest_matmul / width + 12 * width for layer in self.layers)
        return batch.tokens * rest

    def _add_gradients(self, i: int, attention: Attention, drawn: list[int]) -> None:
        # The hooks must not hold the tensors they hang on: that circle would keep the whole graph alive.
        k, out = attention.k_BGSK.detach(), attention.out_BTHV.detach()
        block = CAUSAL_BLOCK if attention.causal else max(out.shape[1], k.shape[2])
        samples: dict[str, Tensor] = {}

        def finish() -> None:
            if len(samples) < len(MASKS):
                return
            if not all(sample.isfinite().all() for sample in samples.values()):
                raise InputError(f"The gradients in {self.sites[i].path} are NaN or infinite; try it in float32.")
            add_fisher(self.sums[i], samples, len(k), drawn[0])

        def see_out(gradient: Tensor) -> None:
            samples["v"], samples["head"] = value_gradients(out, gradient, self.bases[i], block)
            finish()

        def see_keys(gradient: Tensor) -> None:
            samples["qk"] = key_gradients(k, gradient, self.sums[i].mean("k_mean"), self.units[i], block)
            finish()

        attention.out_BTHV.register_hook(see_out)
        attention.k_BGSK.register_hook(see_keys)

    def _add_cuts(self, i: int, attention: Attention) -> None:
        sums, layer, units = self.sums[i], self.layers[i], self.units[i]
        rows = sample_rows(attention, CUT_ROWS)
        everyone = slice(None)
        a_BHTS = attention.logits(everyone, rows).softmax(-1)
        v_BHSV = attention.v_BGSV.repeat_interleave(layer.heads // layer.kv_heads, dim=1).float()
        out_BHTV = a_BHTS @ v_BHSV
        gram_HVV = self.grams[i].to(out_BHTV)
        energy_H = _energy(out_BHTV, gram_HVV)
        mean = sums.mean("k_mean")[:, None].to(out_BHTV)
        centred = attention.k_BGSK.float() - mean
        for width in cut_widths(layer.qk_dim):
            projector = units.projector(units.strongest(width)).to(out_BHTV)
            cut_BHTS = attention.logits(everyone, rows, mean + centred @ projector.mT).softmax(-1)
            moved = (cut_BHTS - a_BHTS).abs().sum(-1).mul(0.5).mean(-1)
            sums.add(f"cut_rows@{width}", moved.sum(0), len(moved))
            sums.add(f"cut_output@{width}", _energy(cut_BHTS @ v_BHSV - out_BHTV, gram_HVV), 1)
        sums.add("cut_energy", energy_H, 1)


def by_group(x_HRR: Tensor, groups: int) -> Tensor:
    """Second moments of all query heads of a group added up: the group is solved as one."""
    return x_HRR.unflatten(0, (groups, -1)).sum(1)


def centred_keys(sums: Sums) -> Tensor:
    """Second moment of the keys about their mean, (G, K, K)."""
    mean = sums.mean("k_mean")
    return sums.mean("k_moment") - mean[:, :, None] * mean[:, None, :]


def _output_gram(site: Site, layer: LayerShape) -> Tensor:
    """``W_o W_o^T`` of each head, (H, V, V): how much each value direction weighs in the residual stream."""
    w_o_HVD = read_attention(site, layer.rotary).w_o_HVD.detach().double()
    return (w_o_HVD @ w_o_HVD.mT).cpu()


def cut_widths(full: int) -> tuple[int, ...]:
    """Widths at which cut heads are tried: about a quarter, a half, three quarters."""
    widths = {max(2, round(share * full / WIDTH_STEP) * WIDTH_STEP) for share in CUTS}
    return tuple(sorted(width for width in widths if width < full))


def _energy(x_BHTV: Tensor, gram_HVV: Tensor) -> Tensor:
    """Squared norm of head outputs after the output projection, summed over batch and rows."""
    return ((x_BHTV @ gram_HVV) * x_BHTV).sum((0, 2, 3))


def _add_moments(sums: Sums, attention: Attention) -> None:
    q, k = attention.q_BHTK.double(), attention.k_BGSK.double()
    out = attention.out_BTHV.double().transpose(1, 2)
    B, _, T, _ = q.shape
    S = k.shape[2]
    sums.add("q_moment", (q.mT @ q).sum(0), B * T)
    sums.add("k_moment", (k.mT @ k).sum(0), B * S)
    sums.add("k_mean", k.sum((0, 2)), B * S)
    v = attention.v_BGSV.double()
    sums.add("v_moment", (v.mT @ v).sum(0), B * S)
    sums.add("out_moment", (out.mT @ out).sum(0), B * T)
    sums.add("scale", torch.tensor(attention.scale), 1)  # some models scale their queries instead
    sums.add("causal", torch.tensor(float(attention.causal)), 1)
