"""Loss of a model, and its KL divergence and cosine of embeddings from the first model (the baseline)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from headwise.data.calibration import Batch, Calibration
from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.linalg.divergence import divergences
from headwise.records.scores import PartScores
from headwise.tracing.forward import forward
from headwise.tracing.parts import Axis, Mean, Parts, last_of

ROWS_AT_ONCE = 128  # of logits that are taken to float32 probabilities: a vocabulary is wide
LOW, HIGH = 0.05, 0.99


@dataclass(frozen=True, slots=True)
class Quality:
    """Loss of a decoder; KL from the first model, nats per token; cosine to its embeddings, mean and 5th percentile.

    ``same_top``: share of tokens after which both models find the same one most likely. Of several kinds of text these
    are of the first; ``parts`` has each of them, and stretches of positions. Errors are over windows.
    """

    loss: float | None = None
    loss_error: float | None = None
    loss_increase: float | None = None
    loss_increase_error: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    kl_p99: float | None = None
    same_top: float | None = None
    agreement: float | None = None
    agreement_p5: float | None = None
    parts: tuple[PartScores, ...] = ()


class Compared:
    """Sums over batches: loss, its increase and KL by part; KL of every token and agreement of the main kind."""

    def __init__(self, main: str) -> None:
        self.main = main
        self.nats, self.increase, self.kl = Parts(), Parts(), Parts()
        self._kl_of_tokens: list[Tensor] = []
        self._same, self._tokens = 0, 0

    def add(self, kind: str, kl_BT: Tensor, same_BT: Tensor, mask_BT: Tensor) -> None:
        """Add how the predictions of one batch compare with the first model's."""
        self.kl.add(kind, kl_BT, mask_BT)
        if kind == self.main:
            counted = mask_BT.bool()
            self._kl_of_tokens.append(kl_BT[counted].cpu())
            self._same += int(same_BT[counted].sum())
            self._tokens += int(counted.sum())

    def quality(self) -> Quality:
        """What came of all batches."""
        loss, increase, kl = (parts.of(self.main) for parts in (self.nats, self.increase, self.kl))
        nats = torch.cat(self._kl_of_tokens).float().sort().values if self._kl_of_tokens else None
        return Quality(
            **_named("loss", loss),
            **_named("loss_increase", increase),
            **_named("kl", kl),
            kl_p99=None if nats is None else nats[math.ceil(HIGH * len(nats)) - 1].item(),
            same_top=self._same / self._tokens if self._tokens else None,
            parts=(*self._by("kind"), *self._by("position")),
        )

    def _by(self, axis: Axis) -> list[PartScores]:
        loss, increase, kl = (parts.by(axis) for parts in (self.nats, self.increase, self.kl))
        return [
            PartScores(
                name,
                (loss.get(name) or kl[name]).tokens,
                **_named("loss", loss.get(name)),
                **_named("loss_increase", increase.get(name)),
                **_named("kl", kl.get(name)),
                last=last_of(name) if axis == "position" else None,
            )
            for name in loss or kl
        ]


def _named(name: str, mean: Mean | None) -> dict[str, float | None]:
    return {} if mean is None else {name: mean.value, f"{name}_error": mean.error}


@dataclass(frozen=True, slots=True)
class Outputs:
    """A model's outputs for a batch: logits over its vocabulary (W words) and one embedding of each input.

    ``mask_BT`` marks the tokens that are not padding.
    """

    logits_BTW: Tensor | None
    embedding_BD: Tensor | None
    mask_BT: Tensor


def predicts_next(model: PreTrainedModel) -> bool:
    """Whether ``model`` is a decoder with a head: it has a perplexity, and it can generate."""
    return model.can_generate() and all(site.cache == "tokens" for site in sites_of(model))


