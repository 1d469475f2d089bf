"""Menus out of what several kinds of reduction offer, and the plan that is taken from them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from headwise.files.errors import BudgetError, InputError
from headwise.planning.knapsack import Option
from headwise.planning.menus import BLOCK, MenuRequest, build_menus
from headwise.planning.planner import allocate
from headwise.records import Change, LayerShape, ModelShape
from headwise.records.budget import Budget

LAYER = LayerShape(4, 4, 8, 8)
SHAPE = ModelShape("llama", 32, (LAYER, LAYER), 100, 50, max_tokens=64)
PROFILE = SimpleNamespace(shape=SHAPE, layers=[SimpleNamespace(values={"measured": True})] * 2)
BUDGET = Budget("keep_attention_params", 0.5)


@dataclass(frozen=True, slots=True)
class Marked(Change):
    """A change that leaves everything as it is and can be told from others."""

    kind: ClassVar[str] = "marked"
    order: ClassVar[int] = 1
    name: str

    def check(self, layer, where):
        pass

    def shape(self, layer):
        return replace(layer, heads=2, kv_heads=2)

    def describe(self, layer):
        return self.name

    @classmethod
    def read(cls, row):
        return cls(row.text("name"))


def request(**given):
    return MenuRequest(PROFILE, [lambda layer: BUDGET.cost(layer, SHAPE)], **given)


def source(name, cost, loss, part="attention"):
    def options(asking):
        for number, _ in asking.layers():
            yield (number, part), Option(cost, loss, lambda: (Marked(name),))

    return options


def names(menu):
    return [change.name for option in menu for change in option.changes()]


def test_kinds_compete_in_one_menu_and_of_equals_the_first_is_taken():
    full = BUDGET.cost(LAYER, SHAPE)
    menus = build_menus(request(), [source("first", full // 2, 0.5), source("second", full // 2, 0.5)])
    assert list(menus) == [(0, "attention"), (1, "attention")]
    assert menus[0, "attention"][0] == Option(full, 0.0) and names(menus[0, "attention"]) == ["first"]
    menus = build_menus(request(), [source("first", full // 2, 0.5), source("better", full // 2, 0.4)])
    assert names(menus[1, "attention"]) == ["better"]


def test_other_parts_get_menus_of_their_own_and_protected_layers_none():
    menus = build_menus(request(protect=(0,)), [source("wide", 10, 0.5), source("mlp", 20, 0.1, "mlp")])
    assert list(menus) == [(0, "attention"), (1, "attention"), (1, "mlp")]
    assert names(menus[0, "attention"]) == [] and names(menus[1, "mlp"]) == ["mlp"]
    assert all(menu[0].loss == 0.0 for menu in menus.values())


def test_one_option_of_each_menu_is_taken_and_what_is_impossible_is_said():
    half = BUDGET.cost(replace(LAYER, heads=2, kv_heads=2), SHAPE)
    menus = build_menus(request(), [source("half", half, 0.5)])
    assert allocate(PROFILE, BUDGET, menus, "halves") == ((Marked("half"),), (Marked("half"),))
    assert allocate(PROFILE, replace(BUDGET, amount=0.75), menus, "halves") in (
        ((Marked("half"),), ()),
        ((), (Marked("half"),)),
    )
    with pytest.raises(BudgetError, match=r"not possible with halves; the least is 0\.5"):
        allocate(PROFILE, replace(BUDGET, amount=0.4), menus, "halves")
    with pytest.raises(InputError, match="nothing to plan"):
        allocate(PROFILE, BUDGET, build_menus(request(), []), "halves")


def test_whole_blocks_compete_with_all_that_becomes_of_their_parts():
    full = BUDGET.cost(LAYER, SHAPE)
    parts = [source("heads", full - full // 4, 0.1), source("mlp", full // 2, 0.15, "mlp")]
    both = (full // 4, 0.25, ["heads", "mlp"])
    for loss, last in ((0.2, (0, 0.2, ["block"])), (0.9, both)):
        menus = build_menus(request(), [*parts, source("block", 0, loss, BLOCK)])
        assert list(menus) == [(0, "attention"), (1, "attention")]
        for menu in menus.values():
            rows = [(option.cost, round(option.loss, 9), names([option])) for option in menu]
            assert rows[:2] == [(full, 0.0, []), (full // 2, 0.15, ["mlp"])] and rows[2] == last
            assert rows[3:] == ([(0, 0.9, ["block"])] if last == both else [])
    several = replace(request(), costs=[*request().costs] * 2)
    assert all(part != BLOCK for _, part in build_menus(several, [source("block", 0, 0.25, BLOCK)]))


def test_what_costs_more_for_nothing_is_not_offered():
    """Merged heads may have more parameters: the first option is the layer as it is, and no dearer one."""
    (menu, _) = build_menus(request(), [source("dear", 10**6, 0.0)]).values()
    assert names(menu) == []
    assert menu[0].cost == BUDGET.cost(LAYER, SHAPE)
