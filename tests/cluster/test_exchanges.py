"""What a worker pushes and pulls within a round, while it trains on: nothing is lost and nothing counted twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from daskcnn.arrays import NUMPY
from daskcnn.cluster.shell.data_parallel import worth_keeping
from daskcnn.cluster.worker.farewell import Farewell
from daskcnn.cluster.worker.session import Session
from daskcnn.cluster.worker.tasks import ServedRound, join_server
from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES, Join, Leave, ParameterServer, Push, Reply, Request
from daskcnn.training.replica import Stopped, Trained


class SlowLink:
    """A server that answers on the caller's thread once it is let."""

    takes_parts = False

    def __init__(self, server: ParameterServer) -> None:
        self.server, self.answers = server, threading.Semaphore(0)
        self.bytes_up = self.bytes_down = 0
        self.threads: set[str] = set()
        self.asked = threading.Event()  # a push waits for its answer
        self.pushes: list[Push] = []
        self.left: list[tuple[int, bool]] = []
        self.stopped: Callable[[], bool] = lambda: False

    def call(self, event: Request) -> Reply:
        if isinstance(event, Push):
            self.asked.set()
        while not self.answers.acquire(timeout=0.01):
            if self.stopped():
                self.server.handle(event)  # it is there, and waits
                raise Stopped
        self.threads.add(threading.current_thread().name)
        self.pushes += [event] if isinstance(event, Push) else []
        (reply,) = self.server.handle(event)
        assert isinstance(reply, Reply)
        return reply

    def leave(self, last: Push, *, sent: bool, until: float) -> bool:
        self.left.append((last.seq, sent))
        if not sent:
            self.pushes.append(last)
            self.server.handle(last)
        self.server.handle(Leave(last.worker, last.session, last=last.seq))
        return self.server.counts(last.worker, last.session, last.seq)

    def leave_as_it_is(self, worker: str, session: int) -> None:
        self.left.append((0, False))
        self.server.handle(Leave(worker, session))


SIZE = 10