def quality(
    model: PreTrainedModel,
    source: str,
    calibration: Calibration,
    first: PreTrainedModel | None,
    progress: Callable[[int, int], None],
) -> Quality:
    """The quality of ``model`` on all batches, compared with ``first`` batch by batch, so that no outputs are kept."""
    predicts = predicts_next(model)
    compared = Compared(calibration.batches[0].kind)
    cosines: list[Tensor] = []
    for number, batch in enumerate(calibration.batches):
        progress(number, len(calibration.batches))
        with torch.inference_mode():
            outputs = outputs_of(model, source, batch.inputs)
            nats = _nats_of(outputs, batch, model) if predicts else None
            if nats is not None:
                compared.nats.add(batch.kind, *nats)
            if first is None:
                continue
            baseline = outputs_of(first, "The first model", batch.inputs)
            if pair := _comparable(baseline.logits_BTW, outputs.logits_BTW):
                kl_BT = divergences(*(logits.flatten(0, 1) for logits in pair)).view(outputs.mask_BT.shape)
                same_BT = torch.eq(*(logits.argmax(-1) for logits in pair))
                compared.add(batch.kind, kl_BT, same_BT, outputs.mask_BT)
            if nats is not None and (before := _nats_of(baseline, batch, first)):
                compared.increase.add(batch.kind, nats[0] - before[0], nats[1])
            if embeddings := _comparable(baseline.embedding_BD, outputs.embedding_BD):
                cosines.append(cosine_similarity(*embeddings, dim=-1).cpu())
    if not cosines:
        return compared.quality()
    angles = torch.cat(cosines)
    return replace(compared.quality(), agreement=angles.mean().item(), agreement_p5=angles.quantile(LOW).item())


def text_losses(model: PreTrainedModel, source: str, batches: Sequence[Batch]) -> Parts:
    """Loss of a decoder on all batches, in nats per token."""
    nats = Parts()
    with torch.inference_mode():
        for batch in batches:
            logits = outputs_of(model, source, batch.inputs).logits_BTW
            assert logits is not None, "only decoders come here"
            ids = batch.inputs["input_ids"].to(model.device)
            nats.add(batch.kind, *_nats(logits, torch.ones_like(ids), ids))
    return nats


def outputs_of(model: PreTrainedModel, source: str, inputs: dict[str, Tensor]) -> Outputs:
    """The outputs of ``model``: classifiers embed in their logits, others in the mean of the last hidden states."""
    states: list[Tensor] = []
    handle = model.base_model.register_forward_hook(lambda module, args, output: states.append(output[0]))
    predicts = predicts_next(model)
    try:
        output = forward(model, inputs)
    finally:
        handle.remove()
    logits = output.get("logits")
    last_BTD = states[-1]
    if not (last_BTD if logits is None else logits).isfinite().all():
        raise InputError(f"{source} gives outputs that are not finite numbers.")
    mask_BT = inputs.get("attention_mask")
    if mask_BT is None or mask_BT.shape != last_BTD.shape[:2]:
        mask_BT = torch.ones(last_BTD.shape[:2], dtype=torch.long)
    mask_BT = mask_BT.to(last_BTD.device)
    if logits is not None and logits.ndim == 2:  # noqa: PLR2004 - one row of classes for each input
        return Outputs(None, logits.float(), mask_BT)
    has_words = logits is not None and (predicts or logits.shape[-1] == getattr(model.config, "vocab_size", None))
    weight_BT1 = mask_BT[..., None].float()
    mean_BD = (last_BTD.float() * weight_BT1).sum(1) / weight_BT1.sum(1)
    return Outputs(logits if has_words else None, None if predicts else mean_BD, mask_BT)


def _comparable(baseline: Tensor | None, output: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Both, where they can be compared."""
    if baseline is None or output is None or baseline.shape != output.shape:
        return None
    return baseline, output


def _nats_of(outputs: Outputs, batch: Batch, model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    if outputs.logits_BTW is None:
        return None
    return _nats(outputs.logits_BTW, outputs.mask_BT, batch.inputs["input_ids"].to(model.device))


def _nats(logits_BTW: Tensor, mask_BT: Tensor, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the token that follows each one, (B, T), and where there is one."""
    counted_BT = torch.zeros_like(mask_BT)
    counted_BT[:, :-1] = mask_BT[:, :-1] * mask_BT[:, 1:]
    following = ids_BT.roll(-1, dims=1).flatten()
    rows = logits_BTW.flatten(0, 1).split(ROWS_AT_ONCE)
    nats = [
        cross_entropy(logits.float(), labels, reduction="none")
        for logits, labels in zip(rows, following.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(nats).view(mask_BT.shape), counted_BT
