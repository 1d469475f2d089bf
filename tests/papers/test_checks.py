"""Verdicts follow from the numbers: invented outcomes are judged as they should be, whichever way."""

import pytest

from headwise.papers.catalogue import module_of
from headwise.papers.kit.noise import margin
from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN


def verdicts(experiment, size, outcome):
    """The verdicts of an experiment where ``outcome`` gives the numbers of each setting of its grid."""
    module = module_of(*experiment.split("/"))
    points = [Point(settings, outcome(settings)) for settings in module.Settings.grid(size, None)]
    return {verdict.claim: verdict for verdict in module.check(points)}


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0}, FAILED),  # nobody learnt it
        ({1: 0.5, 2: 0.05, 4: 0.02, 8: 0.001, 16: 0.01, 32: 0.02}, HELD),  # 8 heads, as the rule says
        ({1: 0.5, 2: 0.05, 4: 0.05, 8: 0.05, 16: 0.05, 32: 0.05}, CONDITIONAL),  # fewer will do
        ({1: 0.05, 2: 0.05, 4: 0.05, 8: 0.05, 16: 0.05, 32: 0.05}, FAILED),  # heads are not what it takes
        ({1: 0.001, 2: 0.05, 4: 0.05, 8: 0.05, 16: 0.05, 32: 0.05}, FAILED),
    ],
)
def test_a_special_case_holds_where_it_is_solved_best_where_the_rule_says(errors, status):
    decided = verdicts("allocation/special", "full", lambda settings: {"error": errors[settings.heads]})
    assert decided["copy"].status == status, decided["copy"]


@pytest.mark.parametrize(
    ("error", "upturn", "prediction", "norm"),
    [
        (lambda heads, normed: 0.5 if heads < 32 or (normed and heads > 32) else 0.001, CONDITIONAL, HELD, HELD),
        (lambda heads, normed: 1e-4 * heads, CONDITIONAL, FAILED, FAILED),  # solved by any number of heads
        (lambda heads, normed: 0.5 if heads < 4 else 0.001, FAILED, CONDITIONAL, FAILED),
        (lambda heads, normed: 0.05 if heads < 32 else 0.2, HELD, FAILED, FAILED),
    ],
)
def test_errors_of_a_solved_task_make_no_upturn(error, upturn, prediction, norm):
    decided = verdicts("allocation/ngram", "full", lambda s: {"validation": error(s.heads, "norm" in s.arm)})
    assert decided["gram-upturn"].status == upturn, decided
    assert decided["gram-prediction"].status == prediction, decided
    assert decided["gram-norm"].status == norm, decided


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        (lambda heads: 100 / heads, HELD),
        (lambda heads: 300 if heads == 4 else 100 / heads, CONDITIONAL),
        (lambda heads: 100 * heads, FAILED),
    ],
)
def test_more_heads_condition_better_only_if_they_do_so_all_the_way(condition, status):
    decided = verdicts("depth/softmax", "full", lambda settings: {"condition": condition(settings.heads)})
    assert decided["softmax-heads"].status == status and decided["jacobian"].status == status


def test_what_seeds_do_by_chance_does_not_count():
    assert margin([[0.1], [0.5]], 0.01) == 0.01  # one seed tells nothing of chance
    assert margin([[0.1, 0.1, 0.1], [0.5, 0.5, 0.5]], 0.01) == 0.01
    assert margin([[0.0, 2.0], [5.0, 7.0]], 0.01) == pytest.approx(2 * (2 * 2.0 / 2) ** 0.5)

    def outcome(settings, spread):
        score = 0.5 + 0.02 * settings.arm.startswith("lean") + spread * (settings.seed - 1)
        return {"score": score, "training": 1.0, "parameters": 10, "seconds": 1.0, "before": [1.0], "after": [1.0]}

    assert verdicts("depth/lean", "full", lambda s: outcome(s, 0.001))["lean-text"].status == HELD
    unsure = verdicts("depth/lean", "full", lambda s: outcome(s, 0.1))
    assert unsure["lean-text"].status == unsure["lean-images"].status == CONDITIONAL
    assert unsure["equal-size"].status == CONDITIONAL and unsure["heads-pay"].status == FAILED


@pytest.mark.parametrize(
    ("gain", "text", "images"), [(0.02, HELD, HELD), (0, CONDITIONAL, HELD), (-0.02, FAILED, FAILED)]
)
def test_to_beat_a_baseline_is_more_than_to_equal_it(gain, text, images):
    def outcome(settings):
        score = 0.5 + (gain if settings.arm.startswith("lean") else 0)
        numbers = {"training": 1.0, "parameters": 10, "seconds": 1.0, "before": [1.0], "after": [1.0]}
        return {"score": score, **numbers}

    decided = verdicts("depth/lean", "full", outcome)
    assert (decided["lean-text"].status, decided["lean-images"].status) == (text, images)
    assert decided["conditioning"].status == FAILED


