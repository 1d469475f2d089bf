"""The towers of blocks on the page: each block before and after, and a line from what stays to what it became."""

import re

from headwise.families.shapes import shape_of
from headwise.records import Plan
from headwise.reduction.flatten.change import Flatten
from headwise.reduction.removal.change import Removal
from headwise.report.page.towers import towers
from tests.tiny import tiny


def test_every_block_is_shown_with_what_became_of_it():
    shape = shape_of(tiny("llama", num_hidden_layers=5))
    picture = towers(Plan.make(shape, [(), (Removal("block"),), (Flatten(1),), (), ()]))
    assert "5 blocks become 3" in picture
    assert "2 + 3 side by side" in picture and "1, dropped" in picture
    assert picture.count("<rect") == 5 + 3
    lines = [tuple(map(float, ends)) for ends in re.findall(r"M[\d.]+ ([\d.]+)L[\d.]+ ([\d.]+)", picture)]
    ends = [end for _, end in lines]
    assert len(lines) == 4 and ends[1] == ends[2]
    assert ends[0] > ends[1] > ends[3]  # the first block is at the bottom
    (height,) = (float(number) for number in re.findall(r'viewBox="0 0 560 ([\d.]+)"', picture))
    assert all(0 < y < height for line in lines for y in line)


def test_there_is_no_picture_where_every_block_stays_one():
    shape = shape_of(tiny("llama"))
    assert towers(Plan.make(shape, [(Removal("attention"),), (), ()])) == ""
