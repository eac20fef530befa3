"""What a worker pushes and pulls within a round, while it trains on: nothing is lost and nothing counted twice."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import NUMPY
from daskcnn.cluster.session.tasks import Exchanges, Session
from daskcnn.nn.score import Score
from daskcnn.ps import RULES, Event, Join, Local, ParameterServer, Reply
from daskcnn.training.replica import Trained


class SlowLink:
    """A server that answers on the caller's thread once it is let."""

    def __init__(self, server: ParameterServer) -> None:
        self.server, self.answers = server, threading.Semaphore(0)
        self.bytes_up = self.bytes_down = 0
        self.threads: set[str] = set()

    def call(self, event: Event) -> Reply:
        self.answers.acquire()
        self.threads.add(threading.current_thread().name)
        (reply,) = self.server.handle(event)
        assert isinstance(reply, Reply)
        return reply


def session_of(strategy: str, rule: dict[str, Any], weights: np.ndarray, *, overlap: bool) -> Session:
    """A session around bare weights."""
    job = SimpleNamespace(
        train=SimpleNamespace(strategy=strategy),
        rule=RULES[strategy].model_validate(rule),
        cluster=SimpleNamespace(overlap=overlap, wire="float32"),
    )
    replica: Any = SimpleNamespace(
        job=job, weights=weights, device=SimpleNamespace(backend=NUMPY), layout=SimpleNamespace(dtype=weights.dtype)
    )
    return Session(replica)


def exchanges_of(strategy: str, rule: dict[str, Any], *, overlap: bool = True) -> tuple[Exchanges, SlowLink]:
    """The exchanges of a round of a worker that has just joined a server whose center is 0."""
    server = ParameterServer(RULES[strategy].model_validate(rule), np.zeros(3))
    (reply,) = server.handle(Join(0, "a", 1))
    assert isinstance(reply, Reply)
    session = session_of(strategy, rule, np.zeros(3), overlap=overlap)
    session.local = Local(session.replica.weights, session.replica.weights)
    link: Any = SlowLink(server)
    order: Any = SimpleNamespace(epoch=0, worker="a", session=1, score=None)
    exchanges = Exchanges(order, session, link)
    exchanges.rule.begin(session.local, reply.weights, reply.version)
    return exchanges, link


def trained(samples: int) -> Trained:
    return Trained(Score(1.0, samples, samples), 0.1, 0.0, 0.0)


def step(exchanges: Exchanges, number: int, last: bool = False) -> None:
    """One step that adds 1 to every weight."""
    exchanges.local.weights += 1.0
    exchanges.after_step(trained(10 * number), last)


@pytest.mark.parametrize(
    "rule", [{"n_push": 2, "n_fetch": 2}, {"n_push": 2, "n_fetch": 4}, {"n_push": 3, "n_fetch": 2}]
)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_that_was_trained_reaches_the_center_once(rule: dict[str, int], late: int) -> None:
    exchanges, link = exchanges_of("downpour", rule)
    for number in range(1, 8):
        if number > late:  # the server is slow at first
            link.answers.release(2)
        step(exchanges, number)
    link.answers.release(9)
    step(exchanges, 8, last=True)
    np.testing.assert_array_equal(link.server.snapshot().center, 8.0)
    np.testing.assert_array_equal(exchanges.local.weights, 8.0)
    assert exchanges.pushed == 80


def test_replica_trains_on_while_the_server_answers() -> None:
    exchanges, link = exchanges_of("easgd", {"tau": 2, "alpha": 0.5})
    for number in (1, 2, 3):  # the exchange of step 2 has no answer yet
        step(exchanges, number)
    np.testing.assert_array_equal(exchanges.local.weights, 3.0)
    link.answers.release(2)
    step(exchanges, 4, last=True)
    # d = 1 at x = 2, so 4 - 1 = 3 at the second exchange, where d = (3 - 1)/2
    np.testing.assert_array_equal(link.server.snapshot().center, 2.0)
    np.testing.assert_array_equal(exchanges.local.weights, 2.0)
    assert exchanges.pushes == 2
    assert any(name.startswith("daskcnn-exchange") for name in link.threads)


@pytest.mark.parametrize("options", [{"overlap": False}, {"rule": {"max_staleness": 2}}])
def test_replica_waits_where_it_is_told_to_or_bounded(options: dict[str, Any]) -> None:
    rule = {"tau": 1} | options.get("rule", {})
    exchanges, link = exchanges_of("easgd", rule, overlap=options.get("overlap", True))
    link.answers.release(2)
    for number in (1, 2):
        step(exchanges, number, last=number == 2)
    assert link.threads == {threading.current_thread().name}


def test_a_refused_push_ends_the_round() -> None:
    exchanges, link = exchanges_of("downpour", {"n_push": 1, "n_fetch": 9})
    link.answers.release(9)
    exchanges.local.weights[0] = np.nan
    step(exchanges, 1)
    with pytest.raises(AssertionError):  # a real link raises PushRefused; this one asserts that there is a reply
        step(exchanges, 2)
