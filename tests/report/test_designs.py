"""Candidates in the terminal and on their page."""

import re
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from headwise.records.blueprint import Images, Text
from headwise.records.design import Request
from headwise.report.designs import COLUMNS, print_design, rows
from headwise.report.page.design import render_design, write_design_page
from headwise.steps.design import propose
from tests.report.test_page import browser, needs_browser  # noqa: F401 - a fixture

TEXT = propose(Request("llama", 3_000_000, Text(4096, 256, tied=True)))
IMAGES = propose(Request("vit", 3_000_000, Images(32, 4, 3, 10)))


LARGE = propose(Request("llama", 900_000_000_000, Text(128_000, 131_072, tied=True)))


@pytest.mark.parametrize("found", [TEXT, IMAGES, LARGE], ids=["llama", "vit", "large"])
def test_every_candidate_shows_its_layers_costs_and_reason_in_80_columns(found):
    console = Console(width=80, record=True, file=StringIO())
    print_design(found, console)
    shown = console.export_text()
    for candidate in found.candidates:
        assert f"{candidate.shape.total_parameters():,}" in shown
        assert candidate.why.split(":")[0] in shown
    assert f"recommended: {found.recommended}. {found.because.split()[0]}" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_evidence_is_a_column_with_its_figure():
    column = {row[0]: row[COLUMNS.index("evidence")] for each in TEXT.candidates for row in rows(each)[:1]}
    assert column["textbook"] == "measured: reference"
    assert column["lean-width"] == "measured: -0.103 nats"
    assert column["lean-head-dim"] == "measured: +0.476 nats"
    assert {column[name] for name in ("grouped", "deep-thin", "early-heads")} == {"formula only"}
    for said in ("measured: -0.103 nats", "formula only", "Measured in results/shapes.json"):
        assert said in render_design(TEXT)


@pytest.mark.parametrize("found", [TEXT, IMAGES], ids=["llama", "vit"])
def test_rows_cover_all_layers_once(found):
    for candidate in found.candidates:
        layers = []
        for row in rows(candidate):
            assert len(row) == len(COLUMNS)
            first, _, last = row[1].partition("-")
            layers += [row[2:5]] * (int(last or first) - int(first) + 1)
        assert layers == [
            [str(layer.heads), str(layer.kv_heads), str(layer.qk_dim)] for layer in candidate.shape.layers
        ]


class Counting(HTMLParser):
    """Open tags and what they fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.rects, self.fetched = [], {}, []

    def handle_starttag(self, tag, attrs):
        fields = dict(attrs)
        self.fetched += [value for name, value in attrs if name in {"src", "href"} and value not in {"data:,"}]
        if tag == "rect":
            self.rects[fields["class"]] = self.rects.get(fields["class"], 0) + 1
        if tag not in {"meta", "link", "rect", "path"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.parametrize("found", [TEXT, IMAGES], ids=["llama", "vit"])
def test_the_page_is_whole_and_draws_every_layer_and_share(found):
    page = render_design(found)
    assert not re.search(r"%[A-Z]+%", page)
    parser = Counting()
    parser.feed(page)
    assert parser.fetched == ["#candidates"]
    count = len(found.candidates)
    cached = count if found.request.family == "llama" else 0
    assert parser.rects["ends"] == parser.rects["rest"] == count
    layers = sum(len(candidate.plan.layers) for candidate in found.candidates)
    assert parser.rects["attention"] == layers + count + cached
    assert ("KV cache of one token" in page) is bool(cached)


@needs_browser
def test_the_page_opens_offline_without_a_complaint_and_switches_its_theme(browser, tmp_path):  # noqa: F811
    write_design_page(TEXT, tmp_path / "design.html")
    address = (tmp_path / "design.html").as_uri()
    opened = browser.new_context(viewport={"width": 1180, "height": 900}, color_scheme="dark").new_page()
    complaints, requests = [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(address)
    assert TEXT.recommended in opened.inner_text(".lead")
    assert opened.locator("tr.chosen th").first.inner_text() == TEXT.recommended
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"
    opened.click("#theme")
    assert opened.evaluate("document.documentElement.dataset.theme") == "light"
    wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    for width in (1180, 380):
        opened.set_viewport_size({"width": width, "height": 800})
        assert not opened.evaluate(wider)
    assert (complaints, requests) == ([], [address])
    opened.context.close()
