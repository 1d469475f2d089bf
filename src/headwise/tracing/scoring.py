"""Loss of a model, and its KL divergence and cosine of embeddings from the first model (the baseline)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from headwise.tracing.parts import Parts

ROWS_AT_ONCE = 128  # of logits that are taken to float32 probabilities: a vocabulary is wide
LOW = 0.05


@dataclass(frozen=True, slots=True)
class Quality:
    """Loss of a decoder and KL from the first model, nats per token; cosine to its embeddings, mean and 5th percentile.

    Of several kinds of text these are of the first; ``parts`` has each of them, and stretches of positions.
    """

    loss: float | None = None
    kl: float | None = None
    agreement: float | None = None
    agreement_p5: float | None = None
    parts: tuple[PartScores, ...] = ()


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
    nats, kl = Parts(), Parts()
    cosines: list[Tensor] = []
    for number, batch in enumerate(calibration.batches):
        progress(number, len(calibration.batches))
        with torch.inference_mode():
            outputs = outputs_of(model, source, batch.inputs)
            if predicts and outputs.logits_BTW is not None:
                ids = batch.inputs["input_ids"].to(model.device)
                nats.add(batch.kind, *_nats(outputs.logits_BTW, outputs.mask_BT, ids))
            if first is None:
                continue
            baseline = outputs_of(first, "The first model", batch.inputs)
            if pair := _comparable(baseline.logits_BTW, outputs.logits_BTW):
                kl_BT = divergences(*(logits.flatten(0, 1) for logits in pair)).view(outputs.mask_BT.shape)
                kl.add(batch.kind, kl_BT, outputs.mask_BT)
            if embeddings := _comparable(baseline.embedding_BD, outputs.embedding_BD):
                cosines.append(cosine_similarity(*embeddings, dim=-1).cpu())
    angles, main = torch.cat(cosines) if cosines else None, calibration.batches[0].kind
    return Quality(
        loss=nats.mean(main),
        kl=kl.mean(main),
        agreement=None if angles is None else angles.mean().item(),
        agreement_p5=None if angles is None else angles.quantile(LOW).item(),
        parts=_parts(nats, kl),
    )


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


def _parts(nats: Parts, kl: Parts) -> tuple[PartScores, ...]:
    losses, divergence = nats.table(), kl.table()
    return tuple(
        PartScores(
            name,
            (losses.get(name) or divergence[name])[1],
            losses[name][0] if name in losses else None,
            divergence[name][0] if name in divergence else None,
        )
        for name in losses or divergence
    )


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
