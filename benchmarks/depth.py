"""One trained model at 90, 80 and 70 % of its non-embedding parameters, reduced in several ways, on the same text.

    python benchmarks/depth.py MODEL --text FILE --calibration FILE [--context 512] [--tokens 20480]
                               [--shares 0.9,0.8,0.7] [--methods headwise,...] [--healing FILE --healing-tokens 200k]
                               [--interactions 20] [-o results/depth_MODEL.json]

MODEL is a folder, or "smollm2" for the one of the demo. Every method gets the same calibration text, 8,192 tokens in
windows of the context, and every reduced model is measured on the same windows of the text, its first tokens. What is
counted is all parameters but embeddings, last norm and head; a method that cannot meet the share exactly keeps less
("kept"). Methods:

- "headwise": `headwise plan --keep-params`, `headwise compress`: attention, MLP channels and blocks in one plan, refit;
- "uniform MLP": one MLP width for all layers, channels of the largest mean absolute activation stay, refit of the last
  projections as in `headwise compress` (Minitron's importance; a stand-in, with our refit);
- "ShortGPT": blocks whose output is most like their input (1 - mean cosine over tokens) are dropped;
- "blocks by loss": blocks are dropped one after the other, each time the one without which the model that is left
  changes least (KL on 256 tokens);
- "Taylor groups": a stand-in for LLM-Pruner: in every layer the MLP channels, and the key/value heads with their query
  heads, of least |sum of weight x gradient| of the loss on the text go, one share for all layers; what is left of the
  budget is met by MLP channels alone, because heads are few. No refit.

Excess: nats per token over the dense model, its standard error that of the paired difference over windows; kl: from
the dense model, nats per token; prefill and decode: median time against the dense model's, in turns in one run, of a
prompt of one window and of the 8 tokens behind it, on one thread; opens_as: stock class of transformers or not.
Everything in float32. Rows are written as they come, and those that are there are kept, so that a killed run goes on.

With ``--healing-tokens`` each reduced model is healed on the text of ``--healing`` (`headwise heal`, defaults) and
measured again, in rows of their own. With ``--interactions N`` no methods are compared: N plans at random (budget of
0.6 to 0.98, and which of attention, MLPs and blocks may change, at random) are carried out without refit, predicted
loss is held against measured loss, and their rank correlation is the last row.

A method is one more entry of METHODS, a measure one more entry of the dict that `Text.measured` returns.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bits import Table, commit
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from headwise.checkpoints.load import open_model
from headwise.checkpoints.origin import Origin, remember
from headwise.checkpoints.profile_tensors import profiled_batches
from headwise.checkpoints.profiled import Profile
from headwise.data.processors import open_tokenizer
from headwise.families.mlp import mlp_of
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.files.numbers import read_count
from headwise.linalg.divergence import divergences
from headwise.pipelines.profile import inspect_folder
from headwise.planning.menus import MenuRequest, build_menus
from headwise.planning.planner import allocate
from headwise.records import Plan
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from headwise.records.plan import Changes
from headwise.records.settings import InspectConfig
from headwise.records.shape import ModelShape
from headwise.reduction.build import build_reduced
from headwise.reduction.kinds import kinds
from headwise.reduction.mlp.change import Channels
from headwise.reduction.plans import plan_for, predicted_losses
from headwise.reduction.reduce import Piece, reduce_model
from headwise.reduction.removal.change import Removal
from headwise.reduction.widths.change import Widths
from headwise.steps.demo import demo_model
from headwise.steps.heal import heal_model
from headwise.tracing.forward import forward
from headwise.tracing.speed import decoder_speed
from headwise.tracing.stream import Stream
from headwise.tracing.substitution import substituted

SEED = 0
CALIBRATION_TOKENS = 8192
TOKENS_AT_ONCE = 1024
SHARES = "0.9,0.8,0.7"
KINDS_TOGETHER = (("widths", "removal", "mlp"), ("mlp",), ("widths",), ("removal", "mlp"), ("widths", "mlp"))
LEAST, MOST = 0.6, 0.98  # budgets of random plans
THINNED = 0.3  # of their options, at random, are offered
DROPPED = Removal("block")


@dataclass(frozen=True)
class Measured:
    """A dense model, and what its methods may look at: a profile, and the batches it was measured on."""

    model: PreTrainedModel
    profile: Profile
    batches: Sequence[dict[str, Tensor]]

    @property
    def shape(self) -> ModelShape:
        return self.profile.shape

    def reduce(self, layers: Sequence[Changes], orders: dict[str, Tensor], refit: Sequence[Piece]) -> PreTrainedModel:
        """The model after these changes; ``orders`` stand in place of the profile's orders of MLP channels."""
        plan = Plan.make(self.shape, layers)
        reduced = reduce_model(self.model, plan, {**self.profile.tensors, **orders}, refit=refit)
        return remember(reduced.model, Origin(reduced.plan))


