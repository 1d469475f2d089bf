"""Plans of fewer blocks, alone and beside other budgets: exact costs, and no better ones on small models."""

from itertools import product

import pytest
import torch

import headwise as hw
from headwise.checkpoints.packed import codes_of
from headwise.families.shapes import shape_of
from headwise.files.errors import BudgetError, InputError
from headwise.planning.planner import allocate
from headwise.records import Plan, cost_of
from headwise.records.budget import Budget
from headwise.reduction.bits.change import Bits
from headwise.reduction.flatten.change import Flatten
from headwise.reduction.kinds import kinds
from headwise.reduction.plans import menus_for, plan_for, predicted_losses
from headwise.reduction.removal.change import Removal
from headwise.runtime.modeling_headwise import ReducedModel
from headwise.tracing.example import example_inputs
from headwise.tracing.rounding import rounding
from tests.reduction.conftest import inputs

PAIR, DROPPED = Flatten(1), Removal("block")


def depths(blocks):
    """All ways to keep, drop or join blocks in pairs."""
    for fates in product(("keep", "drop", "pair", "joined"), repeat=blocks):
        pairs = [i for i, fate in enumerate(fates) if fate == "pair"]
        if [i for i, fate in enumerate(fates) if fate == "joined"] == [i + 1 for i in pairs]:
            yield tuple({"drop": (DROPPED,), "pair": (PAIR,)}.get(fate, ()) for fate in fates)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("limit", [2, 3])
def test_fewer_layers_are_dropped_or_joined_at_the_least_loss(profiles, name, limit):
    _, profile = profiles(name)
    plan = plan_for(profile, Budget("layers", limit))
    feasible = []
    for layers in depths(3):
        try:
            tried = Plan.make(profile.shape, layers)
        except InputError:
            continue
        if len(tried.made_of()) <= limit:
            feasible.append(sum(predicted_losses(profile, layers)))
    assert plan.predicted["loss_increase"] == pytest.approx(min(feasible))
    assert len(plan.made_of()) == limit


@pytest.mark.parametrize("kind", ["keep_kv", "keep_params"])
def test_other_budgets_are_kept_on_the_layers_that_are_left(profiles, kind):
    model, profile = profiles("llama")
    shape = profile.shape
    depth = plan_for(profile, Budget("layers", 2))
    joined = next(run for run in depth.made_of() if len(run) > 1)
    for share in (0.8, 0.5, 0.3):
        plan = plan_for(profile, Budget("layers", 2, also=(Budget(kind, share, 64),)), multiple=4)
        assert plan.made_of() == depth.made_of()
        halves = [{change.kind: change for change in plan.layers[number]} for number in joined]
        assert any(set(half) - {"flatten"} for half in halves)
        small = hw.compress(model, plan, profile)
        limited = Budget(kind, share, 64)
        assert limited.measure(shape_of(small)) <= limited.limit(shape)
        assert shape_of(small) == shape.planned(plan)
        assert plan.predicted["also"].keys() == {kind}
        with torch.no_grad():
            assert torch.isfinite(small(**example_inputs(small))[0]).all()


def test_joined_halves_are_cut_together_at_the_least_loss(profiles):
    """Every choice for the attention of three layers, of which two are joined, against the planner's."""
    _, profile = profiles("llama")
    shape, budget = profile.shape, Budget("keep_kv", 0.45, 64)
    decided = ((PAIR,), (), ())
    whole = Budget("keep_kv", 1.0, 64, also=(Budget("keep_attention_params", 1.0),))  # menus of two are not thinned out
    menus = menus_for(profile, whole, multiple=4)
    options = [[each.changes() for each in menus[number, "attention"]] for number in range(3)]
    best = float("inf")
    for chosen in product(*options):
        layers = [(*own, *fixed) for own, fixed in zip(chosen, decided, strict=True)]
        try:
            after = shape.planned(Plan.make(shape, layers))
        except InputError:
            continue
        if budget.measure(after) <= budget.limit(shape):
            best = min(best, sum(predicted_losses(profile, layers)))
    planned = allocate(profile, budget, menus_for(profile, budget, 4, decided=decided), "multiples of 4", decided)
    assert best <= sum(predicted_losses(profile, planned)) <= 1.02 * best


def test_protected_blocks_stay_as_they_are(profiles):
    _, profile = profiles("llama")
    plan = plan_for(profile, Budget("layers", 2), protect=(1,))
    assert DROPPED in (*plan.layers[0], *plan.layers[2]) and not any(PAIR in layer for layer in plan.layers)
    with pytest.raises(
        BudgetError, match="1 layers are not possible with what may be dropped or joined; the least is 2"
    ):
        plan_for(profile, Budget("layers", 1), protect=(1, 2))


def test_uniform_plans_of_fewer_layers_only_drop_them_and_stay_stock(profiles):
    model, profile = profiles("llama")
    budget = Budget("layers", 2, also=(Budget("keep_kv", 0.4, 64),))
    small = hw.compress(model, plan_for(profile, budget, multiple=4, uniform=True), profile)
    assert not isinstance(small, ReducedModel)
    assert small.config.num_hidden_layers == 2 and small.config.head_dim == 4


def test_kinds_offer_parts_of_blocks_or_several_blocks():
    assert {kind.change.kind for kind in kinds() if kind.spans.__name__ == "spans"} == {"flatten"}


def test_joined_blocks_may_round_their_cache(profiles, tmp_path):
    model, profile = profiles("llama")
    ids = inputs()[0]["input_ids"]
    depth = plan_for(profile, Budget("layers", 2))
    plain = hw.compress(model, depth, profile, hw.CompressConfig(refit="none"))
    errors = []
    for share in (0.53, 0.3, 0.15):
        budget = Budget("layers", 2, also=(Budget("keep_kv", share, 4096),))
        plan = plan_for(profile, budget, cache="mixed")
        assert plan.made_of() == depth.made_of()
        joined = next(run for run in plan.made_of() if len(run) > 1)
        assert all(any(change.kind == "bits" for change in plan.layers[number]) for number in joined)
        small = hw.compress(model, plan, profile, hw.CompressConfig(refit="none"))
        with torch.no_grad(), rounding(small, codes_of(small)):
            errors.append((small(ids).logits - plain(ids).logits).abs().mean().item())
        cache = hw.cache(small)
        with torch.no_grad():
            small(ids, past_key_values=cache)
        assert cache.nbytes == cost_of(shape_of(small), cache.get_seq_length(), len(ids), "fp32").kv_bytes
    assert errors[0] < errors[1] / 1.5 < errors[2] / 3
    hw.save(small, tmp_path / "out")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    generated = [
        one.generate(ids, past_key_values=hw.cache(one), **options) for one in (small, hw.open(tmp_path / "out"))
    ]
    assert torch.equal(*generated)


def test_a_rounded_half_needs_a_rounded_neighbour(profiles):
    _, profile = profiles("llama")
    bits = Bits(("8" * 8,) * 2, ("8" * 16,))
    for layers in (((bits, PAIR), (), ()), ((PAIR,), (bits,), ())):
        with pytest.raises(InputError, match="all have a rounded cache or none"):
            Plan.make(profile.shape, layers)
