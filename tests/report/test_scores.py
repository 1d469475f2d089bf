from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from headwise.records.scores import ModelScores, PartScores, Rate, Scores, Speed
from headwise.records.skills import Difference, SkillScores, TaskScores
from headwise.report.scores import markdown, print_scores, rows

ONE = Rate(200.0, 1.0, 1.0, 1.0)
DENSE = ModelScores(
    "some/dense",
    "LlamaForCausalLM",
    "bf16",
    1000,
    400,
    loss=3.0,
    perplexity=20.0855,
    cache_bytes_per_token=512.0,
    speed=(Speed(1024, ONE, ONE),),
)
STUDENT = replace(
    DENSE,
    source="student",
    parameters=900,
    attention_parameters=300,
    perplexity=21.5,
    loss_increase=0.0681,
    loss_increase_error=0.0042,
    kl=0.0712,
    kl_error=0.0031,
    kl_p99=0.9,
    same_top=0.912,
    cache_bytes_per_token=384.0,
    speed=(Speed(1024, Rate(220.0, 1.1, 1.05, 1.2), Rate(50.5, 0.25, 0.2, 0.3)),),
)
SCORES = Scores(
    (DENSE, STUDENT),
    {"name": "text.txt", "tokens": 2048, "context": 512},
    {"precision": "fp32", "device": "cpu", "threads": 2, "rounds": 5},
    notes=("A note.",),
)


def test_the_table_as_markdown():
    assert markdown(SCORES).splitlines() == [
        "| | dense | student |",
        "| --- | ---: | ---: |",
        "| class | LlamaForCausalLM | LlamaForCausalLM |",
        "| precision of the weights | bf16 | bf16 |",
        "| parameters | 1,000 | 900 (90.0%) |",
        "| of these in attention | 400 | 300 (75.0%) |",
        "| KV cache, bytes per token | 512 | 384 (75.0%) |",
        "| perplexity | 20.085 | 21.500 |",
        "| loss increase, nats | - | 0.0681 ±0.0042 |",
        "| KL from the baseline, nats | - | 0.0712 ±0.0031 |",
        "| KL, 99th percentile | - | 0.900 |",
        "| same likeliest token | - | 91.2% |",
        "| prefill of 1,024 tokens, tokens/s | 200 | 220 (1.10x, 1.05 to 1.20) |",
        "| decode after 1,024, tokens/s | 200 | 50.5 (0.25x, 0.20 to 0.30) |",
        "",
        "Quality on 2,048 tokens in windows of 512 of text.txt. ± is one standard error over windows. Run in fp32 on "
        "cpu, 2 threads. The cache is that of a real generation in the precision of the weights. Speeds: the first "
        "model's is the median of 5 rounds in turns; in brackets times that, the median and the range over rounds.",
        "",
        "A note.",
    ]


ASKED = Scores(
    (
        replace(
            DENSE,
            parts=(PartScores("tokens 1 to 64", 320, 3.5, loss_error=0.1, last=64),),
            skills=(
                SkillScores("needle", "", "", 8, 40, 0.9, 0.1, 0.5),
                SkillScores("needle", "length and depth", "256 tokens, 10% deep", 8, 8, 0.9, 0.1, 0.5),
            ),
            tasks=(TaskScores("piqa", "acc", 0.61, 0.012),),
        ),
        replace(
            STUDENT,
            source="a/SmolLM2-135M-Instruct at 0.27 mixed",
            parts=(PartScores("tokens 1 to 64", 320, 3.6, 0.2, 0.1, 0.1, 0.02, 0.01, 64),),
            skills=(SkillScores("needle", "", "", 8, 40, 0.7, 0.1, 0.9, Difference(-0.2, -0.331, -0.06)),),
            tasks=(TaskScores("piqa", "acc", 0.6, 0.012), TaskScores("piqa", "acc_norm", 0.59)),
        ),
    ),
    settings={**SCORES.settings, "seed": 7},
)


def test_what_models_were_asked_stands_in_tables_of_its_own():
    lines = markdown(ASKED).splitlines()
    for line in (
        "| tokens 1 to 64 | 3.5000 ±0.1000 | +0.1000 ±0.0200, KL 0.2000 |",
        "| needle | 90.0% (chance 10%) | 70.0% (-33.1 to -6.0) |",
        "| piqa acc | 0.6100 ±0.0120 | 0.6000 ±0.0120 |",
        "| piqa acc_norm | - | 0.5900 |",
    ):
        assert line in lines
    assert any("seed 7" in line for line in lines) and not any("10% deep" in line for line in lines)


def test_tables_fit_a_terminal_of_80_columns():
    shown = StringIO()
    print_scores(
        replace(ASKED, models=tuple(replace(model, speed=()) for model in ASKED.models)), Console(file=shown, width=80)
    )
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "+0.1000 ±0.0200, KL 0.2000" in text and "70.0% (-33.1 to -6.0)" in text and "…" not in text


def test_the_terminal_shows_the_same_cells():
    shown = StringIO()
    print_scores(SCORES, Console(file=shown, width=110))
    for name, cells in rows(SCORES):
        line = next(line for line in shown.getvalue().splitlines() if line.startswith(name))
        assert all(cell in line for cell in cells)


def test_models_of_one_name_are_told_apart():
    named = Scores((replace(DENSE, source="a/model"), replace(DENSE, source="b/model"), replace(DENSE, source="c|d")))
    assert markdown(named).splitlines()[0] == "| | a/model | b/model | c\\|d |"


@pytest.mark.parametrize("field", ["agreement", "agreement_p5", "accuracy", "kl", "perplexity"])
def test_measures_nobody_has_get_no_row(field):
    bare = ModelScores("model", "BertModel", "fp32", 10, 5)
    assert len(rows(Scores((bare, bare)))) == 4
    assert len(rows(Scores((bare, replace(bare, **{field: 0.5}))))) == 5
