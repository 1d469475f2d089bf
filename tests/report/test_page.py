"""The page in a real browser: it loads offline without a complaint, and does what a person asks of it."""

import json
import os
import random
import re
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest

from headwise.records.budget import Budget
from headwise.records.cost import cost_of
from headwise.records.profile import QUANTITIES, SHARED, Profile
from headwise.reduction.plans import plan_for, slider
from headwise.report.page import render, write_page
from headwise.report.summary import sentence
from tests.calls import inspect
from tests.commands import headwise
from tests.tiny import tiny
from tests.tokens import save_tokenizer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="no Chromium here: apt-get install chromium"
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    tiny("llama", head_dim=32, num_hidden_layers=5, num_attention_heads=8).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    inspect(str(folder / "model"), folder / "run", tokens=256, lengths=(16, 32, 64))
    return folder / "run"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, profile):
    context = browser.new_context(viewport={"width": 1180, "height": 900})
    opened = context.new_page()
    complaints, requests = [], []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto((profile / "report.html").as_uri())
    yield opened
    assert complaints == []
    assert requests == [(profile / "report.html").as_uri()]
    context.close()


@needs_browser
def test_it_says_what_was_measured(page, profile):
    assert page.inner_text("h1") == "model"
    assert page.inner_text(".lead") == sentence(Profile.load(profile / "profile.json"))
    assert page.locator("#map rect[data-head]").count() == 40


@needs_browser
def test_the_slider_plans_as_the_planner_does(page, profile):
    measured = Profile.load(profile / "profile.json")
    before = page.inner_text("#loss")
    page.locator("#rounded").uncheck()
    for keep in (100, 90, 62.5, 40, 20):
        page.locator("#keep").fill(str(keep))
        plan = plan_for(measured, Budget("keep_kv", keep / 100))
        for kind in ("qk", "v"):
            bars = page.locator(f"#widths [data-kind={kind}]").all()
            shown = [(int(bar.get_attribute("data-groups")), int(bar.get_attribute("data-width"))) for bar in bars]
            assert shown == [(layer.kv_heads, getattr(layer, f"{kind}_dim")) for layer in plan.after(measured.shape)]
        predicted = float(page.inner_text("#loss").split()[0])
        assert predicted == pytest.approx(plan.predicted["loss_increase"], rel=0.02, abs=1e-9)
        assert f"--keep-kv {keep / 100:g} --cache none " in page.inner_text("#command")
    assert page.inner_text("#loss") != before
    # 5 layers x 2 key/value heads x (32 + 32) x 2 bytes at 128 tokens
    page.locator("#keep").fill("100")
    assert page.inner_text("#bytes") == "160 KiB of 160 KiB"


@needs_browser
def test_the_slider_over_rounded_caches_plans_as_the_planner_does(page, profile):
    measured = Profile.load(profile / "profile.json")
    for keep in (50, 40, 30):
        page.locator("#keep").fill(str(keep))
        plan = plan_for(measured, Budget("keep_kv", keep / 100, 128), cache="mixed")
        predicted = float(page.inner_text("#loss").split()[0])
        assert predicted == pytest.approx(plan.predicted["loss_increase"], rel=0.02, abs=1e-9)
        shown = page.locator("#widths [data-kind=qk] title").all_text_contents()
        assert all(phrase in title for phrase, title in zip(plan.describe(), shown, strict=True))
        assert "--cache" not in page.inner_text("#command")
        kept = float(page.inner_text("#bytes").split()[0]) * 1024
        assert kept == pytest.approx(cost_of(measured.shape.planned(plan), 128).kv_bytes, rel=0.01)


@needs_browser
def test_the_slider_by_keyboard(page):
    page.focus("#keep")
    before = page.input_value("#keep")
    page.keyboard.press("ArrowLeft")
    assert float(page.input_value("#keep")) == float(before) - 2.5


@needs_browser
def test_removed_heads_and_attention_are_shown(browser, profile, tmp_path):
    measured = Profile.load(profile / "profile.json")
    layers = []
    for index, layer in enumerate(measured.layers):
        values = {name: json.loads(json.dumps(value)) for name, value in layer.values.items() if name not in SHARED}
        for group in {0: [1], 1: [0, 1]}.get(index, []):
            values["head_damage"][4 * group : 4 * group + 4] = [0.0] * 4
            values["v_unit_damage"][group] = [0.0] * 32
        layers.append(replace(layer, values=values))
    pressed = replace(measured, layers=tuple(layers))
    write_page(pressed, tmp_path / "page.html", slider(pressed))
    opened = browser.new_page()
    opened.goto((tmp_path / "page.html").as_uri())
    opened.locator("#rounded").uncheck()
    opened.locator("#keep").fill("65")
    titles = opened.locator("#widths [data-kind=qk] title").all_text_contents()
    assert ", 1/2 groups (heads 8 > 4, kv heads 2 > 1" in titles[0] and titles[1] == "layer 1: no attention"
    wide = [float(bar.get_attribute("width")) for bar in opened.locator("#widths [data-kind=qk]").all()]
    assert wide[0] == pytest.approx(wide[2] / 2) and wide[1] == 0
    opened.close()