def headwise(measured: Measured, share: float) -> PreTrainedModel:
    """Attention, MLP channels and blocks in one plan, refitted."""
    plan = plan_for(measured.profile, Budget("keep_params", share))
    reduced = reduce_model(measured.model, plan, measured.profile.tensors)
    return remember(reduced.model, Origin(reduced.plan))


def uniform_mlp(measured: Measured, share: float) -> PreTrainedModel:
    """One MLP width, by mean absolute activation, last projections refitted."""
    layers = [(Channels(count),) for count in _channels(measured.shape, share, [()] * len(measured.shape.layers))]
    return measured.reduce(layers, _orders(activations(measured)), ("downs",))


def shortgpt(measured: Measured, share: float) -> PreTrainedModel:
    """Blocks dropped whose output is most like their input."""
    scores = influence(measured)
    dropped: list[int] = []
    for block in sorted(range(len(scores)), key=scores.__getitem__):
        if _kept(measured.shape, _without(measured.shape, dropped)) <= share:
            break
        dropped.append(block)
    return measured.reduce(_without(measured.shape, dropped), {}, ())


def blocks_by_loss(measured: Measured, share: float) -> PreTrainedModel:
    """Blocks dropped one after the other, each time the one whose loss is measured to be least."""
    staying, model = list(range(len(measured.shape.layers))), measured.model
    while True:
        dropped = [number for number in range(len(measured.shape.layers)) if number not in staying]
        layers = _without(measured.shape, dropped)
        if _kept(measured.shape, layers) <= share:
            return measured.reduce(layers, {}, ())
        if dropped:
            model = build_reduced(measured.model, Plan.make(measured.shape, layers), share=True).eval()
        losses = [each["block"] for each in substituted(model, measured.batches)]
        del staying[losses.index(min(losses))]


def taylor_groups(measured: Measured, share: float) -> PreTrainedModel:
    """MLP channels and key/value heads of least |weight x gradient|, one share for all layers."""
    heads, channels = taylor(measured)
    attention: list[Changes] = []
    for layer, scores in zip(measured.shape.layers, heads, strict=True):
        count = round(share * layer.kv_heads)
        each = layer.heads // layer.kv_heads
        groups = sorted(scores.topk(count).indices.tolist())
        kept = tuple(each * group + head for group in groups for head in range(each))
        whole = count == layer.kv_heads
        cut = Widths(each * count, count, layer.qk_dim, layer.v_dim, kept_heads=kept)
        attention.append(() if whole else (cut,))
    counts = _channels(measured.shape, share, attention)
    layers = [(*own, Channels(count)) for own, count in zip(attention, counts, strict=True)]
    return measured.reduce(layers, _orders(channels), ())


# A method is one more entry: from a measured model and the share of parameters to keep to the reduced model.
METHODS: dict[str, Callable[[Measured, float], PreTrainedModel]] = {
    "headwise": headwise,
    "uniform MLP": uniform_mlp,
    "ShortGPT": shortgpt,
    "blocks by loss": blocks_by_loss,
    "Taylor groups": taylor_groups,
}


