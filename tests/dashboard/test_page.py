"""The page on a real scheduler: served beside Dask's own pages, filled by a run, read in a browser."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from daskcnn.batch.desk import ServiceEnd
from daskcnn.cluster.link.calls import ask_scheduler
from daskcnn.cluster.link.leases import holding
from daskcnn.cluster.link.members import present
from daskcnn.dashboard.feed import LiveFeed, fed
from daskcnn.dashboard.live_run import LiveRun, Message
from daskcnn.dashboard.site import NAME, _not_closed_early
from daskcnn.events import RunStarted
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import Silent, train_job
from daskcnn.show.queue_table import QUEUE_COLUMNS
from tests.show.chromium import NAMES, Tab, chromium
from tests.tiny_runs import tiny_data, tiny_job

pytest.importorskip("bokeh")
# what Bokeh and its client do while they are imported and closed is not ours
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": "127.0.0.1:0", "resources": {"CPU": 1}}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, silence_logs="ERROR", **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def said(client: Client, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two runs of a job said: one of `layer`, and the latest under an asynchronous rule."""
    folder, said = tmp_path_factory.mktemp("runs"), list[str]()
    path = tiny_data(folder)
    for strategy in ("layer", "agwu"):
        train = {"strategy": strategy, "epochs": 3, "batch_size": 20}
        run = {"dir": str(folder / "runs"), "name": strategy, "report_every": 1}
        tables = tiny_job(path, train=train, cluster={"settle": 0.0}, run=run)
        train_job(resolve(tables), client=client, say=said.append)
    return said


def url(client: Client, page: str = NAME) -> str:
    """Where the page is; a cluster in this process is linked to by an address that it does not listen at."""
    return f"http://127.0.0.1:{client.scheduler_info()['services']['dashboard']}/{page}"


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def test_the_page_is_served_and_stands_in_the_navigation_bar_of_all(client: Client, said: list[str]) -> None:
    assert f"page of this run: {client.dashboard_link.removesuffix('status')}{NAME}" in said
    for page in ("status", "workers", NAME):
        assert fetched(url(client, page)).count(f'<a href="{NAME}">') == 1, "one entry, however many runs"


def test_a_session_has_the_figures_of_the_latest_run(client: Client, said: list[str]) -> None:
    from bokeh.client import pull_session

    session = pull_session(url=url(client))
    try:
        found: Any = session.document
        choice, heading = found.select_one({"name": "run"}), found.select_one({"name": "heading"})
        assert [label for _, label in choice.options] == ["agwu", "layer"]
        assert heading.text.startswith("agwu + idpa")
        assert "done: epoch 3 of 3" in heading.text
        for curves in ("accuracy-curves", "loss-curves"):
            assert "validation" in found.select_one({"name": curves}).data["name"]
        assert "compute" in found.select_one({"name": "lanes"}).data["name"]
        assert "end: done" in found.select_one({"name": "events"}).data["event"]
        assert "conv1" in found.select_one({"name": "layers"}).data["layer"]
        assert len(found.select_one({"name": "network"}).data["row"]) == 0
    finally:
        session.close()


def test_a_session_says_which_run_has_which_worker(client: Client, said: list[str]) -> None:
    from bokeh.client import pull_session

    first = min(present(client).items(), key=lambda item: str(item[1]["name"]))[0]
    with holding(client, "2026-bsp") as hold:
        assert hold.take([first])
        session = pull_session(url=url(client))
    try:
        found = session.document.select_one({"name": "workers"}).data
        assert list(found["worker"]) == ["0", "1"]
        assert found["run"][0].startswith("2026-bsp (")
        assert found["run"][1] == "free"
    finally:
        session.close()


def test_a_session_shows_the_queue_where_there_is_a_service(client: Client, said: list[str]) -> None:
    from bokeh.client import pull_session

    row = ["1", "ann", "first", "queued", "1", "-", "-", "2 cpu", "waits for 2 cpu workers"]

    def shown() -> Any:
        session = pull_session(url=url(client))
        try:
            return session.document.select_one({"name": "queue"}).data
        finally:
            session.close()

    assert list(shown()["id"]) == []
    service = ServiceEnd(client)
    assert service.attend("me") == ""
    service.show_page()
    service.exchange({}, [row], 0.0)
    found = shown()
    assert [list(found[name]) for name in QUEUE_COLUMNS] == [[cell] for cell in row]


def test_curves_that_lie_on_one_another_can_be_told_apart(client: Client, said: list[str]) -> None:
    """As those of traffic do: what goes up comes down."""
    from bokeh.client import pull_session
    from bokeh.models.renderers import GlyphRenderer

    session = pull_session(url=url(client))
    try:
        found: Any = session.document.select_one({"name": "loss-curves"})
        assert len({*found.data["dash"]}) == len(found.data["name"]) > 1
        (lines,) = [
            each.glyph for each in session.document.select({"type": GlyphRenderer}) if each.data_source is found
        ]
        assert lines.line_dash.field == "dash"
    finally:
        session.close()


