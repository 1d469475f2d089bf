"""How good a model is on given inputs, and how near to another one: loss, KL divergence, agreement of embeddings."""

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
    """Nats per token of a decoder; nats per token from the first model; cosine to its embeddings, mean and low end.

    Of several kinds of text these are of the first; ``parts`` has each of them, and stretches of positions.
    """

    loss: float | None = None
    kl: float | None = None
    agreement: float | None = None
    agreement_p5: float | None = None
    parts: tuple[PartScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model makes of a batch: logits over its vocabulary (B T words) and one embedding of each input (B D).

    ``seen_BT`` marks the tokens that are not padding.
    """

    words_BTW: Tensor | None
    embedding_BD: Tensor | None
    seen_BT: Tensor


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
    nats, far = Parts(), Parts()
    cosines: list[Tensor] = []
    for number, batch in enumerate(calibration.batches):
        progress(number, len(calibration.batches))
        with torch.inference_mode():
            found = answer(model, source, batch.inputs)
            if predicts and found.words_BTW is not None:
                nats.add(batch.kind, *_nats(found.words_BTW, found.seen_BT, batch.inputs["input_ids"].to(model.device)))
            if first is None:
                continue
            wanted = answer(first, "The first model", batch.inputs)
            if words := _pair(wanted.words_BTW, found.words_BTW):
                apart_BT = divergences(*(word.flatten(0, 1) for word in words)).view(found.seen_BT.shape)
                far.add(batch.kind, apart_BT, found.seen_BT)
            if embeddings := _pair(wanted.embedding_BD, found.embedding_BD):
                cosines.append(cosine_similarity(*embeddings, dim=-1).cpu())
    angles, main = torch.cat(cosines) if cosines else None, calibration.batches[0].kind
    return Quality(
        loss=nats.mean(main),
        kl=far.mean(main),
        agreement=None if angles is None else angles.mean().item(),
        agreement_p5=None if angles is None else angles.quantile(LOW).item(),
        parts=_parts(nats, far),
    )


def text_losses(model: PreTrainedModel, source: str, batches: Sequence[Batch]) -> Parts:
    """Nats per token of a decoder on all batches."""
    nats = Parts()
    with torch.inference_mode():
        for batch in batches:
            words = answer(model, source, batch.inputs).words_BTW
            assert words is not None, "only decoders come here"
            ids = batch.inputs["input_ids"].to(model.device)
            nats.add(batch.kind, *_nats(words, torch.ones_like(ids), ids))
    return nats


def _parts(nats: Parts, far: Parts) -> tuple[PartScores, ...]:
    losses, apart = nats.table(), far.table()
    return tuple(
        PartScores(
            name,
            (losses.get(name) or apart[name])[1],
            losses[name][0] if name in losses else None,
            apart[name][0] if name in apart else None,
        )
        for name in losses or apart
    )


def answer(model: PreTrainedModel, source: str, inputs: dict[str, Tensor]) -> Answer:
    """What ``model`` makes of ``inputs``: classifiers embed in their logits, others in the mean of the last states."""
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
    seen_BT = inputs.get("attention_mask")
    if seen_BT is None or seen_BT.shape != last_BTD.shape[:2]:
        seen_BT = torch.ones(last_BTD.shape[:2], dtype=torch.long)
    seen_BT = seen_BT.to(last_BTD.device)
    if logits is not None and logits.ndim == 2:  # noqa: PLR2004 - one row of classes for each input
        return Answer(None, logits.float(), seen_BT)
    has_words = logits is not None and (predicts or logits.shape[-1] == getattr(model.config, "vocab_size", None))
    weight_BT1 = seen_BT[..., None].float()
    mean_BD = (last_BTD.float() * weight_BT1).sum(1) / weight_BT1.sum(1)
    return Answer(logits if has_words else None, None if predicts else mean_BD, seen_BT)


def _pair(wanted: Tensor | None, found: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Both, where they can be compared."""
    if wanted is None or found is None or wanted.shape != found.shape:
        return None
    return wanted, found


def _nats(words_BTW: Tensor, seen_BT: Tensor, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the token behind each one, (B, T), and where there is one."""
    counted_BT = torch.zeros_like(seen_BT)
    counted_BT[:, :-1] = seen_BT[:, :-1] * seen_BT[:, 1:]
    following = ids_BT.roll(-1, dims=1).flatten()
    rows = words_BTW.flatten(0, 1).split(ROWS_AT_ONCE)
    nats = [
        cross_entropy(some.float(), wanted, reduction="none")
        for some, wanted in zip(rows, following.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(nats).view(seen_BT.shape), counted_BT
