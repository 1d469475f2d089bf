"""A comparison in the terminal and on its page."""

import re
from io import StringIO

from rich.console import Console

from headwise.report.comparisons import COLUMNS, print_comparison, rows
from headwise.report.page.compare import render_comparison, write_compare_page
from tests.records.test_comparison import comparison
from tests.report.test_page import browser, needs_browser  # noqa: F401 - a fixture


def test_every_shape_has_its_size_speed_and_two_losses():
    console = Console(width=110, record=True, file=StringIO())
    print_comparison(comparison(), console)
    shown = console.export_text()
    assert "1,100 (+10.0%, not equal)" in shown and "120 (1.20x)" in shown
    for title in ("equal parameters: ", "equal tokens: ", "equal wall-clock: "):
        assert f"{title}Against usual: lean" in shown
    assert max(map(len, shown.splitlines())) <= 110
    assert all(len(row) == len(COLUMNS) for row in rows(comparison()))


def test_the_page_is_whole_and_draws_every_trial():
    page = render_comparison(comparison())
    assert not re.search(r"%[A-Z]+%", page)
    assert page.count("<circle") == 18 and page.count("<polyline") == 3
    assert not re.search(r'(src|href)="(?!#|data:,)', page)
    assert render_comparison(comparison(seeds=1)).count("<circle") == 6


@needs_browser
def test_the_page_opens_without_a_complaint_in_light_and_dark(browser, tmp_path):  # noqa: F811
    write_compare_page(comparison(), tmp_path / "compare.html")
    opened = browser.new_context(viewport={"width": 380, "height": 800}, color_scheme="dark").new_page()
    complaints = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto((tmp_path / "compare.html").as_uri())
    colour = "getComputedStyle(document.querySelector('.curves polyline')).stroke"
    dark = opened.evaluate(colour)
    opened.click("#theme")
    assert opened.evaluate(colour) != dark != "none"
    assert not opened.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert complaints == []
    opened.context.close()