@pytest.mark.skipif(chromium() is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_a_reader_sees_the_run_without_an_error(client: Client, said: list[str], tmp_path: Path) -> None:
    with Tab(tmp_path / "profile") as tab:
        tab.see()
        tab.call("Page.navigate", url=url(client))
        deadline, text = time.monotonic() + 60, ""
        while "end: done" not in text and time.monotonic() < deadline:
            text = tab.run(TEXT)
        for words in ("agwu + idpa", "done: epoch 3 of 3", "conv1", "end: done", "Daskcnn"):
            assert words in text
        tab.run(CHOOSE_THE_SECOND)
        while "layer, 5 layers" not in text and time.monotonic() < deadline:
            text = tab.run(TEXT)
        assert "layer, 5 layers" in text
        assert tab.told("Runtime.exceptionThrown") == []
        spoken = tab.told("Runtime.consoleAPICalled")
        assert [each for each in spoken if each["type"] in ("error", "assert")] == []
        logged = [each["entry"] for each in tab.told("Log.entryAdded")]
        assert [entry for entry in logged if entry["level"] == "error"] == []
        tab.call("Emulation.setDeviceMetricsOverride", width=390, height=2500, deviceScaleFactor=1, mobile=True)
        while min(widths := tab.run(WIDTHS), default=0) < 300 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert min(widths) >= 300, "on a phone figures lie below each other"


def test_a_reader_who_goes_early_is_no_error() -> None:
    def record(error: Exception, path: str) -> logging.LogRecord:
        text, about = "Uncaught exception %s", (type(error), error, None)
        return logging.LogRecord("tornado.application", logging.ERROR, "", 0, text, (f"GET {path}",), about)

    early = record(AssertionError(), "/daskcnn/ws")
    others = record(AssertionError(), "/status/ws"), record(ValueError(), "/daskcnn/ws")
    assert [_not_closed_early(each) for each in (early, *others)] == [False, True, True]


ALL = """
  const all = (root) => [...root.querySelectorAll("*")].flatMap((e) => e.shadowRoot ? [e, ...all(e.shadowRoot)] : [e]);
"""
"""Finds the elements in the shadow trees of Bokeh's widgets too."""
WIDTHS = f"""
(() => {{ {ALL}
  const figures = all(document).filter((e) => e.classList.contains("bk-Figure"));
  return figures.map((e) => e.getBoundingClientRect().width).filter((width) => width > 0);
}})()
"""
"""Pixels of every figure that is shown."""
CHOOSE_THE_SECOND = f"""
(() => {{ {ALL}
  const select = all(document).find((e) => e.tagName === "SELECT");
  select.selectedIndex = 1;
  select.dispatchEvent(new Event("change"));
}})()
"""
TEXT = (
    f"(() => {{ {ALL}"
    """
  const own = (e) => [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join(" ");
  return all(document).filter((e) => !["SCRIPT", "STYLE"].includes(e.tagName)).map(own).filter(Boolean).join("\\n");
})()
"""
)
"""All that is written on a page."""


# --- where there is no page ---


def test_a_scheduler_without_a_dashboard_is_one_line_and_no_failure() -> None:
    said = list[str]()
    settings: dict[str, Any] = {"processes": False, "resources": {"CPU": 1}, "silence_logs": logging.ERROR}
    none = {"dashboard": False}  # without an address Dask takes one port for its other pages, which may be taken
    with (
        LocalCluster(1, threads_per_worker=1, dashboard_address=":0", scheduler_kwargs=none, **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        display = Silent()
        assert fed(display, client, (), said.append, wanted=True) is display
        assert fed(display, client, (), said.append, wanted=False) is display
    assert len(said) == 1
    assert "no page of this run (the scheduler was started without its dashboard)" in said[0]


def test_a_scheduler_that_refuses_is_one_line_and_no_failure(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("it runs no functions")

    monkeypatch.setattr("daskcnn.dashboard.feed.ask_scheduler", refuse)
    said, display = list[str](), Silent()
    assert fed(display, client, (), said.append, wanted=True) is display
    assert said == ["dashboard: no page of this run (ValueError: it runs no functions); training goes on"]


class Unsure(LiveFeed):
    """The scheduler takes what it sends first, but the driver hears nothing of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sent = 0

    def deliver(self, message: Message, within: float) -> None:
        super().deliver(message, within)
        self.sent += 1
        if self.sent == 1:
            raise TimeoutError


def test_what_was_not_answered_is_sent_again_and_taken_once(client: Client, said: list[str]) -> None:
    with Unsure(Silent(), client, ()) as feed:
        feed.handle(RunStarted(run="/runs/again", strategy="sgwu"))
        deadline = time.monotonic() + 20
        while feed.sent < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    run = next(run for run in ask_scheduler(client, _runs).values() if run.name == "again")
    assert run.version == 1
    assert feed.sent == 2


def _runs(dask_scheduler: Any) -> dict[str, LiveRun]:
    found: dict[str, LiveRun] = dask_scheduler.extensions[NAME].runs.runs
    return found
