"""What came of a plan on the page: tables of everything measured, and the picture of loss by position."""

import re
from dataclasses import replace

from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.records.scores import PartScores, Scores
from headwise.report.page.positions import positions_chart
from headwise.report.page.result import result_section
from tests.report.test_scores import ASKED, SCORES
from tests.tiny import tiny


def stretch(last, loss, increase=None, error=None):
    return PartScores(f"tokens to {last}", 64, loss, 0.1, 0.05, increase, error, 0.01, last)


def scores(*increases):
    """A first model and another with these increases and errors at two stretches of positions."""
    first = replace(SCORES.models[0], parts=(stretch(64, 3.0), stretch(256, 2.5)))
    other = replace(
        SCORES.models[1], parts=tuple(stretch(last, 3.0, *each) for last, each in zip((64, 256), increases))
    )
    return Scores((first, other), SCORES.text, SCORES.settings)


def test_the_picture_puts_larger_increases_higher_with_their_errors():
    chart = positions_chart(scores((0.1, 0.01), (0.4, 0.02)))
    low, high = [float(y) for y in re.findall(r'cy="([\d.]+)"', chart)]
    assert low > high  # of a picture that counts downwards
    (below, above), _ = [map(float, ends) for ends in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)\"/>", chart)]
    assert below > low > above
    assert "tokens to 256: +0.4000" in chart and "student" in chart


def test_there_is_no_picture_without_a_comparison():
    assert positions_chart(SCORES) == ""
    assert positions_chart(Scores(scores((0.1, 0.01), (0.4, 0.02)).models[:1])) == ""


def test_the_page_shows_every_table():
    shape = shape_of(tiny("llama"))
    section = result_section(ASKED, Plan.make(shape, tuple(map(LayerPlan.full, shape.layers))), shape)
    for cell in ("70.0% (-33.1 to -6.0)", "0.6100 ±0.0120", "+0.1000 ±0.0200, KL 0.2000", "256 tokens, 10% deep"):
        assert cell in section
    assert "Needles by length and depth" in section and "seed 7" in section
    assert "Needles by length" not in result_section(
        SCORES, Plan.make(shape, tuple(map(LayerPlan.full, shape.layers))), shape
    )
