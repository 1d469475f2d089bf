"""Plans from real profiles of tiny models: budgets that hold exactly, and students that can be built from them."""

import json
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from headwise.checkpoints.load import open_model
from headwise.cli import app
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.planning.knapsack import choose
from headwise.records.budget import Budget
from headwise.records.cost import cost_of
from headwise.records.plan import Plan, changed
from headwise.records.profile import Check, Profile
from headwise.records.settings import BoundConfig, BudgetConfig, CacheConfig
from headwise.reduction.build import build_reduced
from headwise.reduction.kinds import predicted_loss
from headwise.reduction.plans import menus_for, plan_for
from headwise.reduction.removal.change import Removal
from headwise.report.plans import print_plan
from headwise.steps.plan import make_plan, read_budget, read_layers
from tests.calls import inspect
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 8
FAMILIES = ["llama", "gpt2", "gpt_neox", "qwen3", "gemma3_text", "bert"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A function from a family to its model's folder and its profile's, each measured once."""
    known = {}

    def of(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            changes = {"head_dim": 16} if name == "llama" else {}
            tiny(name, **changes).save_pretrained(folder / "model")
            save_tokenizer(folder / "model")
            (folder / "text.txt").write_text(TEXT)
            texts = [str(folder / "text.txt")]
            inspect(str(folder / "model"), folder / "run", texts=texts, tokens=96, lengths=(16, 32))
            known[name] = folder / "model", folder / "run"
        return known[name]

    return of


def profile_of(measured, name):
    return Profile.load(measured(name)[1] / "profile.json")


def budgets(name, shape):
    now = cost_of(shape, 64, 2)
    yield from (Budget("keep_attention_params", share) for share in (0.9, 0.6, 0.3))
    yield from (Budget("keep_params", share) for share in (0.9, 0.5))
    yield Budget("fit", 2 * now.total_parameters + now.kv_bytes - now.attention_parameters, 64, 2)
    if name != "bert":
        yield from (Budget("keep_kv", share, context) for share in (1.0, 0.7, 0.4) for context in (None, 32))
        yield Budget("kv_bytes_per_token", now.kv_bytes_per_token // 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_budgets_hold_exactly_and_damage_adds_up(name, measured):
    profile = profile_of(measured, name)
    for budget in budgets(name, profile.shape):
        menus = menus_for(profile, budget, 2)
        fixed = budget.measure(profile.shape) - sum(menu[0].cost for menu in menus.values())
        limit = budget.limit(profile.shape)
        chosen = choose(list(menus.values()), limit - fixed)
        plan = plan_for(profile, budget, multiple=2)
        taken = [
            [option for (layer, _), option in zip(menus, chosen, strict=True) if layer == number]
            for number in range(len(plan.layers))
        ]
        assert plan.layers == tuple(tuple(each for option in own for each in option.changes()) for own in taken)
        after = profile.shape.planned(plan)
        assert budget.measure(after) == fixed + sum(option.cost for option in chosen) <= limit
        for layer, found, changes, own in zip(profile.shape.layers, profile.layers, plan.layers, taken, strict=True):
            loss = sum(option.loss for option in own)
            assert predicted_loss(layer, found.values, changes) == pytest.approx(loss, abs=1e-9)
        assert plan.predicted["loss_increase"] == pytest.approx(sum(option.loss for option in chosen), abs=1e-9)
        assert plan.predicted["loss_increase"] == sum(plan.predicted["by_layer"])
        assert plan.predicted["kept"] == budget.measure(after) / budget.measure(profile.shape)
        assert plan.predicted["attention_parameters"][1] == after.attention_parameters()
        assert (budget.amount < 1) == (plan.layers != Plan.full(profile.shape).layers) or budget.amount > 1


def test_widths_alone_follow_the_curves_of_the_profile(measured):
    """With all heads kept, an option costs what `qk_damage` and `v_damage` say."""
    for name in ("llama", "gpt_neox", "gpt2"):
        profile = profile_of(measured, name)
        menus = menus_for(profile, Budget("keep_attention_params", 0.5), 2).values()
        for layer, found, options in zip(profile.shape.layers, profile.layers, menus, strict=True):
            after = [(changed(layer, option.changes()), option) for option in options]
            whole = [(kept, option) for kept, option in after if kept.kv_heads == layer.kv_heads]
            assert len(whole) > 1
            for kept, option in whole:
                curves = found.values["qk_damage"][kept.qk_dim] + found.values["v_damage"][kept.v_dim]
                assert option.loss == pytest.approx(curves, rel=1e-3, abs=1e-7)


def pressed(profile):
    """The same profile with heads that hardly count: one key/value head of layer 0 and the attention of layer 1."""
    layers = []
    for index, (layer, shape) in enumerate(zip(profile.layers, profile.shape.layers, strict=True)):
        values = json.loads(json.dumps(layer.values))
        shared = shape.heads // shape.kv_heads
        for group in [0] if index == 0 else range(shape.kv_heads) if index == 1 else []:
            values["head_damage"][group * shared : (group + 1) * shared] = [1e-9] * shared
            values["v_unit_damage"][group] = [1e-9] * shape.v_dim
        layers.append(replace(layer, values=values))
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("name", FAMILIES)
def test_removed_heads_and_attention_make_students_that_run(name, measured):
    source, run = measured(name)
    profile = pressed(profile_of(measured, name))
    plan = plan_for(profile, Budget("keep_attention_params", 0.4), multiple=2)
    shape = profile.shape.layers[0]
    assert plan.layers[1] == (Removal("attention"),)
    (widths,) = plan.layers[0]
    assert 0 < widths.kv_heads < shape.kv_heads and 0 not in widths.kept_groups(shape)
    model = open_model(str(source))
    student = build_reduced(model, plan, tensors=load_file(run / "profile.safetensors"), form="per-layer")
    assert shape_of(student) == profile.shape.planned(plan)
    with torch.no_grad():
        found = student(input_ids=torch.arange(5, 25)[None])
    assert torch.isfinite(found.logits).all()


def test_uniform_plans_are_stock_models(measured):
    for name in ("llama", "qwen3"):
        source, run = measured(name)
        profile = Profile.load(run / "profile.json")
        plan = plan_for(profile, Budget("keep_kv", 0.6), multiple=2, uniform=True)
        ((widths,),) = set(plan.layers)
        assert widths.qk_dim == widths.v_dim and len(set(widths.rope_pairs)) == 1
        felt = [
            sum(row[p] for layer in profile.layers for row in layer.values["qk_unit_damage"])
            for p in range(profile.shape.layers[0].rotary // 2)
        ]
        kept = widths.rope_pairs[0]
        assert min(felt[p] for p in kept) >= max(felt[p] for p in range(len(felt)) if p not in kept)
        tensors = load_file(run / "profile.safetensors")
        student = build_reduced(open_model(str(source)), plan, tensors=tensors, form="stock")
        assert type(student).__module__.startswith("transformers.")
        free = plan_for(profile, Budget("keep_kv", 0.6), multiple=2)
        assert free.predicted["loss_increase"] <= plan.predicted["loss_increase"]
    whole = plan_for(profile, Budget("keep_kv", 1.0), uniform=True)
    assert whole.layers == Plan.full(profile.shape).layers
    with pytest.raises(InputError, match="none can be protected"):
        plan_for(profile, Budget("keep_kv", 0.6), protect=(0,), uniform=True)
    with pytest.raises(InputError, match=r"with one width in multiples of 4; the least is 0\.5"):
        plan_for(profile, Budget("keep_kv", 0.4), multiple=4, uniform=True)


def test_protected_layers_stay_whole(measured):
    profile = profile_of(measured, "llama")
    plan = plan_for(profile, Budget("keep_kv", 0.75), multiple=2, protect=read_layers("0, 2"))
    assert plan.layers[0] == plan.layers[2] == () and plan.layers[1]
    assert plan.budget == {"keep_kv": 0.75, "dtype": "bf16", "context": 128, "multiple_of": 2, "protect": [0, 2]}
    with pytest.raises(InputError, match=r"Keeping 0\.5 of the KV cache is not possible .* the least is 0\.66667"):
        plan_for(profile, Budget("keep_kv", 0.5), protect=(0, 2))
    with pytest.raises(InputError, match="nothing to plan"):
        plan_for(profile, Budget("keep_kv", 0.5), protect=(0, 1, 2))


def test_affine_norms_latent_and_unmeasured_layers(measured):
    profile = profile_of(measured, "llama")
    layers = list(profile.shape.layers)
    layers[0] = replace(layers[0], norm="affine")
    bare = replace(profile.layers[1], values={})
    shaped = replace(
        profile,
        shape=replace(profile.shape, layers=tuple(layers)),
        layers=(profile.layers[0], bare, profile.layers[2]),
    )
    plan = plan_for(shaped, Budget("keep_kv", 0.5), multiple=2)
    assert plan.after(shaped.shape)[0].qk_dim in (0, 16) and plan.layers[0] and plan.layers[1] == ()


def test_some_attention_stays_however_little_is_asked_for(measured):
    profile = profile_of(measured, "llama")
    with pytest.raises(InputError) as error:
        plan_for(profile, Budget("keep_kv", 0.001), multiple=2)
    least = float(str(error.value).rstrip(".").rsplit(" ", 1)[1])
    plan = plan_for(profile, Budget("keep_kv", least), multiple=2)
    assert [layer.kv_heads for layer in plan.after(profile.shape) if layer.heads] == [1]


def test_what_fits_is_read_as_people_write_it():
    for text, expected in {
        "8GB at 32k x 4": (8 * 10**9, 32768, 4),
        "1.5 GiB at 1000": (3 * 2**29, 1000, 1),
        "100MB at 4kx2": (10**8, 4096, 2),
        "512 mib AT 8K X 16": (2**29, 8192, 16),
    }.items():
        budget = Budget.fitting(text)
        assert (budget.amount, budget.context, budget.batch) == expected
    for text in ("8GB", "8 at 32k", "8GB at many", "1.2.3GB at 4k", ""):
        with pytest.raises(InputError, match="Cannot read"):
            Budget.fitting(text)


def test_one_budget_and_sensible_layers():
    fit = read_budget(BudgetConfig(fit="1GB at 2k"), None, CacheConfig(cache_dtype="fp8"))
    assert fit == Budget("fit", 10**9, 2048, 1, "fp8")
    assert read_budget(BudgetConfig(), BoundConfig(max_loss_increase=0.1), CacheConfig()) is None
    both = read_budget(BudgetConfig(keep_kv=0.5, fit="1GB at 2k"), None, CacheConfig())
    assert both == Budget("keep_kv", 0.5, 2048, also=(Budget("fit", 10**9, 2048),))
    assert read_layers("0,1,28-29") == {0, 1, 28, 29}
    for wrong in (
        {},
        {"keep_decode_time": 0.0},
        {"keep_kv": 0.0},
        {"keep_attention_params": 1.5},
        {"kv_bytes_per_token": 0},
        {"keep_kv": 0.5, "cache_dtype": "int3"},
        {"fit": "1GB at 2k", "cache_tokens": 5},
        {"keep_kv": 0.5, "max_loss_increase": 0.1},
        {"max_ppl_increase": 0.1, "max_loss_increase": 0.1},
    ):
        configs = (BudgetConfig, BoundConfig, CacheConfig)
        own = [
            {name: wrong[name] for name in (each.name for each in fields(config)) if name in wrong}
            for config in configs
        ]
        with pytest.raises(InputError):
            read_budget(*(config(**values) for config, values in zip(configs, own, strict=True)))
    for wrong in ("", "1;2", "a", "3-", "-3"):
        with pytest.raises(InputError, match="Layers are numbers"):
            read_layers(wrong)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "Give a budget"),
        (("--keep-kv", "0.5", "--protect", "7"), "There is no layer 7 to protect: the model has layers 0 to 2"),
        (("--keep-kv", "0.5", "--multiple-of", "0"), "cannot be multiples of 0"),
        (
            ("--kv-bytes-per-token", "10", "--cache", "none"),
            "10 bytes of KV cache per token are not possible .* the least is 32 bytes",
        ),
        (("--fit", "1kB at 32k x 4"), r"at 32,768 tokens x 4 are not possible .* the least is 0\.\d+ GB"),
    ],
)
def test_wrong_calls_say_what_is_possible_and_write_nothing(options, sentence, measured, tmp_path):
    arguments = ["plan", str(measured("llama")[1]), "-o", str(tmp_path / "plan.json"), *options]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, InputError)
    with pytest.raises(InputError, match=sentence):
        raise result.exception
    assert not (tmp_path / "plan.json").exists()


def test_models_without_a_cache_say_so(measured):
    for budget in (Budget("keep_kv", 0.5), Budget("kv_bytes_per_token", 100)):
        with pytest.raises(InputError, match="no KV cache; use `keep_attention_params`"):
            plan_for(profile_of(measured, "bert"), budget)


def test_the_command(measured, tmp_path):
    run, output = str(measured("llama")[1]), tmp_path / "plan.json"
    given = ["plan", run, "--keep-kv", "0.5", "--multiple-of", "2", "--cache", "none", "-o", str(output)]
    dry = CliRunner().invoke(app, [*given, "--dry-run"])
    assert dry.exit_code == 0 and not output.exists()
    assert "predicted loss increase" in dry.stdout and "384 > 192  (50.0%)" in dry.stdout
    assert "The first third of the layers keeps" in dry.stdout
    printed = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert printed == json.loads(output.read_text()) and printed["profile"] == run
    plan, profile = make_plan(measured("llama")[1], None, Budget("keep_kv", 0.5), multiple=2)
    assert Plan.load(output) == plan and Profile.load(measured("llama")[1] / "profile.json") == profile


def test_checked_predictions_are_shown(measured, capsys):
    profile = profile_of(measured, "llama")

    class Checked:
        checks = (Check(0.1, 0.3), Check(10.0, 30.0))

        def __getattr__(self, name):
            return getattr(profile, name)

    plan = plan_for(Checked(), Budget("keep_kv", 0.5), multiple=2)
    assert plan.predicted["expected"] == pytest.approx(3 * plan.predicted["loss_increase"])
    print_plan(plan, profile)
    shown = " ".join(capsys.readouterr().out.split())
    assert "such cuts, refitted, measured 3x of it on text like" in shown and "so expect about" in shown