@pytest.mark.parametrize(
    ("error", "drop", "spare", "seeds"),
    [
        (lambda heads, enough: 1e-2 if heads < enough else 1e-4, HELD, HELD, FAILED),
        (lambda heads, enough: 10.0**-heads, FAILED, CONDITIONAL, FAILED),
        (lambda heads, enough: 1e-2 if heads <= enough else 1e-6, FAILED, FAILED, FAILED),
    ],
)
def test_the_drop_is_where_enough_heads_are(error, drop, spare, seeds):
    tables = module_of("heads", "retrieval").TABLES

    def outcome(settings):
        return {"nmse": [error(settings.heads, tables[settings.table].enough)] * settings.seeds}

    decided = verdicts("heads/retrieval", "full", outcome)
    assert decided["transition"].status == decided["two-layers"].status == drop
    assert decided["min-over-seeds"].status == seeds
    if drop == HELD or spare == FAILED:
        assert decided["spare-head"].status == spare


def test_a_mean_that_hides_a_drop_is_seen_in_each_table():
    tables = module_of("heads", "retrieval").TABLES

    def outcome(settings):
        best = 1e-2 if settings.heads < tables[settings.table].enough else 1e-4
        stuck = settings.table == 2 and settings.orthonormal  # one seed of table 2 never learns
        return {"nmse": [*[best] * (settings.seeds - 1), 0.1 if stuck else best]}

    verdict = verdicts("heads/retrieval", "full", outcome)["min-over-seeds"]
    assert verdict.status == HELD
    assert "5 of 20 cells" in verdict.figure


@pytest.mark.parametrize(("ranks", "status"), [([1.0, 0.3, 1.0], HELD), ([0.1, 0.9, 1.0], FAILED)])
def test_full_rank_at_one_dimension_has_to_be_measured(ranks, status):
    module = module_of("rank", "temperature")
    by_width = dict(zip((1, 8, 64), ranks, strict=True))

    def outcome(settings):
        rows = [[by_width[settings.head_dim]] * len(module.NAMES) for _ in module.TEMPERATURES]
        return {"hard": 0.6, "ranks": rows, "promised": 1, "kept": 1}

    assert verdicts("rank/temperature", "quick", outcome)["one-dimension"].status == status


def test_two_points_make_no_line():
    assert verdicts("heads/width", "quick", lambda s: {"nmse": [1 / s.hidden]})["width-scaling"].status == OPEN
    straight = verdicts("heads/width", "full", lambda s: {"nmse": [s.tokens ** (4 - s.heads - 0.5) / s.hidden]})
    assert straight["width-scaling"].status == straight["width-length"].status == HELD
    assert verdicts("rank/forced", "quick", lambda s: {"train_loss": 1.0})["forced"].status == OPEN


@pytest.mark.parametrize(
    ("loss", "status"),
    [
        (lambda limit, last: 1 / (limit or last), HELD),
        (lambda limit, last: 1.0 if limit == 1 else 0.5, CONDITIONAL),
        (lambda limit, last: 0.5, FAILED),
    ],
)
def test_a_limit_that_is_not_felt_causes_nothing(loss, status):
    last = module_of("rank", "forced").TOKENS
    decided = verdicts("rank/forced", "full", lambda s: {"train_loss": loss(s.limit, last[s.task])})
    assert decided["forced"].status == decided["forced-needed"].status == status


def test_the_barrier_is_an_upper_bound_for_all_inputs():
    def outcome(settings, high=()):
        widths = module_of("rank", "random").WIDTHS
        share = 0.9 if settings.kind in high else 0.3
        soft = [[share] * 5] * 2
        return {"rank": [share * (1 - 1 / (1 + w)) for w in widths], "error": [0.0] * len(widths), "soft": soft}

    below = verdicts("rank/random", "full", outcome)
    assert below["inputs"].status == below["softmax-inputs"].status == HELD
    assert below["small-gain"].status == FAILED  # at the same width for all lengths
    above = verdicts("rank/random", "full", lambda settings: outcome(settings, ("correlated",)))
    assert above["inputs"].status == above["softmax-inputs"].status == CONDITIONAL


@pytest.mark.parametrize(
    ("slope", "growth", "late", "saturation", "logits", "later"),
    [
        (-1.0, 1.0, 0.5, HELD, FAILED, HELD),
        (-0.5, 1.5, 1.0, CONDITIONAL, HELD, FAILED),
        (0, 1, 2, FAILED, FAILED, FAILED),
    ],
)
def test_a_real_model_is_judged_by_its_slopes_and_thirds(slope, growth, late, saturation, logits, later):
    lengths = [64, 256]

    def layer(number):
        share = late if number >= 4 else 1.0
        return {
            "norm": [length**slope for length in lengths],
            "spread": [1.0, growth],
            "rows": [0.3 * share, 0.1],
            "qk_damage": 0.01 * share,
            "v_damage": 0.02 * share,
            "head_damage": [1.0, 1.0] if share == 1 else [1.0, 0.0],
        }

    decided = verdicts(
        "allocation/real",
        "full",
        lambda s: {"lengths": lengths, "widths": [16, 32], "layers": list(map(layer, range(6)))},
    )
    assert decided["real-saturation"].status == saturation
    assert decided["real-logits"].status == logits
    assert decided["real-later-layers"].status == later
    assert decided["dominant-heads"].status == (FAILED if late == 1 else HELD)


def test_every_seed_counts():
    module = module_of("rank", "temperature")
    ranks = [[0.5] * len(module.NAMES) for _ in module.TEMPERATURES]
    points = [
        Point(settings, {"hard": 0.6, "ranks": ranks, "promised": 1, "kept": int(settings.seed == 2)})
        for settings in module.Settings.grid("quick", 3)
    ]
    assert next(v for v in module.check(points) if v.claim == "lemma").status == FAILED