class CountingReplica:
    """A step adds 1 to every weight; `before` is called with its number."""

    def __init__(self, job: Any, before: Callable[[int], None]) -> None:
        self.frozen: tuple[slice, ...] = ()
        self.job, self.before, self.weights = job, before, np.zeros(3)
        self.device = SimpleNamespace(backend=NUMPY)
        self.layout = SimpleNamespace(dtype=self.weights.dtype, besides=())
        self.dataset = SimpleNamespace(train=range(100))
        self.seen: list[np.ndarray] = []

    def adopt_optimizer(self, state: Any) -> None:
        """There is none."""

    def restart_optimizer(self) -> None:
        """There is none."""

    def host_optimizer(self) -> Any:
        return OptimizerState(np.zeros((1, 3)))

    def training(self, ranges: Any, samples: int, **_: Any) -> Iterator[Trained]:
        for number in range(1, samples // SIZE + 1):
            self.before(number)
            self.weights += 1.0
            self.seen.append(self.weights.copy())
            yield Trained(Score(1.0, SIZE * number, SIZE * number), 0.1, 0.0, 0.0)


class Worker:
    """A worker that has just joined a server whose center is 0, in a process without Dask."""

    def __init__(
        self, strategy: str, rule: dict[str, Any], before: Callable[[int], None] = lambda n: None, overlap: bool = True
    ) -> None:
        train = SimpleNamespace(
            strategy=strategy, batch_size=SIZE, replica_size=1, epochs=1, ema=None, reproducible=False
        )
        cluster = SimpleNamespace(overlap=overlap, wire="float32")
        chosen = RULES[strategy].model_validate(rule)
        job = SimpleNamespace(train=train, rule=chosen, cluster=cluster, data=SimpleNamespace(validation=10))
        self.link = SlowLink(ParameterServer(chosen, np.zeros(3)))
        replica: Any = CountingReplica(job, before)
        self.replica, self.session = replica, Session(replica)

    def _linked(self, _: Any, *, stopped: Callable[[], bool], **__: Any) -> SlowLink:
        self.link.stopped = stopped
        return self.link

    def train(self, steps: int, session: int = 1) -> Any:
        return self.begun(steps, session).train()

    def begun(self, steps: int, session: int = 1) -> ServedRound:
        """A round of this many steps."""
        server = SimpleNamespace(secret="", stream=lambda *_: None, link=self._linked)
        self.session.farewell.begin((0, session, 0))
        round_ = Round("a", 0, ((0, SIZE * steps),), SIZE * steps, (0.0, 1.0))
        order: Any = SimpleNamespace(
            life=0,
            rule=None,
            worker="a",
            session=session,
            server=server,
            score=None,
            q=None,
            optimizer=None,
            round=round_,
            scale=1.0,
        )
        self.link.answers.release()
        join_server(order, self.session, lambda: False)
        return ServedRound(order, self.session, lambda: False)


@pytest.mark.parametrize(
    "rule", [{"n_push": 2, "n_fetch": 2}, {"n_push": 2, "n_fetch": 4}, {"n_push": 3, "n_fetch": 2}]
)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_that_was_trained_reaches_the_center_once(rule: dict[str, int], late: int) -> None:
    def before(number: int) -> None:
        if number > late:  # the server is slow at first
            worker.link.answers.release(9 if number == 8 else 2)

    worker = Worker("downpour", rule, before)
    report = worker.train(8)
    np.testing.assert_array_equal(worker.link.server.snapshot().center, 8.0)
    np.testing.assert_array_equal(worker.replica.weights, 8.0)
    assert sum(push.n_samples for push in worker.link.pushes) == report.samples == 80


def test_replica_trains_on_while_the_server_answers() -> None:
    def before(number: int) -> None:
        if number == 4:  # the exchange of step 2 has no answer yet
            np.testing.assert_array_equal(worker.replica.weights, 3.0)
            worker.link.answers.release(2)

    worker = Worker("easgd", {"tau": 2, "alpha": 0.5}, before)
    report = worker.train(4)
    # d = 1 at x = 2, so 4 - 1 = 3 at the second exchange, where d = (3 - 1)/2
    np.testing.assert_array_equal(worker.link.server.snapshot().center, 2.0)
    np.testing.assert_array_equal(worker.replica.weights, 2.0)
    assert report.pushes == 2
    assert any(name.startswith("daskcnn-exchange") for name in worker.link.threads)


@pytest.mark.parametrize("options", [{"overlap": False}, {"rule": {"max_staleness": 2}}])
def test_replica_waits_where_it_is_told_to_or_bounded(options: dict[str, Any]) -> None:
    rule = {"tau": 1} | options.get("rule", {})
    worker = Worker("easgd", rule, overlap=options.get("overlap", True))
    worker.link.answers.release(2)
    worker.train(2)
    assert worker.link.threads == {threading.current_thread().name}


def test_a_refused_push_ends_the_round() -> None:
    def before(number: int) -> None:
        worker.link.answers.release(9)
        worker.replica.weights[0] = np.nan

    worker = Worker("downpour", {"n_push": 1, "n_fetch": 9}, before)
    with pytest.raises(AssertionError):  # a real link raises PushRefused; this one asserts that there is a reply
        worker.train(3)


def test_a_session_after_a_round_that_was_stopped_begins_anew() -> None:
    stops = [True]

    def before(number: int) -> None:
        worker.link.answers.release(9)
        if number == 3 and stops:
            stops.pop()
            raise Stopped

    worker = Worker("easgd", {"tau": 1}, before)
    with pytest.raises(Stopped):
        worker.train(4)
    assert worker.train(4, session=2).pushes == 4
    assert [push.seq for push in worker.link.pushes if push.session == 2] == [1, 2, 3, 4]


def test_states_of_lost_replicas_are_kept_for_their_return_but_not_of_all_there_ever_were() -> None:
    of: Any = {name: object() for name in ("a", "b", "c", "d")}
    assert [*worth_keeping(of, ("c", "d"))] == ["a", "b", "c", "d"]
    kept = worth_keeping({**of, "e": of["a"]}, ("d", "f"))
    assert [*kept] == ["c", "e", "d"]
    assert kept["e"] is of["a"]


# --- the worker, or the server, is to leave ---


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "local-sgd"])
def test_a_worker_that_is_to_leave_pushes_what_it_has_and_waits_for_nobody(strategy: str) -> None:
    def before(number: int) -> None:
        if number == 3:
            worker.session.farewell.leave()

    rule = {"accuracy_on": "train"} if strategy.endswith("wu") else {"every": 8}
    worker = Worker(strategy, rule, before, overlap=False)
    worker.link.server.handle(Join(0, "b", 1))
    report = worker.train(8)
    assert (report.cut, report.samples, report.pushes, report.center) == (30, 30, 1, None)
    assert worker.link.left == [(1, False)]
    (push,) = worker.link.pushes
    assert push.n_samples == 30
    assert push.accuracy == {"sgwu": 3 / 8, "agwu": 1.0, "local-sgd": 1.0}[strategy]
    worker.link.server.handle(Push(0, "b", 1, 1, 0, np.full(3, 3.0), 30, push.accuracy))
    assert worker.link.server.snapshot().merged == 2


