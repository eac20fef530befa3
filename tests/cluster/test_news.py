"""What workers tell while they are calibrated, and how the driver hears it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.arrays import Device
from daskcnn.cluster.link import news
from daskcnn.cluster.link.leaving import NOT_RETIRED, RETIRING
from daskcnn.cluster.link.news import EVERY, News, Teller
from daskcnn.conv import ConvSpec
from daskcnn.conv.tuner import tune
from daskcnn.events import Calibrating
from tests.fake_client import fake_client


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What this process's worker has told, in the order in which it did; a second passes between two looks."""
    found: list[tuple[str, dict[str, Any]]] = []
    worker = SimpleNamespace(address="tcp://a:1", log_event=lambda topic, said: found.append((topic, said)))
    monkeypatch.setattr(news, "get_worker", lambda: worker)
    ticks = count(0.0, EVERY)
    monkeypatch.setattr(news, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    return found


def as_sent(said: dict[str, Any]) -> dict[str, Any]:
    """The message as the scheduler passes it on."""
    return said | {"worker": "tcp://a:1"}


def test_the_driver_hears_what_a_worker_of_the_run_tells(told: list[tuple[str, dict[str, Any]]]) -> None:
    heard = News()
    with fake_client({}) as client:
        heard.subscribe(client, "run-1")
    teller = Teller("run-1")
    teller.tell("a convolution", 1, 3)
    teller.tell("a step of training")
    for topic, said in told:
        client._event_handlers[topic]((0.0, as_sent(said)))
    assert heard.taken({"tcp://a:1": "desk-1"}) == [
        Calibrating(worker="desk-1", doing="a convolution", done=1, of=3),
        Calibrating(worker="desk-1", doing="a step of training", done=0, of=0),
    ]
    assert heard.taken({"tcp://a:1": "desk-1"}) == [], "each is told once"


def test_all_runs_of_a_client_hear_of_workers_that_are_retired_until_they_end() -> None:
    """Nothing of a run that has ended is kept: a client may outlive many."""
    with fake_client({}) as client:
        one, other, woken = News(), News(), list[str]()
        one.subscribe(client, "one", lambda: woken.append("one"))
        other.subscribe(client, "other", lambda: woken.append("other"))
        client._event_handlers[RETIRING]((0.0, {"workers": ["tcp://a:1"]}))
        assert (one.retiring(), other.retiring(), sorted(woken)) == (["tcp://a:1"], ["tcp://a:1"], ["one", "other"])
        one.unsubscribe(client, "one")
        client._event_handlers[NOT_RETIRED]((0.0, {"workers": ["tcp://b:1"]}))
        assert (one.not_retired(), other.not_retired()) == ([], ["tcp://b:1"])
        other.unsubscribe(client, "other")
        assert client._event_handlers == {}


def test_who_is_not_of_the_run_is_not_heard(told: list[tuple[str, dict[str, Any]]]) -> None:
    heard = News()
    Teller("run-1").tell("a convolution", 1, 3)
    heard.heard((0.0, as_sent(told[0][1])))
    assert heard.taken({"tcp://b:1": "desk-2"}) == []


def test_what_is_over_in_a_moment_is_not_told(
    told: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0.0, EVERY / 4)
    monkeypatch.setattr(news, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    teller = Teller("run-1")
    for number in range(9):
        teller.tell("a convolution", number, 9)
    assert [said["done"] for _, said in told] == [3, 7]


def test_where_there_is_no_worker_nothing_is_told() -> None:
    teller = Teller("run-1")
    teller._told -= 2 * EVERY
    teller.tell("a convolution", 1, 3)


def test_the_tuner_says_which_problem_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those for which no time is left."""
    small, large = ConvSpec(1, 6, 6, 1, 1, 3, 3), ConvSpec(2, 6, 6, 1, 2, 3, 3)
    begun: list[tuple[int, int, ConvSpec]] = []
    monkeypatch.setattr("daskcnn.conv.tuner.believed", lambda: True)
    tune([large, small], Device(), clock=lambda: 0.0, seconds=0.0, anew=True, begun=lambda *said: begun.append(said))
    assert begun == [(0, 2, small), (1, 2, large)]
