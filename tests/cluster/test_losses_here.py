"""Whole runs in this process that lose workers, or the connection, at moments which a cluster seldom meets."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskcnn.cluster.link.calls import CutOff
from daskcnn.cluster.run import context as run_context
from daskcnn.cluster.run import workers as run_workers
from daskcnn.cluster.run.admission import submit_calibration
from daskcnn.cluster.run.context import Scoring
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.shell import shell as shell_module
from daskcnn.cluster.worker.tasks import score_weights
from daskcnn.errors import Lost
from daskcnn.events import WorkerLeftOut, WorkerLost
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.nn.score import Score
from daskcnn.store import Dataset
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.facts import Calibrated, CalibrationFailed, Fact, RoundDone, WorkerGone, WorkerReady
from daskcnn.training.judging import JudgedPart
from tests.cluster.run_here import RunHere, TaskHere
from tests.toy_data import toy_dataset

SAMPLES, EPOCHS, ASA = 100, 2, "asa"
LAYERS = [{"layer": "conv", "kernels": 4, "size": 3}, {"layer": "maxpool", "size": 2}, {"layer": "dense", "units": 10}]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), train=SAMPLES + 30, size=8)


def job_of(strategy: str) -> Job:
    """`ASA` is `bsp` without a server."""
    rule, strategy = ({"exchange": ASA}, "bsp") if strategy == ASA else ({}, strategy)
    train = {"strategy": strategy, "partition": "udpa", "epochs": EPOCHS, "batch_size": 10, "lr": 0.01}
    return resolve({"data": {"validation": 30}, "model": {"layers": LAYERS}, "train": train, "rule": rule})


class Judging:
    """A run that has nothing to train any more, and loses a worker while the last center is judged.

    None of the scores comes before the loss is told. comes_back : it was lost before, and measures itself anew.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost: str, *, comes_back: bool = False) -> None:
        self.lost, self._comes_back, self._told = lost, comes_back, threading.Event()
        self.judges, self._measures = list[str](), list[str]()
        self.run: RunHere

        def scored(*args: Any) -> Any:
            self._told.wait(3.0)
            return score_weights(*args)

        def measured(context: Any, worker: str) -> Any:
            first = worker != lost or worker not in self._measures
            self._measures.append(worker)
            return submit_calibration(context, worker) if first else TaskHere(("calibrate", -1), worker)

        monkeypatch.setattr(run_workers, "LOOK", 0.02)
        monkeypatch.setattr(run_context, "score_weights", scored)
        monkeypatch.setattr(shell_module, "submit_calibration", measured)

    def of(self, strategy: str, dataset: Dataset, workers: int) -> RunHere:
        """Train to the end; then go on from there without the last score."""
        job = job_of(strategy)
        before = RunHere(job, dataset, workers)
        before.train()
        self._measures.clear()
        self.run = RunHere(job, dataset, workers, heard=self._hears)
        self.run.train(replace(before.saved[-1], validation=None))
        return self.run

    def _hears(self, fact: Fact, found: list[orders.Order]) -> None:
        shell = self.run.shell
        if self._comes_back and isinstance(fact, Calibrated) and fact.worker == self.lost:
            shell.tell(WorkerGone((self.lost,), "connection lost", fact.at))
        for order in found:
            if self._comes_back and isinstance(order, orders.StartServer):
                shell.tell(WorkerReady(self.lost, "cpu", fact.at))
            if isinstance(order, orders.Judge):
                self.judges += [name for name, _ in shell.context.scoring.parts(order.part)]
                self.run.connection.away.add(self.lost)
        if self.judges and isinstance(fact, WorkerGone | CalibrationFailed):
            self._told.set()


@pytest.mark.parametrize("strategy", ["agwu", "downpour"])
def test_a_worker_that_measures_itself_and_is_lost_in_the_last_judging_is_left_out(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    judging = Judging(monkeypatch, "cpu-2", comes_back=True)
    run = judging.of(strategy, dataset, 3)
    out = run.of(WorkerLeftOut)[-1]
    assert (out.worker, out.reason[:30]) == ("cpu-2", "lost while it was calibrated: ")
    assert {*judging.judges} == {"cpu-0", "cpu-1"}, "it has not measured itself anew"
    assert run.saved[-1].validation is not None


def test_a_worker_that_is_lost_in_the_last_judging_is_told_once(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = Judging(monkeypatch, "cpu-1")
    run = judging.of("agwu", dataset, 2)
    assert [event.worker for event in run.of(WorkerLost)] == ["cpu-1"]
    assert judging.judges == ["cpu-0", "cpu-1", "cpu-0"]
    assert run.saved[-1].validation is not None


def test_what_was_trained_is_kept_where_the_last_worker_is_lost_in_the_last_judging(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = Judging(monkeypatch, "cpu-0")
    with pytest.raises(Lost, match="it was the last of the run"):
        judging.of("agwu", dataset, 1)
    run = judging.run
    assert run.saved[-1].epoch == EPOCHS
    assert len(run.of(WorkerLost)) == 1


@pytest.mark.parametrize("strategy", ["agwu", ASA])
def test_what_was_trained_and_not_judged_is_judged_as_it_is(dataset: Dataset, strategy: str) -> None:
    """Without a server, where nobody joins any more, the initial weights were judged and kept in its place."""
    job = job_of(strategy)
    before, after = RunHere(job, dataset, 2), RunHere(job, dataset, 2)
    trained = before.train()
    np.testing.assert_array_equal(after.train(replace(before.saved[-1], validation=None)), trained)
    assert after.saved[-1].validation is not None


# --- the connection to the scheduler is cut, and is there again ---


@pytest.mark.parametrize(
    ("strategy", "at"),
    [
        *((ASA, label) for label in ("calibrate", "begin", "round", "center", "score", "rescue")),
        *(("sgwu", label) for label in ("calibrate", "join", "round", "score")),
    ],
)
def test_a_run_goes_on_where_it_is_cut_off_for_a_moment(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, strategy: str, at: str
) -> None:
    """Tasks are made anew, whatever they are for. at: the label of the task with which the scheduler drops it."""
    monkeypatch.setattr(run_workers, "LOOK", 0.02)
    monkeypatch.setattr(run_workers, "EXPLAINED", 0.2)

    def hears(fact: Fact, _: Any) -> None:
        if at == "rescue" and isinstance(fact, RoundDone):
            run.connection.away.add("cpu-1")

    job, unjudged = job_of(strategy), None
    if at == "score":
        before = RunHere(job, dataset, 2)
        before.train()
        unjudged = replace(before.saved[-1], validation=None)
    run = RunHere(job, dataset, 2, cut_off=at, heard=hears)
    run.train(unjudged)
    assert run.connection.cuts == 1
    assert not run.of(WorkerLeftOut)
    assert {event.worker for event in run.of(WorkerLost)} == ({"cpu-1"} if at == "rescue" else set())
    assert run.saved[-1].epoch == EPOCHS
    assert run.saved[-1].validation is not None


def test_the_score_of_a_trained_network_is_asked_for_again_behind_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, scored = [CutOff()], Score(1.0, 1, 2)

    def tried(*_: Any) -> Score:
        if cuts:
            raise cuts.pop()
        return scored

    monkeypatch.setattr(Scoring, "try_score", tried)
    dispatch: Any = SimpleNamespace(workers=None)
    scoring = Scoring("run", dispatch, Results(dispatch.workers, 1.0), 1.0, {})
    assert scoring.score(np.zeros(1), "test", JudgedPart(0, 2)) == scored
