"""Rounds of two peers, in threads of this process: what they come to, and what they refuse to do twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.cluster.link.calls import Refusal
from daskcnn.cluster.peers import meeting_tasks, pieces
from daskcnn.cluster.peers.meeting_tasks import RoundStart, begin_life, center_of, rescue, train_round
from daskcnn.cluster.peers.pieces import OutOfTurn, Peers
from daskcnn.cluster.server import stream
from daskcnn.cluster.worker import tasks as worker_tasks
from daskcnn.cluster.worker.session import Session, forget_run, keep_session, session_of
from daskcnn.errors import Diverged
from daskcnn.job.network import initial_weights
from daskcnn.job.tables import Job
from daskcnn.partition.rounds import Round
from daskcnn.ps import Push, Reply
from daskcnn.ps.bsp import ASA
from daskcnn.store import Dataset
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica
from tests.cluster.run_here import EndHere
from tests.toy_data import toy_dataset

NAMES = ("one", "two")
LAYERS = [{"layer": "conv", "kernels": 2, "size": 3}, {"layer": "batchnorm"}, {"layer": "dense", "units": 10}]
SAMPLES = {"one": 120, "two": 60}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), size=8)


def job(**rule: Any) -> Job:
    tables = {"data": {"validation": 30}, "model": {"layers": LAYERS}, "train": {"strategy": "bsp", "batch_size": 30}}
    return Job.model_validate({**tables, "rule": {"exchange": "asa", "every": 2} | rule})


def peer_of(name: str) -> meeting_tasks.Peer:
    peer = session_of(name).kept.find(meeting_tasks.Peer)
    assert peer is not None
    return peer


class Meeting:
    """Two workers as two runs of this process."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        _, weights = initial_weights(job, dataset)
        of_all = Peers("", 1, NAMES, len(weights), "secret", NAMES)
        self.peers = {name: replace(of_all, run=name) for name in NAMES}
        for name in NAMES:
            replica = Replica(job, dataset, Device(), clock=lambda: 0.0)
            keep_session(name, Session(replica))
            begin_life(self.peers[name], name, None, 7, weights, ASA.of(job.rule, job.cluster.wire))
        rounds = {
            "one": Round("one", 0, ((0, 120),), 120, (0.0, 0.5), 5),
            "two": Round("two", 0, ((120, 180),), 60, (0.0, 0.5), 5),
        }
        self.starts = {name: RoundStart(round_, 1, JudgedPart(200, 210), 2.0) for name, round_ in rounds.items()}
        self._pool = ThreadPoolExecutor(2)

    def begin(self, name: str, version: int = 7) -> Any:
        return self._pool.submit(train_round, self.peers[name], version, self.starts[name])

    def trained(self) -> list[Any]:
        return [each.result(20) for each in [self.begin(name) for name in NAMES]]

    def close(self) -> None:
        self._pool.shutdown()
        for name in NAMES:
            forget_run(name)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set it, and the driver has stopped the tasks."""
    asked = threading.Event()
    monkeypatch.setattr(worker_tasks, "stopped", asked.is_set)
    monkeypatch.setattr(meeting_tasks, "stop_signal", lambda: asked.is_set)
    return asked


@pytest.fixture
def meeting(dataset: Dataset, stops: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(stream, "get_worker", lambda: SimpleNamespace(handlers={}))
    monkeypatch.setattr(pieces, "end_of", lambda peers, name, other, *_: EndHere(peers.desk(other)))
    meeting = Meeting(job(), dataset)
    yield meeting
    stops.set()
    meeting.close()


def center(meeting: Meeting, name: str) -> np.ndarray:
    return np.asarray(center_of(meeting.peers[name]))


def test_a_round_of_five_steps_has_three_meetings_and_ends_with_the_same_weights_everywhere(meeting: Meeting) -> None:
    reports = meeting.trained()
    weights = [session_of(name).replica.host_weights() for name in NAMES]
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(center(meeting, "one"), weights[0])
    size = meeting.peers["one"].size
    for report in reports:
        assert (report.samples, report.pushes, report.version) == (SAMPLES[report.worker], 3, 10)
        assert report.center is not None
        assert report.center.samples == 10
    for moved in (sum(report.bytes_up for report in reports), sum(report.bytes_down for report in reports)):
        assert moved == 3 * 2 * 4 * size
    assert not [t for t in threading.enumerate() if t.name.startswith("daskcnn-loader")]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_peers_end_a_round_with_the_same_meeting_where_one_of_them_was_asked(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It comes to the meeting behind the step at hand, the other one as planned."""
    asked, train = session_of("one").replica, Replica.step

    def trained(replica: Replica, *args: Any, **options: Any) -> Any:
        if replica is asked and next(steps_of) == step:
            session_of("one").farewell.ask((1, 1, 0))
        return train(replica, *args, **options)

    steps_of = iter(range(1, 9))
    monkeypatch.setattr(Replica, "step", trained)
    reports = {report.worker: report for report in meeting.trained()}
    meetings = -(-step // 2)
    assert {name: report.pushes for name, report in reports.items()} == dict.fromkeys(NAMES, meetings)
    assert (reports["one"].cut, reports["one"].samples) == (step * 24, step * 24)
    assert (reports["two"].cut, reports["two"].samples) == (meetings * 24, meetings * 24)
    assert [report.center for report in reports.values()] == [None, None]
    weights = [session_of(name).replica.host_weights() for name in NAMES]
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(center(meeting, "one"), weights[0])
    monkeypatch.undo()


def test_a_peer_that_was_asked_before_its_round_began_ends_it_behind_the_first_step(meeting: Meeting) -> None:
    session_of("two").farewell.ask((1, 1, 0))
    one, two = meeting.trained()
    assert (one.cut, two.cut) == (48, 12)


def test_tasks_that_dask_runs_again_change_nothing(meeting: Meeting) -> None:
    meeting.trained()
    before = [session_of(name).replica.host_weights() for name in NAMES]
    one, start = meeting.peers["one"], meeting.starts["one"]
    for peers, version in ((one, 7), (replace(one, life=2), 10)):
        with pytest.raises(OutOfTurn, match="it is dropped"):
            train_round(peers, version, start)
    for name, weights in zip(NAMES, before, strict=True):
        np.testing.assert_array_equal(session_of(name).replica.host_weights(), weights)


def test_a_wait_that_was_stopped_leaves_the_last_center_to_go_on_from(meeting: Meeting, stops: threading.Event) -> None:
    """The other worker never comes."""
    before, waits = center(meeting, "one"), meeting.begin("one")
    peer = peer_of("one")
    while not peer.pieces.waits:
        assert not waits.done()
    stops.set()
    assert waits.result(20) is None
    version, optimizer = rescue(meeting.peers["one"])
    assert version == 7
    np.testing.assert_array_equal(center(meeting, "one"), before)
    stops.clear()
    for name in NAMES:
        meeting.peers[name] = replace(meeting.peers[name], life=2, secret="another")
        begin_life(meeting.peers[name], name, optimizer, 7, before, peer_of(name).asa)
    assert [report.pushes for report in meeting.trained()] == [3, 3]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sum_that_is_not_finite_is_never_handed_on(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    before, begin = center(meeting, "one"), EndHere.begin

    def spoiled(end: EndHere, request: Push, stopped: Callable[[], bool]) -> None:
        payload = np.array(request.payload)
        payload[1] = value
        begin(end, replace(request, payload=payload), stopped)

    monkeypatch.setattr(EndHere, "begin", spoiled)
    for found in meeting.trained():
        assert isinstance(found, Refusal)
        assert isinstance(found.error, Diverged)
        assert "lower train.lr" in str(found.error)
    np.testing.assert_array_equal(center(meeting, "one"), before)


@pytest.mark.parametrize("lost", ["piece", "sum"])
def test_pieces_are_sent_again_where_a_stream_breaks(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """They count once."""
    original, broken = {"piece": EndHere.begin, "sum": EndHere.finish}[lost], set[Any]()

    def breaks(end: EndHere, request: Push, stopped: Callable[[], bool]) -> Any:
        if (request.worker, request.seq) not in broken:
            broken.add((request.worker, request.seq))
            if lost == "sum":
                original(end, request, stopped)
            raise ConnectionError
        return original(end, request, stopped)

    def nothing(end: EndHere, request: Push, stopped: Callable[[], bool]) -> Reply:
        if lost == "piece" and (request.worker, request.seq) not in answered:
            answered.add((request.worker, request.seq))
            raise ConnectionError
        return finish(end, request, stopped)

    finish, answered = EndHere.finish, set[Any]()
    monkeypatch.setattr(EndHere, "begin" if lost == "piece" else "finish", breaks)
    if lost == "piece":
        monkeypatch.setattr(EndHere, "finish", nothing)
    reports = meeting.trained()
    assert len(broken) == 6
    assert [report.pushes for report in reports] == [3, 3]
    np.testing.assert_array_equal(center(meeting, "one"), center(meeting, "two"))


def test_a_worker_that_does_not_come_is_named(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(end: EndHere, request: Push, stopped: Callable[[], bool]) -> Reply:
        raise ConnectionError

    monkeypatch.setattr(EndHere, "finish", gone)
    with pytest.raises(OutOfTurn, match="worker two does not come to the meeting of version 7"):
        meeting.begin("one").result(20)
