"""The page of a run as a reader has it in a browser: seen, clicked, with keys alone, on a telephone and on paper."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daskcnn.show.comparison import compare
from daskcnn.show.renderers.page import comparison_page, report_page
from tests.show.chromium import NAMES, Tab, chromium
from tests.show.html_page import report_of
from tests.show.test_page import EVALUATION

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(chromium() is None, reason=f"none of {', '.join(NAMES)} is installed")

CONTRAST = """
(() => {
  const parts = (text) => {
    const n = text.match(/[-\\d.e]+/g).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return {rgb: n.slice(0, 3).map((v) => v * scale), alpha: n.length > 3 ? n[3] : 1};
  };
  const light = ({rgb}) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour.alpha === 1) return colour;
    }
  };
  const poor = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !each.checkVisibility() || each.closest("script, title, desc")) continue;
    const style = getComputedStyle(each);
    const colour = each.closest("svg") ? style.fill : style.color;
    const found = ratio(parts(colour), behind(each));
    if (found < 4.5) poor.push([each.tagName, each.textContent.trim().slice(0, 30), colour, found]);
  }
  const root = getComputedStyle(document.documentElement);
  const paper = parts(root.backgroundColor);
  for (const part of document.querySelectorAll("path[class^=part-], figure svg g path")) {
    const style = getComputedStyle(part);
    const line = part.closest("figure") && !/fill: (?!none)/.test(part.getAttribute("style"));
    const paint = [line ? style.stroke : style.fill].find((one) => one.startsWith("rgb("));
    if (!paint || part.closest("g[style*=opacity]") || style.opacity < 1 || !part.checkVisibility()) continue;
    const found = ratio(parts(paint), paper);
    if (found > 1.05 && found < 3) poor.push([part.tagName, part.getAttribute("class"), paint, found]);
  }
  return poor;
})()
"""
"""Text with a contrast below 4.5 to what is behind it, and lines and areas below 3 to the paper (WCAG, AA)."""
SHOWN = (
    "[...document.querySelectorAll('[data-worker]')].filter((e) => e.checkVisibility()).map((e) => e.dataset.worker)"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "run.html").write_text(report_page(report_of("sgwu"), evaluation=EVALUATION), encoding="utf-8")
    with Tab(folder / "profile") as tab:
        tab.see()
        tab.open(folder / "run.html")
        yield tab


@pytest.fixture(autouse=True)
def _as_opened(tab: Tab) -> Iterator[None]:
    yield
    tab.see()
    tab.press("Escape", 27)


def shown(tab: Tab) -> set[str]:
    """Workers of which something is to be seen."""
    return set(tab.run(SHOWN))


def test_it_loads_without_an_error_and_without_a_request(tab: Tab) -> None:
    asked = [each["request"]["url"] for each in tab.told("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [tab.run("location.href")]
    assert tab.told("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []


def test_a_reader_sees_the_tables_the_figures_and_the_timeline(tab: Tab) -> None:
    text = tab.run("document.body.innerText")
    for words in ("Timeline", "Accuracy by time", "Where the time of each worker went", "Confusion matrix"):
        assert words in text
    assert "sgwu + idpa" in text
    sizes = tab.run(
        "[...document.querySelectorAll('figure svg, .lane svg')].map((e) => e.getBoundingClientRect().width)"
    )
    assert sizes
    assert min(sizes) > 200


@pytest.mark.parametrize(
    "selector",
    [
        '.picks button[data-pick="cpu-1"]',
        '.lane[data-worker="cpu-1"] svg',
        '.lane[data-worker="cpu-1"] button',
        '#table-workers tr[data-worker="cpu-1"] td',
    ],
)
def test_a_click_on_a_worker_shows_it_alone_and_a_second_one_all(tab: Tab, selector: str) -> None:
    everyone = shown(tab)
    assert everyone == {"cpu-0", "cpu-1", "cpu-2"}
    tab.click(selector)
    assert shown(tab) == {"cpu-1"}
    assert tab.run("document.getElementById('said').textContent") == "Only cpu-1 is shown."
    pressed = "[...document.querySelectorAll('button[aria-pressed=true]')].map((e) => e.dataset.pick)"
    assert set(tab.run(pressed)) == {"cpu-1"}
    tab.click(selector)
    assert shown(tab) == everyone


def test_with_keys_alone_a_worker_is_chosen_and_the_focus_is_seen(tab: Tab) -> None:
    tab.run("document.querySelector('.picks button').focus()")
    tab.press("Tab", 9)
    outline = (
        "(() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]; })()"
    )
    assert tab.run(outline) == ["solid", "3px"]
    tab.press("Enter", 13, "\r")
    assert len(shown(tab)) == 1
    tab.press("Escape", 27)
    assert len(shown(tab)) == 3


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_is_enough_in_both_themes(tab: Tab, dark: bool) -> None:
    tab.see(dark=dark)
    assert tab.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    red = int(tab.run("getComputedStyle(document.documentElement).backgroundColor").split("(")[1].split(",")[0])
    assert (red < 64) is dark
    assert tab.run(CONTRAST) == []
    tab.click('.picks button[data-pick="cpu-1"]')
    assert tab.run(CONTRAST) == []


def test_on_a_telephone_nothing_is_wider_than_the_screen(tab: Tab) -> None:
    tab.see(width=360)
    assert tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    letters = tab.run(
        "Math.min(...[...document.querySelectorAll('figure text')].map((e) => e.getBoundingClientRect().height))"
    )
    assert letters >= 9


def test_on_paper_it_is_light_whatever_the_theme_and_has_no_buttons_to_choose_with(tab: Tab) -> None:
    tab.see(dark=True, media="print")
    assert tab.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.run("document.querySelector('.picks').checkVisibility()")
    printed: dict[str, Any] = tab.call("Page.printToPDF", printBackground=True)
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", ["report", "comparison"])
def test_axe_finds_nothing_to_mend(tab: Tab, tmp_path: Path, page: str, dark: bool) -> None:
    """Labels, roles, headings, contrast where axe can tell it, and some ninety rules more of axe-core."""
    axe = Path(pytest.importorskip("axe_core_python").__file__).with_name("axe.min.js")
    reports = {rule: report_of(rule) for rule in ("sgwu", "agwu")}
    html = report_page(reports["sgwu"], evaluation=EVALUATION)
    if page == "comparison":
        html = comparison_page(compare(list(reports.values())), reports)
    shown = tmp_path / "page.html"
    shown.write_text(html, encoding="utf-8")
    tab.see(dark=dark)
    came_from = tab.run("location.pathname")
    try:
        tab.open(shown)
        tab.run(f"{axe.read_text(encoding='utf-8')}; 0")
        found = tab.run(
            "axe.run().then(({passes, violations}) => ({passed: passes.map((rule) => rule.id),"
            "failed: violations.map((rule) => [rule.id, rule.help, ...rule.nodes.map((node) => node.html)])}))"
        )
    finally:
        tab.open(Path(came_from))
    assert found["failed"] == []
    assert {"button-name", "document-title", "heading-order", "html-has-lang", "svg-img-alt"} <= set(found["passed"])


def test_everything_that_can_be_clicked_or_scrolled_has_a_name(tab: Tab, tmp_path: Path) -> None:
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "region", "img", "table", "heading", "columnheader", "rowheader", "image"}
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
    found = [(role, name) for role, name in roles if role in named]
    assert {"button", "table", "heading"} <= {role for role, _ in found}
    assert [role for role, name in found if not name.strip() and role not in ("rowheader", "columnheader")] == []
