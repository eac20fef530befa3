"""The page of a run: the report's tables and figures, escaped, in order, and without a request to anywhere."""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from daskcnn.errors import escaped
from daskcnn.show import report_sections
from daskcnn.show.comparison import compare
from daskcnn.show.renderers.page import CAPTIONS, MOST_ROWS, comparison_page, report_page, ticks
from daskcnn.show.report_sections import sections
from daskcnn.show.report_tables import RunReport
from daskcnn.show.run_figures import run_figures
from tests.show.html_page import LOGS, Element, parsed_page, report_of
from tests.show.run_events import calibration, epoch, round_of, start, tables

pytest.importorskip("matplotlib")

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"
EVALUATION: dict[str, Any] = {
    "checkpoint": "c",
    "data": "d.zarr",
    "samples": 30,
    "labels": "classes",
    "accuracy": 0.8,
    "loss": 0.5,
    "auc": 0.9,
    "auc_samples": 30,
    "top5": None,
    "classes": [
        {"class": name, "samples": 15, "precision": 0.8, "recall": 0.8, "auc": 0.9} for name in ("cat", HOSTILE)
    ],
    "confusion": [[12, 3], [4, 11]],
}


def page_of(report: RunReport, **options: Any) -> Element:
    return parsed_page(report_page(report, **options))


def table_texts(page: Element) -> list[list[list[str]]]:
    """The cells of every table."""
    return [[[cell.text for cell in row.all("th", "td")] for row in table.all("tr")] for table in page.all("table")]


@pytest.fixture(scope="module", params=LOGS)
def pair(request: pytest.FixtureRequest) -> tuple[RunReport, Element]:
    """The report of a real run, and its page."""
    report = report_of(request.param)
    return report, page_of(report)


def test_the_page_has_every_table_and_line_of_the_report(pair: tuple[RunReport, Element]) -> None:
    report, page = pair
    found = table_texts(page)
    for part in sections(report):
        if part.table:
            assert [list(part.table.head), *map(list, part.table.rows)] in found
        for label, value in part.facts:
            assert label in [each.text for each in page.all("dt")] or not label
            assert value in [each.text for each in page.all("dd")]


def test_the_page_has_every_figure_named_and_described(pair: tuple[RunReport, Element]) -> None:
    report, page = pair
    drawn = {figure.attributes["id"]: figure for figure in page.all("figure")}
    assert list(drawn) == [figure.name for figure in run_figures({"run": report})]
    for figure in run_figures({"run": report}):
        (svg,) = drawn[figure.name].all("svg")
        names = svg.attributes["aria-labelledby"].split()
        texts = {each.attributes.get("id"): each.text for each in svg.all("title", "desc")}
        assert texts[names[0]] == figure.title
        assert all(curve in texts[names[1]] for curve in figure.curves)
        letters = " ".join(each.text for each in svg.all("text"))
        assert figure.x in letters, "text stays text"