@needs_browser
def test_windows_have_a_table_for_each_context(browser, tmp_path):
    tiny("gemma3_text", max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    inspect(str(tmp_path / "model"), tmp_path / "run", tokens=64, lengths=(16, 32))
    measured = Profile.load(tmp_path / "run" / "profile.json")
    tables = slider(measured)
    assert tables["contexts"] == [1024, 2048, 4096] and len(tables["tables"]) == 3
    opened = browser.new_page()
    opened.goto((tmp_path / "run" / "report.html").as_uri())
    for context in ("1024", "4096"):
        opened.select_option("#context", context)
        opened.locator("#keep").fill("100")
        assert f"--keep-kv 1 --cache-tokens {context}" in opened.inner_text("#command")
        plan = plan_for(measured, Budget("keep_kv", 1.0, int(context)))
        kept = cost_of(measured.shape.planned(plan), int(context)).kv_bytes
        shown, unit = opened.inner_text("#bytes").split()[:2]
        assert unit == "KiB" and float(shown) == pytest.approx(kept / 1024, rel=1e-3)
    program, *command = shlex.split(opened.inner_text("#command"))
    done = headwise(*command, cwd=tmp_path / "run")
    assert program == "headwise" and done.returncode == 0 and "is called" not in done.stderr, done.stderr
    opened.close()


@needs_browser
def test_heads_are_chosen_by_mouse_and_keyboard(page):
    page.locator('#map rect[data-layer="3"][data-head="2"]').click()
    assert page.inner_text("#head-title").startswith("Layer 3, head 2 (key/value head 0)")
    spectrum = page.locator("#qk polyline").last.get_attribute("points")
    page.focus("#map")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text("#head-title").startswith("Layer 4, head 4 (key/value head 1)")
    assert page.locator("#qk polyline").last.get_attribute("points") != spectrum


@needs_browser
def test_every_quantity_can_be_shown(page):
    options = page.locator("#quantity option").all()
    assert len(options) > 15
    for option in options:
        name = option.get_attribute("value")
        page.select_option("#quantity", name)
        assert page.inner_text("#definition") == QUANTITIES[name].text
        for place in range(page.locator("#place option").count()):
            page.select_option("#place", index=place)
            assert re.search(r": -?\d", page.inner_text("#where"))


@needs_browser
def test_light_dark_and_a_screenshot(page, tmp_path):
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 50_000
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@needs_browser
def test_latent_attention_has_a_slider_over_its_rounded_cache(browser, tmp_path):
    tiny("deepseek_v3").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    inspect(str(tmp_path / "model"), tmp_path / "run", tokens=64, lengths=(16, 32))
    opened = browser.new_page()
    complaints = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto((tmp_path / "run" / "report.html").as_uri())
    assert complaints == [] and not opened.is_visible("#rounded")
    assert opened.inner_text("#command") == "headwise plan profile.json --keep-kv 0.25 -o plan.json"
    latents = opened.query_selector_all("#widths [data-kind=v]")
    assert {bar.get_attribute("data-width") for bar in latents} == {"10"}  # of the latent, not of values
    opened.close()


@needs_browser
@pytest.mark.parametrize("name", ["bert", "whisper", "gemma3_text", "one layer"])
def test_other_models_load_without_a_complaint(name, browser, tmp_path):
    model = tiny("llama", num_hidden_layers=1) if name == "one layer" else tiny(name)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    given = {"tokens": 64, "lengths": (16, 32)}
    if name == "whisper":
        np.savez(tmp_path / "sound.npz", input_features=np.random.default_rng(0).random((3, 8, 40), dtype=np.float32))
        given = {"inputs": tmp_path / "sound.npz", "tokens": 60}
    inspect(str(tmp_path / "model"), tmp_path / "run", **given)
    opened = browser.new_page()
    complaints = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto((tmp_path / "run" / "report.html").as_uri())
    option = "--keep-attention-params" if name == "bert" else "--keep-kv"
    assert option in opened.inner_text("#command") and complaints == []
    assert "NaN" not in opened.content().split('<script type="application/json"')[0]
    opened.close()


def test_a_name_cannot_break_out_of_the_page(profile):
    measured = Profile.load(profile / "profile.json")
    nasty = "x</script><script>alert(1)</script>"
    renamed = replace(measured, model={**measured.model, "source": nasty}, text={**measured.text, "name": nasty})
    text = render(renamed, slider(renamed))
    assert "<script>alert(1)" not in text


def test_a_large_model_fits_into_three_megabytes(profile, tmp_path):
    """32 layers of 32 heads of 128, with numbers that do not compress."""
    measured = Profile.load(profile / "profile.json")
    sizes = {"head": 32, "group": 8, "value": 128, "share": 3, "length": 5, "tolerance": 3, "width": 3, "pair": 64}
    sizes |= {"unit": 128, "dim": 129, "kind": 3, "coordinate": 128, "value group": 4, "value coordinate": 256}
    sizes |= {"cached head": 8, "joint coordinate": 512, "size": 1, "shared unit": 512, "shared value": 1024}
    sizes |= {"sixty-fourth": 65, "part": 2, "candidate": 5, "pair coordinate": 512}

    def fill(axes):
        return [fill(axes[1:]) for _ in range(sizes[axes[0]])] if axes else round(random.random(), 5)

    values = {name: fill(quantity.axes) for name, quantity in QUANTITIES.items()}
    layer = replace(
        measured.layers[0], lengths=(64, 128, 256, 512, 1024), widths=(32, 64, 96), v_widths=(32, 64, 96), values=values
    )
    shape = replace(measured.shape.layers[0], heads=32, kv_heads=8, qk_dim=128, v_dim=128, rotary=128)
    large = replace(measured, layers=(layer,) * 32, shape=replace(measured.shape, layers=(shape,) * 32))
    write_page(large, tmp_path / "page.html", slider(large))
    assert (tmp_path / "page.html").stat().st_size < 3_000_000
