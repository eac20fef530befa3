"""Tools are handed events in batches; what goes wrong with one is a warning, or is refused before anything starts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from daskcnn.errors import JobError, installing
from daskcnn.events import EpochEnded, Event, RunStarted, Warned
from daskcnn.followers import Feeds, FollowedRun, check_tools, feeds, tool
from daskcnn.followers.feeds import TOOLS, Feed
from daskcnn.followers.tool import Curves, Tool
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import train_job
from daskcnn.show.lines import describe
from tests.followers.runs_followed import events
from tests.show.run_events import epoch

RUN = Mock(spec=FollowedRun)
BEGUN = RunStarted(run="here", strategy="sgwu")


class Kept(Tool):
    """Keeps what it is told."""

    key, extra, package = "kept", "none", ""
    made: list[Kept]
    fails_at = ""

    def __init__(self, run: FollowedRun) -> None:
        self.batches: list[list[Event]] = []
        self.calls: list[str] = []
        self.made.append(self)
        self._call("begin")

    def write(self, events: Sequence[Event]) -> None:
        self.batches.append(list(events))
        self._call("write")

    def finish(self) -> None:
        self._call("finish")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise OSError(28, "No space left on device")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    return type("KeptHere", (Kept,), {"made": []})


def warnings_of(feed: Feed, *told: Event) -> list[Warned]:
    """What a feed warns of in a run of these events."""
    warned: list[Any] = []
    feed.start(RUN, warned.append)
    for event in told:
        feed.put(event)
    feed.close()
    return warned


def test_events_before_the_start_and_after_come_in_order_and_together(kept: type[Kept]) -> None:
    feed = Feed(kept, every=60.0)
    feed.put(BEGUN)
    later = [EpochEnded(epoch=float(i), step=i) for i in range(5)]
    assert not warnings_of(feed, *later)
    (one,) = kept.made
    assert one.batches == [[BEGUN, *later]]
    assert one.calls == ["begin", "write", "finish", "close"]


@pytest.mark.parametrize("where", ["begin", "write", "finish"])
def test_a_tool_that_fails_is_one_warning(kept: type[Kept], where: str) -> None:
    kept.fails_at = where
    (warned,) = warnings_of(Feed(kept), BEGUN)
    assert (warned.value, "No space left on device" in warned.reason) == ("run.kept", True)
    assert kept.made[0].calls[-1] == ("begin" if where == "begin" else "close")


def test_a_tool_that_failed_is_told_no_more(kept: type[Kept]) -> None:
    kept.fails_at, warned = "write", threading.Event()
    feed = Feed(kept, every=0.001)
    feed.start(RUN, lambda _: warned.set())
    feed.put(BEGUN)
    assert warned.wait(30)
    feed.put(BEGUN)
    feed.close()
    assert kept.made[0].calls == ["begin", "write", "close"]


def test_a_tool_that_hangs_is_left_behind(kept: type[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()
    monkeypatch.setattr(kept, "finish", lambda self: going_on.wait(30))
    feed = Feed(kept, last=0.01)
    (warned,) = warnings_of(feed, BEGUN)
    assert "not finished" in warned.reason
    going_on.set()


def test_only_the_tools_of_the_job_are_fed() -> None:
    assert not feeds.named_tools(resolve({}))
    job = resolve({"run": {key: "sqlite:///x" if key == "mlflow" else True for key in TOOLS}})
    assert list(feeds.named_tools(job)) == list(TOOLS)
    Feeds(resolve({})).handle(BEGUN)


def test_what_is_missing_is_refused_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    job = resolve({"run": {"tensorboard": True, "mlflow": "http://127.0.0.1:9"}})
    with pytest.raises(JobError) as caught:
        check_tools(job)
    assert len(caught.value.problems) == 2
    for extra, problem in zip(("tensorboard", "mlflow"), caught.value.problems, strict=True):
        assert installing(extra) in problem


def test_nothing_starts_where_a_tool_is_missing(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    tables = {"data": {"path": path}, "run": {"dir": str(tmp_path / "runs"), "tensorboard": True}}
    with pytest.raises(JobError, match=r"run\.tensorboard: needs the package tensorboardX"):
        train_job(resolve(tables))
    assert not (tmp_path / "runs").exists()


def test_metrics_of_the_job_are_curves_and_part_of_the_epochs_line() -> None:
    judged = {"loss": 1.0, "accuracy": 0.5, "metrics": {"top3": 0.75, "odd": None}}
    (event,) = events(epoch(validation=judged))
    found = {point.curve: point.value for point in Curves().points(event)}
    assert found["validation/top3"] == 0.75
    assert "validation/odd" not in found
    assert "validation 50.0 % (loss 1.000, top3 0.75, odd -)" in " ".join(describe(event))
