"""The tasks of a meeting, run one by one in this process: what they do, and what they refuse to do twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.cluster.peers.meeting_tasks import (
    OutOfTurn,
    Peers,
    RoundStart,
    add_up,
    adopt,
    begin_life,
    center_of,
    cut,
    end_round,
    rescue,
    train,
)
from daskcnn.cluster.worker import tasks as worker_tasks
from daskcnn.cluster.worker.session import Session, forget_run, keep_session, session_of
from daskcnn.errors import Diverged
from daskcnn.job.network import initial_weights
from daskcnn.job.tables import Job
from daskcnn.partition.rounds import Round
from daskcnn.store import Dataset
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica
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


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Put True in, and the driver has stopped the next step."""
    asked: list[bool] = []
    monkeypatch.setattr(worker_tasks, "stopped", lambda: bool(asked and asked.pop()))
    return asked


class Meeting:
    """Two workers as two runs of this process, and the tasks of their meetings as the driver's graph has them."""

    def __init__(self, job: Job, dataset: Dataset) -> None:
        _, weights = initial_weights(job, dataset)
        self.peers = {name: Peers(name, 1, NAMES, len(weights)) for name in NAMES}
        for name in NAMES:
            replica = Replica(job, dataset, Device(), clock=lambda: 0.0)
            keep_session(name, Session(replica))
            begin_life(self.peers[name], name, None, 7, weights)
        rounds = {"one": Round("one", 0, ((0, 120),), 120, (0.0, 0.5), 5), "two": None}
        rounds["two"] = Round("two", 0, ((120, 180),), 60, (0.0, 0.5), 5)
        self.starts = {name: RoundStart(round_, JudgedPart(200, 210), 2.0) for name, round_ in rounds.items() if round_}

    def steps(self, version: int, sums: list[Any], start: bool = False) -> list[Any]:
        return [train(self.peers[n], version, self.starts[n] if start else None, sums) for n in NAMES]

    def sums(self, version: int, stepped: list[Any]) -> list[Any]:
        one, two = (self.peers[name] for name in NAMES)
        from_two, from_one = cut(two, version, "one", stepped[1]), cut(one, version, "two", stepped[0])
        return [add_up(one, version, stepped, [from_two]), add_up(two, version, stepped, [from_one])]

    def session(self, name: str) -> Session:
        return session_of(name)


@pytest.fixture
def meeting(dataset: Dataset, stops: list[bool]) -> Iterator[Meeting]:
    yield Meeting(job(), dataset)
    for name in NAMES:
        forget_run(name)


def test_a_round_of_five_steps_has_three_meetings_and_ends_with_the_same_weights_everywhere(meeting: Meeting) -> None:
    sums: list[Any] = []
    presented = []
    for version in (7, 8, 9):
        stepped = meeting.steps(version, sums, start=version == 7)
        presented.append([each.samples for each in stepped])
        sums = meeting.sums(version, stepped)
    reports = [end_round(meeting.peers[name], 10, sums) for name in NAMES]
    assert presented == [[48, 24], [48, 24], [24, 12]]
    weights = [meeting.session(name).replica.host_weights() for name in NAMES]
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(center_of(meeting.peers["one"]), weights[0])
    size = meeting.peers["one"].size
    for report in reports:
        assert (report.samples, report.pushes, report.version) == (SAMPLES[report.worker], 3, 10)
        assert report.center is not None
        assert report.center.samples == 10
    for moved in (sum(report.bytes_up for report in reports), sum(report.bytes_down for report in reports)):
        assert moved == 3 * 2 * 4 * size
    assert not [t for t in threading.enumerate() if t.name.startswith("daskcnn-loader")]


def test_tasks_that_dask_runs_again_change_nothing(meeting: Meeting) -> None:
    first = meeting.steps(7, [], start=True)
    sums = meeting.sums(7, first)
    meeting.steps(8, sums)
    before = [meeting.session(name).replica.host_weights() for name in NAMES]
    one = meeting.peers["one"]
    for again in (
        lambda: train(one, 7, meeting.starts["one"], []),
        lambda: train(one, 8, None, sums),
        lambda: cut(one, 7, "two", first[0]),
        lambda: add_up(one, 7, first, [sums[1]]),
        lambda: adopt(one, 8, sums),
        lambda: train(replace(one, life=2), 8, None, sums),
    ):
        with pytest.raises(OutOfTurn, match="it is dropped"):
            again()
    for name, weights in zip(NAMES, before, strict=True):
        np.testing.assert_array_equal(meeting.session(name).replica.host_weights(), weights)


def test_training_that_was_stopped_leaves_the_last_center_to_go_on_from(meeting: Meeting, stops: list[bool]) -> None:
    center = center_of(meeting.peers["one"])
    stops.append(True)
    assert train(meeting.peers["one"], 7, meeting.starts["one"], []) is None
    version, optimizer = rescue(meeting.peers["one"])
    assert version == 7
    np.testing.assert_array_equal(center_of(meeting.peers["one"]), center)
    later = replace(meeting.peers["one"], life=2)
    begin_life(later, "one", optimizer, 7, center)
    assert train(later, 7, meeting.starts["one"], []) is not None


def test_a_chain_that_is_cut_goes_on_without_sums(meeting: Meeting) -> None:
    sums = meeting.sums(7, meeting.steps(7, [], start=True))
    for name in NAMES:
        adopt(meeting.peers[name], 8, sums)
    assert all(each.samples for each in meeting.steps(8, []))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sum_that_is_not_finite_is_never_handed_on(meeting: Meeting, value: float) -> None:
    stepped = meeting.steps(7, [], start=True)
    piece = np.array(cut(meeting.peers["two"], 7, "one", stepped[1]))
    piece[1] = value
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        add_up(meeting.peers["one"], 7, stepped, [piece])