@pytest.mark.parametrize(("more", "left"), [(0, (0, False)), (2, (2, False))])
def test_a_group_s_home_leaves_the_barrier_where_nothing_is_to_be_pushed_too(more: int, left: tuple[int, bool]) -> None:
    """Its driver tells it when the round ends: here right behind a meeting, or two steps after it."""
    worker = Worker("local-sgd", {"every": 4}, overlap=False)
    round_ = worker.begun(8)
    worker.link.answers.release()
    round_.trained(Trained(Score(4.0, 40, 40), 0.1, 0.0, 0.0))
    assert round_.goes_on
    worker.session.farewell.ask((0, 1, 0))
    samples = 40 + SIZE * more
    round_.leave(4 + more, Trained(Score(4.0, samples, samples), 0.1, 0.0, 0.0))
    assert not round_.goes_on
    assert worker.link.left == [left]
    assert round_.end().cut == samples
    worker.link.server.handle(Join(0, "b", 1))
    assert worker.link.server.handle(Push(0, "b", 1, 1, 1 + (more > 0), np.full(3, 3.0), 30, 1.0)), "it waits for none"


def leave_once_asked(worker: Worker) -> None:
    """Let the worker leave while a push of it waits for the answer."""

    def leave() -> None:
        assert worker.link.asked.wait(60)
        worker.session.farewell.leave()

    threading.Thread(target=leave, daemon=True).start()


def test_a_worker_leaves_while_it_waits_for_others() -> None:
    worker = Worker("local-sgd", {"every": 4}, overlap=False)
    worker.link.server.handle(Join(0, "b", 1))
    leave_once_asked(worker)
    report = worker.train(8)
    assert (report.cut, report.pushes) == (40, 1)
    assert worker.link.left == [(1, True)]


def test_a_worker_leaves_while_it_waits_for_the_reply_to_what_it_has_sent_ahead() -> None:
    """Without the steps since: they are in a later round of somebody."""
    worker = Worker("local-sgd", {"every": 4})
    worker.link.server.handle(Join(0, "b", 1))
    leave_once_asked(worker)
    report = worker.train(8)
    assert (report.cut, report.samples, report.pushes) == (40, 40, 1)
    assert worker.link.left == [(1, True)]


def test_one_round_ends_early_where_the_server_is_to_leave_and_the_next_does_not() -> None:
    def before(number: int) -> None:
        worker.link.answers.release()
        if number == 2:
            worker.session.farewell._early = (0, 1, 0)  # as `report` has it

    worker = Worker("agwu", {"accuracy_on": "train"}, before, overlap=False)
    assert worker.train(4).cut == 20
    report = worker.train(4, session=2)
    assert (report.cut, report.samples) == (None, 40)


def test_a_worker_that_has_ended_a_round_early_is_waited_for_all_the_same_when_it_leaves_later() -> None:
    farewell = Farewell()
    farewell.begin((1, 1, 0))
    farewell.end(None)
    asyncio.run(farewell.report((1, 1, 0), within=1.0))
    farewell.begin((1, 2, 1))
    farewell.leave()
    with patch.object(time, "monotonic", return_value=time.monotonic() + 10.0):
        assert not farewell.done