def _kept(shape: ModelShape, layers: Sequence[Changes]) -> float:
    return shape.planned(Plan.make(shape, layers)).block_parameters() / shape.block_parameters()


def _without(shape: ModelShape, dropped: Sequence[int]) -> list[Changes]:
    return [(DROPPED,) if number in dropped else () for number in range(len(shape.layers))]


def _channels(shape: ModelShape, share: float, attention: Sequence[Changes]) -> list[int]:
    """The most channels of one number for all MLPs that keep to the share, beside such changes of the attention."""
    full = [layer.mlp.channels for layer in shape.layers if layer.mlp is not None]
    low, high = 0, max(full)
    while low < high:
        middle = (low + high + 1) // 2
        layers = [(*own, Channels(min(middle, count))) for own, count in zip(attention, full, strict=True)]
        low, high = (middle, high) if _kept(shape, layers) <= share else (low, middle - 1)
    return [min(low, count) for count in full]


def _orders(scores: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors of a profile that put the MLP channels of the highest scores first."""
    return {
        f"{number}.mlp_order": each.argsort(descending=True, stable=True).to(torch.int32)
        for number, each in enumerate(scores)
    }


@torch.inference_mode()
def activations(measured: Measured) -> list[Tensor]:
    """For each layer the mean absolute activation of its MLP's channels."""
    sums: dict[int, Tensor] = {}

    def see(number: int) -> Callable[..., None]:
        def add(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            sums[number] = sums.get(number, 0) + args[0].flatten(0, -2).abs().sum(0)

        return add

    mlps = [mlp_of(site) for site in sites_of(measured.model)]
    handles = [mlp.down.register_forward_pre_hook(see(number)) for number, mlp in enumerate(mlps) if mlp is not None]
    for batch in measured.batches:
        forward(measured.model, batch, head=False)
    for handle in handles:
        handle.remove()
    return [sums[number] for number in range(len(mlps))]


@torch.inference_mode()
def influence(measured: Measured) -> list[float]:
    """For each block 1 - the mean cosine of what enters and leaves it."""
    stream, scores = Stream(measured.model, measured.batches), []
    for block in range(len(stream.blocks)):
        after = [stream.run(block, number) for number in range(len(stream.hidden))]
        alike = [cosine_similarity(*pair, dim=-1).flatten() for pair in zip(stream.hidden, after, strict=True)]
        scores.append(1 - torch.cat(alike).mean().item())
        stream.hidden = after
    return scores


def taylor(measured: Measured) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer |sum of weight x gradient| of the loss, of its key/value heads and of its MLP's channels."""
    model = measured.model
    model.requires_grad_(True)
    for batch in measured.batches:
        logits, ids = model(**batch, use_cache=False).logits[:, :-1], batch["input_ids"][:, 1:]
        cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").backward()
    heads, channels = [], []
    with torch.no_grad():
        products = {id(p): p * p.grad for p in model.parameters() if p.grad is not None}
        for site, layer in zip(sites_of(model), measured.shape.layers, strict=True):
            q, k, v, out = (products[id(m.weight)] for m in (*_projections(site), site.out))
            rows = [x.unflatten(0, (layer.kv_heads, -1)).sum((1, 2)) for x in (q, k, v)]
            heads.append((sum(rows) + out.unflatten(1, (layer.kv_heads, -1)).sum((0, 2))).abs())
            mlp = mlp_of(site)
            assert mlp is not None
            inward = [products[id(m.weight)].sum(1) for m in mlp.projections[:-1]]
            channels.append((sum(inward) + products[id(mlp.down.weight)].sum(0)).abs())
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return heads, channels


def _projections(site: Any) -> list[torch.nn.Module]:
    family = site.family
    return [getattr(site.module, name) for name in (family.q, family.k, family.v)]


class Text:
    """Windows that are measured on, with what the dense model gives its head for each, and its losses."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, windows_WT: Tensor) -> None:
        self.model, self.windows_WT = model, windows_WT
        self.hidden = list(self._hidden(model))
        self.losses_W, _ = self._compare(model, self.hidden)

    @torch.inference_mode()
    def scores(self, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """Mean loss of each window, and its mean KL from the dense model."""
        return self._compare(model, self._hidden(model))

    def _hidden(self, model: PreTrainedModel) -> Iterable[Tensor]:
        for some_WT in self.windows_WT.split(max(1, TOKENS_AT_ONCE // self.windows_WT.shape[1])):
            yield from model.base_model(some_WT, use_cache=False).last_hidden_state[:, :-1]

    def _compare(self, model: PreTrainedModel, hidden: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        head, dense_head = (each.get_output_embeddings() for each in (model, self.model))
        rows = []
        for own, dense, labels in zip(hidden, self.hidden, self.windows_WT[:, 1:], strict=True):
            logits = head(own)
            nats = divergences(dense_head(dense), logits)
            rows.append(torch.stack((cross_entropy(logits, labels).double(), nats.double().mean())))
        losses_W, divergence_W = torch.stack(rows).unbind(1)
        return losses_W, divergence_W

    def measured(self, model: PreTrainedModel, dense_shape: ModelShape) -> dict[str, Any]:
        """What a row says of a reduced model."""
        losses_W, divergence_W = self.scores(model)
        excess_W = losses_W - self.losses_W
        error = excess_W.std().item() / len(excess_W) ** 0.5 if len(excess_W) > 1 else None
        shape = shape_of(model)
        speed = decoder_speed([self.model, model], self.windows_WT.shape[1], lambda number: None)[1]
        return {
            "excess": round(excess_W.mean().item(), 5),
            "standard_error": None if error is None else round(error, 5),
            "kl": round(divergence_W.mean().item(), 5),
            "kept": round(shape.block_parameters() / dense_shape.block_parameters(), 5),
            "parameters": shape.total_parameters(),
            "layers": len(shape.layers),
            "prefill": round(1 / speed.prefill.ratio, 4),
            "decode": None if speed.decode is None else round(1 / speed.decode.ratio, 4),
            "opens_as": "per-layer" if getattr(model.config, "headwise", None) else type(model).__name__,
        }


def random_plan(profile: Profile, chance: random.Random) -> Plan:
    """A plan for a budget at random, with changes of a few kinds at random."""
    shape, share, names = profile.shape, chance.uniform(LEAST, MOST), chance.choice(KINDS_TOGETHER)
    while True:
        budget = Budget("keep_params", round(share, 4))
        request = MenuRequest(profile, [partial(budget.cost, shape=shape)])
        menus = build_menus(request, [kind.options for kind in kinds() if kind.change.kind in names])
        thinned = {
            part: [menu[0], *(option for option in menu[1:] if chance.random() < THINNED)]
            for part, menu in menus.items()
        }
        try:
            return Plan.make(shape, allocate(profile, budget, thinned, "these options"))
        except InputError:
            share = (1 + share) / 2  # these parts have not as much to give


def interactions(measured: Measured, text: Text, count: int, table: Table, run: dict[str, Any]) -> None:
    """Rows of random plans with predicted and measured loss, and their rank correlation."""
    chance, pairs = random.Random(SEED), []
    for number in range(count):
        plan = random_plan(measured.profile, chance)
        identity = {**run, "method": "random plan", "number": number}
        row = table.row(**identity)
        if row is None:
            reduced = reduce_model(measured.model, plan, measured.profile.tensors, refit=()).model
            excess, kl = (each.mean().item() for each in text.scores(reduced))
            row = {
                **identity,
                "kept": round(_kept(measured.shape, plan.layers), 4),
                "changes": sorted({change.kind for changes in plan.layers for change in changes}),
                "predicted": round(sum(predicted_losses(measured.profile, plan.layers)), 5),
                "excess": round(excess - text.losses_W.mean().item(), 5),
                "kl": round(kl, 5),
            }
            table.add({**row, "commit": commit()})
        pairs.append((row["predicted"], row["excess"]))
    identity = {**run, "method": "rank correlation", "plans": count}
    if not table.has(**identity):
        table.add({**identity, "spearman": round(spearman(pairs), 4), "commit": commit()})


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of the two columns."""
    ranks = torch.tensor(pairs, dtype=torch.float64).argsort(0).argsort(0).double()
    return torch.corrcoef(ranks.T)[0, 1].item()


def measure(args: argparse.Namespace, source: str, table: Table) -> None:
    """All rows that ``args`` ask for and the table does not have."""
    ids = open_tokenizer(source)(args.text.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
    windows_WT = torch.tensor(ids[: len(ids) // args.context * args.context]).view(-1, args.context)
    if not len(windows_WT):
        raise InputError(f"{args.text} has {len(ids)} of {args.tokens} tokens: no window of {args.context}.")
    run = {
        "model": Path(source).name,
        "text": args.text.name,
        "calibration": args.calibration.name,
        "calibration_tokens": args.calibration_tokens,
        "context": args.context,
        "tokens": windows_WT.numel(),
    }
    model = open_model(source).float().eval()
    text = Text(model, windows_WT)
    with tempfile.TemporaryDirectory() as name:
        config = InspectConfig(tokens=args.calibration_tokens, context=args.context, maps=False)
        folder = args.work or Path(name) / "profile"
        inspect_folder(source, folder, texts=[str(args.calibration)], config=config)
        profile = Profile.load(folder)
    measured = Measured(model, profile, [batch.inputs for batch in profiled_batches(profile.tensors)])
    if args.interactions:
        interactions(measured, text, args.interactions, table, run)
        return
    for share in map(float, args.shares.split(",")):
        for name in args.methods.split(","):
            one = {**run, "share": share, "method": name}
            healed = {**one, "healing": str(args.healing and args.healing.name), "healing_tokens": args.healing_tokens}
            cut = {**one, "healing_tokens": 0}
            if table.has(**cut) and (not args.healing_tokens or table.has(**healed)):
                continue
            start = time.perf_counter()
            reduced = METHODS[name](measured, share)
            if not table.has(**cut):
                facts = {"seconds": round(time.perf_counter() - start, 1), "commit": commit()}
                table.add({**cut, **text.measured(reduced, measured.shape), **facts})
            if args.healing_tokens and not table.has(**healed):
                start, config = time.perf_counter(), HealConfig(tokens=args.healing_tokens, context=args.context)
                tokenizer, words = open_tokenizer(source), args.healing.read_text(encoding="utf-8")
                reduced = heal_model(reduced, teacher=model, tokenizer=tokenizer, text=words, config=config)
                facts = {"seconds": round(time.perf_counter() - start, 1), "commit": commit()}
                table.add({**healed, **text.measured(reduced, measured.shape), **facts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help='a folder, or "smollm2" for the model of the demo')
    parser.add_argument("--text", type=Path, required=True, help="to evaluate on")
    parser.add_argument("--calibration", type=Path, required=True, help="text for methods to look at")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--work", type=Path, help="folder that keeps what was measured of a model for other runs")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--shares", default=SHARES, help="of the parameters; default: %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument("--healing", type=Path, help="text to heal on")
    parser.add_argument("--healing-tokens", type=read_count, default=0)
    parser.add_argument(
        "--interactions", type=int, default=0, metavar="N", help="hold N random plans against predictions"
    )
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    unknown = [name for name in args.methods.split(",") if name not in METHODS]
    if unknown:
        raise InputError(f"There is no method {', '.join(unknown)}; there are {', '.join(METHODS)}.")
    if args.healing_tokens and args.healing is None:
        raise InputError("Healing needs a text: give `--healing`.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    source = str(demo_model()) if args.model == "smollm2" else args.model
    measure(args, source, Table(args.output or Path(f"results/depth_{Path(source).name.lower()}.json")))


if __name__ == "__main__":
    main()
