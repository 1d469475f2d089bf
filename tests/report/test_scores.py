from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from headwise.records.scores import ModelScores, Rate, Scores, Speed
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
    kl=0.0712,
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
        "| KL from the baseline, nats | - | 0.0712 |",
        "| prefill of 1,024 tokens, tokens/s | 200 | 220 (1.10x, 1.05 to 1.20) |",
        "| decode after 1,024, tokens/s | 200 | 50.5 (0.25x, 0.20 to 0.30) |",
        "",
        "Quality on 2,048 tokens in windows of 512 of text.txt. Run in fp32 on cpu, 2 threads. The cache is that of a "
        "real generation in the precision of the weights. Speeds: the first model's is the median of 5 rounds in "
        "turns; in brackets times that, the median and the range over rounds.",
        "",
        "A note.",
    ]


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
