"""Seconds that jobs still take on some workers, by the logs of their runs."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from daskcnn.batch.estimates import CHANGE, Estimates, pace_of
from daskcnn.batch.policy import share
from daskcnn.batch.records import Count, QueuedJob
from daskcnn.batch.shares import SharedWorker
from daskcnn.events import (
    EpochEnded,
    Event,
    PricedStep,
    RoundEnded,
    RunResumed,
    RunStarted,
    StrategyChosen,
    WorkerGain,
    WorkerLeftOut,
)

DESKS = [SharedWorker(f"desk-{i}") for i in range(1, 5)]
ALL = [worker.name for worker in DESKS]


def job_of(id_: int, folder: Path, has: int = 0, *told: Event) -> QueuedJob:
    """A job whose run has logged these events."""
    run = folder / f"run-{id_}"
    run.mkdir()
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event.record())}\n" for event in told))
    state: Any = {"state": "running", "has": tuple(ALL[:has])} if has else {}
    return QueuedJob(id_, "ann", 0.0, run=str(run), workers={"cpu": Count(1, 4)}, **state)


def round_of(worker: str, samples: int, busy: float, communication: float = 0.0, number: int = 0) -> RoundEnded:
    spent: dict[str, Any] = {"busy": busy, "wait": 0.0, "communication": communication, "bytes_up": 0, "bytes_down": 0}
    return RoundEnded(worker=worker, round=number, samples=samples, epoch=1.0, at=1.0, **spent)


def started(samples: int = 1000) -> RunStarted:
    return RunStarted(epochs=10, samples=samples, at=1.0)


def epoch(reached: float) -> EpochEnded:
    return EpochEnded(epoch=reached, epochs=10.0, step=1, at=2.0)


def estimates(*jobs: QueuedJob) -> Estimates:
    found = Estimates()
    found.of(jobs, DESKS)
    return found


def test_the_pace_of_a_run_is_that_of_its_last_rounds(tmp_path: Path) -> None:
    told = [
        started(), round_of("desk-1", 500, 50.0, 9.0), round_of("desk-2", 500, 50.0, 9.0), epoch(1.0),
        round_of("desk-1", 600, 6.0, 1.0, 1), round_of("desk-2", 400, 8.0, 3.0, 1), epoch(2.0),
        round_of("desk-1", 1000, 10.0, 0.0, 2), epoch(3.0),
    ]  # fmt: skip
    pace = pace_of(Path(job_of(1, tmp_path, 2, *told).run))
    assert pace.speeds == {"desk-1": 100.0, "desk-2": 50.0}
    assert pace.exchange == pytest.approx(0.002), "of those that were together last"
    assert pace.left == 7000


def test_a_run_that_has_trained_none_goes_by_the_choice_of_its_strategy(tmp_path: Path) -> None:
    alone = PricedStep(strategy="alone", samples={"desk-1": 64}, compute=1.0, exchange=0.0, seconds=1.0)
    together = PricedStep(strategy="bsp", samples={"a": 32, "b": 32}, compute=0.5, exchange=0.64, seconds=1.0)
    job = job_of(1, tmp_path, 1, started(), StrategyChosen(candidates=(alone, together), at=1.0))
    assert pace_of(Path(job.run)).exchange == pytest.approx(0.01)


def test_a_log_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    job = job_of(1, tmp_path, 1)
    for text in ("", '{"event": "round", "worker"', '{"event": "round"}\n{"event": "start", "samples": []}\n'):
        (Path(job.run) / "events.jsonl").write_text(text)
        assert pace_of(Path(job.run)).speeds == {}
    assert estimates(job)(job, ALL[:2]) == 0.5, "by the number of threads"


def test_an_idle_worker_goes_to_the_run_whose_exchanges_do_not_eat_it_up(tmp_path: Path) -> None:
    """One run's workers mostly exchange, the other's mostly compute."""
    talks = [round_of("desk-1", 500, 1.0, 20.0), round_of("desk-2", 500, 1.0, 20.0)]
    computes = [round_of("desk-3", 1000, 20.0, 0.0)]
    jobs = [
        job_of(1, tmp_path, 2, started(), *talks, epoch(1.0)),
        job_of(2, tmp_path, 0, started(), *computes, epoch(1.0)),
    ]
    jobs[1] = QueuedJob(2, "bob", 0.0, "running", run=jobs[1].run, workers={"cpu": Count(1, 4)}, has=("desk-3",))
    found = share(jobs, DESKS, now=0.0, gain=estimates(*jobs))
    assert "desk-4" in found.takes[2]
    assert 1 not in found.takes


def test_no_worker_is_moved_for_the_last_seconds_of_a_run(tmp_path: Path) -> None:
    jobs = [job_of(1, tmp_path, 3, started(100), *(round_of(name, 30, 0.3) for name in ALL[:3]), epoch(9.5))]
    last = estimates(*jobs)
    assert last(jobs[0], ALL[:3]) == pytest.approx(50 / 300)
    assert last(jobs[0], ALL) == pytest.approx(50 / 400 + CHANGE)
    assert share(jobs, DESKS, now=0.0, gain=last).takes == {}


def test_a_run_that_is_about_to_end_takes_no_time_and_gives_no_reason_to_fail(tmp_path: Path) -> None:
    jobs = [job_of(1, tmp_path, 3, started(), *(round_of(name, 30, 0.3) for name in ALL[:3]), epoch(10.0))]
    jobs.append(QueuedJob(2, "bob", 0.0, run=str(tmp_path / "none"), workers={"cpu": Count(1, 4)}))
    assert len(share(jobs, DESKS, now=0.0, gain=estimates(*jobs)).starts) == 1
    assert share(jobs, DESKS, now=0.0, gain=lambda job, workers: 0.0).starts


def test_a_worker_that_a_run_has_left_out_is_another_s_before_those_that_train(tmp_path: Path) -> None:
    part: dict[str, Any] = {"with_it": 2.0, "without": 1.0, "brings": 0.0, "costs": 1.0}
    parts = tuple(WorkerGain(worker=name, used=name != "desk-2", **part) for name in ALL)
    alone = PricedStep(strategy="alone", samples={"desk-1": 64}, compute=1.0, exchange=0.0, seconds=1.0)
    chosen = StrategyChosen(candidates=(alone,), parts=parts, at=1.0)
    jobs = [job_of(1, tmp_path, 4, started(), chosen, *(round_of(n, 9, 1.0) for n in ALL if n != "desk-2"), epoch(1.0))]
    assert estimates(*jobs)(jobs[0], ["desk-2"]) == inf
    jobs.append(QueuedJob(2, "bob", 0.0, run=str(tmp_path / "none"), workers={"cpu": Count(1, 1)}))
    assert share(jobs, DESKS, now=0.0, gain=estimates(*jobs)).gives == {1: ("desk-2",)}


def test_a_worker_that_a_run_has_not_had_is_as_fast_as_its_threads(tmp_path: Path) -> None:
    job = job_of(1, tmp_path, 1, started(), round_of("desk-1", 1000, 10.0), epoch(1.0))
    found = Estimates()
    found.of([job], [SharedWorker("desk-1", speed=2.0), SharedWorker("desk-2", speed=4.0)])
    assert found(job, ["desk-2"]) == pytest.approx(9000 / 200 + CHANGE)
    (Path(job.run) / "events.jsonl").write_text("")
    assert found(job, ["desk-1"]) == 0.5, "a log that has changed is read again"


def test_a_worker_that_cannot_be_used_is_another_s_until_it_trains_or_the_run_is_begun_anew(tmp_path: Path) -> None:
    told = [started(), WorkerLeftOut(worker="desk-2", reason="out of memory"), round_of("desk-1", 500, 50.0)]
    job = job_of(1, tmp_path, 2, *told, epoch(1.0))
    assert pace_of(Path(job.run)).speeds == {"desk-1": 10.0, "desk-2": 0.0}
    waits = QueuedJob(2, "bob", 0.0, run=str(tmp_path / "none"), workers={"cpu": Count(1, 1)}, only=("desk-[12]",))
    assert share([job, waits], DESKS, now=0.0, gain=estimates(job, waits)).gives == {1: ("desk-2",)}
    trains = job_of(3, tmp_path, 2, *told, round_of("desk-2", 400, 20.0))
    assert pace_of(Path(trains.run)).speeds["desk-2"] == 20.0
    anew = job_of(4, tmp_path, 2, *told, RunResumed(step=1, at=3.0))
    assert "desk-2" not in pace_of(Path(anew.run)).speeds