def test_the_page_asks_for_nothing_and_runs_one_script(pair: tuple[RunReport, Element]) -> None:
    _, page = pair
    for each in page.all():
        for name, value in each.attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                assert value.startswith(("#", "data:,")), f"{each.tag} {name}={value}"
            assert not name.startswith("on")
            assert not re.search(r"url\((?!#)", value)
    (style,), (script,) = page.all("style"), page.all("script")
    assert not re.search(r"url\(|@import|https?:", style.text)
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    (policy,) = [each.attributes["content"] for each in page.all("meta") if "http-equiv" in each.attributes]
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_headings_are_in_order_tables_are_labelled_and_ids_are_unique(pair: tuple[RunReport, Element]) -> None:
    _, page = pair
    levels = [int(each.tag[1]) for each in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table in page.all("table"):
        assert next(table.all("caption")).text.strip()
        heads = list(table.all("th"))
        assert heads
        assert all(each.attributes["scope"] in ("col", "row") for each in heads)
    ids = [each.attributes["id"] for each in page.all() if "id" in each.attributes]
    assert len(set(ids)) == len(ids)
    used = {name for each in page.all() for name in each.attributes.get("aria-labelledby", "").split()}
    used |= {found for each in page.all() for value in each.attributes.values() for found in _referred(value)}
    assert used <= set(ids)
    assert all(each.attributes.get("aria-label") or each.text.strip() for each in page.all("button"))


def _referred(value: str) -> list[str]:
    return re.findall(r"^#([\w-]+)$|url\(#([\w-]+)\)", value) and re.findall(r"#([\w-]+)", value)


def test_every_worker_has_a_lane_a_button_and_rows_of_its_own(pair: tuple[RunReport, Element]) -> None:
    report, page = pair
    for worker in (each.name for each in report.workers):
        marked = [each for each in page.all() if each.attributes.get("data-worker") == worker]
        assert {"div", "tr"} <= {each.tag for each in marked}
        assert any(each.attributes.get("data-pick") == worker for each in page.all("button"))


def test_what_comes_from_outside_is_text_and_nothing_else() -> None:
    note = {"event": "warning", "message": HOSTILE}
    judged = {"event": "end", "status": HOSTILE, "test": {"accuracy": 0.5}}
    started = start(run=HOSTILE, rule={HOSTILE: HOSTILE}, model=HOSTILE, dataset=HOSTILE, strategy="layer")
    shards = {"event": "shards", "home": HOSTILE, "kernels": {HOSTILE: {HOSTILE: 3}}}
    part = {"name": HOSTILE, "samples": 9, "busy": 1.0, "wait": 0.0, "bytes_up": 1, "bytes_down": 1}
    sharded = epoch(workers=[{**part, "conv_seconds": {HOSTILE: 0.5}}])
    log = [started, calibration(HOSTILE), shards, round_of(HOSTILE), sharded, note, judged]
    report = tables(log)
    page = page_of(report, evaluation=EVALUATION)
    assert len(list(page.all("script"))) == 1
    assert not list(page.all("img"))
    assert next(page.all("h1")).text == HOSTILE
    texts = [cell for table in table_texts(page) for row in table for cell in row]
    assert texts.count(HOSTILE) >= 5
    two = parsed_page(comparison_page(compare([report, report]), {HOSTILE: report, "_low": report}))
    assert HOSTILE in [each.text for each in two.all("th")]
    assert any("_low" in each.text for each in two.all("text")), "a name with a low line is in the legend"


def test_characters_that_a_page_cannot_hold_are_escaped() -> None:
    odd = "w\x00\x1b[2J‮\ud800"
    text = report_page(tables([start(run=odd), calibration(odd), round_of(odd)]))
    assert escaped(odd) in text
    text.encode("utf-8")
    parsed_page(text)


def test_the_classes_are_there_where_they_were_kept() -> None:
    report = report_of("sgwu")
    page = page_of(report, evaluation=EVALUATION)
    classes, matrix = table_texts(page)[:2]
    assert classes[1] == ["cat", "15", "80.0 %", "80.0 %", "0.9000"]
    assert matrix[1:] == [["0", "cat", "12", "3"], ["1", HOSTILE, "4", "11"]]
    shades = [each.attributes["style"] for each in list(page.all("table"))[1].all("td") if "style" in each.attributes]
    assert shades == ["--share:80%", "--share:20%", "--share:27%", "--share:73%"]
    assert "Classes" not in [each.text for each in page_of(report).all("h2")]


def test_long_tables_are_shortened_and_say_so_and_every_worker_stays_in_them() -> None:
    rounds = [round_of(f"w{i % 3}", round=i // 3) for i in range(900)]
    report = tables([start(), calibration("w0", "w1", "w2"), *rounds])
    (table,) = (each for each in page_of(report).all("table") if "Rounds" in next(each.all("caption")).text)
    rows = [row for row in table.all("tr") if "data-worker" in row.attributes]
    assert len(rows) == MOST_ROWS
    assert {row.attributes["data-worker"] for row in rows} == {"w0", "w1", "w2"}
    assert "of 900; --rounds shows all" in next(table.all("caption")).text
    (table,) = (each for each in page_of(report, full=True).all("table") if "Rounds" in next(each.all("caption")).text)
    assert len(list(table.all("tr"))) == 901


def test_runs_side_by_side_have_one_page_with_a_timeline_each() -> None:
    reports = {name: report_of(name) for name in ("sgwu", "udpa")}
    page = parsed_page(comparison_page(compare(list(reports.values()), targets=[0.5]), reports))
    comparison = compare(list(reports.values()), targets=[0.5])
    (table,) = table_texts(page)
    assert table[0] == ["figure", "sgwu", "udpa"]
    assert [row[0] for row in table[1:]] == [line.label for line in comparison.told()]
    assert all(
        cell.endswith("*")
        for row, line in zip(table[1:], comparison.told(), strict=True)
        for cell in _best(row, line.best)
    )
    assert [each.text for each in page.all("h3")][:2] == ["sgwu", "udpa"]
    scales = [each.text.split() for each in page.all("div") if each.attributes.get("class") == "scale"]
    assert scales[0] == scales[1], "runs beside each other have one scale"


def test_a_difference_keeps_its_letters() -> None:
    reports = {name: report_of(name) for name in ("sgwu", "udpa")}
    comparison = replace(compare(list(reports.values())), differences=("those of runs/Desk-A were slower",))
    assert "Those of runs/Desk-A were slower." in comparison_page(comparison, reports)


def _best(row: list[str], best: tuple[int, ...]) -> list[str]:
    return [row[1 + i] for i in best]


def test_every_table_that_a_report_may_have_has_a_caption() -> None:
    named = re.findall(r'Section\("(\w+)"[^\n]*table=', inspect.getsource(report_sections))
    assert {"choice", "workers"} <= {*named} <= CAPTIONS.keys()


def test_the_same_log_gives_the_same_bytes() -> None:
    assert report_page(report_of("agwu")) == report_page(report_of("agwu"))


def test_a_run_that_has_just_begun_has_a_page() -> None:
    page = page_of(tables([start()]))
    assert "no round has ended yet" in page.text
    assert not list(page.all("figure"))


@pytest.mark.parametrize("seconds", [1e-3, 0.7, 1.0, 59.0, 1e4, 3e9])
def test_ticks_are_round_and_within_the_run(seconds: float) -> None:
    found = [at for at, _ in ticks(seconds)]
    assert found[0] == 0
    assert found[-1] <= seconds * (1 + 1e-9)
    assert 2 <= len(found) <= 6


def test_ticks_are_told_in_the_unit_of_their_step() -> None:
    assert [told for _, told in ticks(77.0)] == ["0 s", "20 s", "40 s", "60 s"]
    assert [told for _, told in ticks(4000.0)] == ["0 min", "20 min", "40 min", "60 min"]
    assert [told for _, told in ticks(4 * 3600.0)] == ["0 h", "1 h", "2 h", "3 h", "4 h"]
