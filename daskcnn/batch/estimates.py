"""Seconds that jobs still take on some workers, as far as their runs have shown: workers are shared by these.

A worker of speed s makes s samples a second. Workers that train together make a sample of progress in::

    1 / Σ s + e

seconds: e is the time of their exchanges for each sample of all, which no further worker shortens. That is the choice
of a strategy in short (`training.strategy_choice`), with what the last rounds took in place of what was expected. A
worker alone exchanges nothing. A job whose run has not trained yet counts as one without exchanges.

Other workers than a job has cost it `CHANGE` seconds, so that none is moved for the sake of a job's last moments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from daskcnn.batch.progress import progress_of
from daskcnn.batch.records import QueuedJob
from daskcnn.batch.shares import SharedWorker
from daskcnn.errors import DataError
from daskcnn.files import open_regular

CHANGE = 5.0
"""Seconds that a run loses when it has other workers: a round ends early, others measure themselves."""
_TAIL, _HEAD = 1 << 18, 1 << 16  # bytes of a log
_ROUND, _CHOICE, _START, _UNFIT, _RESUME = (
    f'"event": "{kind}"'.encode() for kind in ("round", "strategy", "start", "worker-left-out", "resume")
)


@dataclass(frozen=True, slots=True)
class RunPace:
    """A run's course so far.

    speeds : samples a second of each worker; 0 of one that the run has left out. exchange : seconds for each sample of
    all, where several train. left : samples that are still to be presented; None: not known.
    """

    speeds: Mapping[str, float]
    exchange: float
    left: float | None


class Estimates:
    """Has the seconds of each job on any of these workers. A log is read again once it has grown."""

    def __init__(self) -> None:
        self._threads: dict[str, float] = {}
        self._known: dict[int, tuple[int, RunPace]] = {}  # by job: the size of its log, and what it says

    def of(self, jobs: Iterable[QueuedJob], workers: Iterable[SharedWorker]) -> None:
        """Look at these workers, and forget other jobs."""
        self._threads, there = {worker.name: worker.speed for worker in workers}, {job.id for job in jobs}
        self._known = {job: known for job, known in self._known.items() if job in there}

    def __call__(self, job: QueuedJob, workers: Collection[str]) -> float:
        """Return the seconds that a job still takes on these workers; without its samples, those of one of them."""
        pace = self._pace(job)
        if not (speed := sum(self._speed(pace, name) for name in workers)):
            return inf
        seconds = 1 / speed + (pace.exchange if len(workers) > 1 else 0.0)
        if pace.left is None:
            return seconds
        changes = job.state == "running" and {*workers} != {*job.has}
        return seconds * pace.left + (CHANGE if changes else 0.0)

    def _speed(self, pace: RunPace, name: str) -> float:
        """A worker's speed: of one that the run has not had, by its threads and the speed of the others."""
        if (known := pace.speeds.get(name)) is not None:
            return known
        threads = sum(self._threads.get(other, 1.0) for other, speed in pace.speeds.items() if speed)
        return self._threads.get(name, 1.0) * (sum(pace.speeds.values()) / threads if threads else 1.0)

    def _pace(self, job: QueuedJob) -> RunPace:
        size = 0
        with suppress(OSError, ValueError):
            size = os.stat(Path(job.run) / "events.jsonl").st_size
        known = self._known.get(job.id)
        if known is None or known[0] != size:
            known = self._known[job.id] = size, pace_of(Path(job.run))
        return known[1]


def pace_of(run: Path) -> RunPace:
    """Return the course of a run from its log. One that cannot be read has not begun."""
    head, tail = b"", b""
    with suppress(OSError, ValueError, DataError), open_regular(run / "events.jsonl") as log:
        head = log.read(_HEAD)
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
        tail = log.read(_TAIL)
    with suppress(KeyError, TypeError, AttributeError):  # of another version's run
        rounds = [*_records(tail, _ROUND)]
        choices = [*_records(tail, _CHOICE)] or [*_records(head, _CHOICE)]
        speeds = dict.fromkeys((*_left_out(choices), *_unfit(tail)), 0.0) | _speeds(rounds)
        return RunPace(speeds, _exchange(rounds) or _expected(choices), _left(run, head))
    return RunPace({}, 0.0, None)


def _records(text: bytes, mark: bytes) -> Iterable[dict[str, Any]]:
    """Yield the events of a kind. A line that is cut off is none."""
    for line in text.splitlines():
        if mark in line[:40]:
            with suppress(ValueError, RecursionError):
                yield json.loads(line)


def _speeds(rounds: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Samples a second of each worker in its last round."""
    done = (each for each in rounds if each.get("samples") and each.get("busy") and not each.get("members"))
    return {each["worker"]: each["samples"] / each["busy"] for each in done}


def _unfit(text: bytes) -> Iterable[str]:
    """Yield the workers that could not be used since the run was last begun."""
    yield from (each["worker"] for each in _records(text[max(0, text.rfind(_RESUME)) :], _UNFIT))


def _exchange(rounds: Iterable[Mapping[str, Any]]) -> float:
    """Seconds of exchanges for each sample of all, in the last rounds of several workers."""
    together = list[dict[str, Mapping[str, Any]]]()  # one round of each worker
    for each in rounds:
        if not together or each["worker"] in together[-1]:
            together.append({})
        together[-1][each["worker"]] = each
    for own in reversed(together):
        if len(own) > 1 and (samples := sum(each["samples"] for each in own.values())):
            return float(sum(each["communication"] for each in own.values()) / len(own) / samples)
    return 0.0


def _left_out(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    """The workers without which the run is sooner, by the last choice of its strategy."""
    return [part["worker"] for choice in choices[-1:] for part in choice.get("parts", ()) if not part["used"]]


def _expected(choices: Iterable[Mapping[str, Any]]) -> float:
    """The same as it was expected when the strategy was chosen: 0 where it was not."""
    for choice in choices:
        for priced in choice["candidates"]:
            if len(own := priced["samples"]) > 1:
                return float(priced["exchange"] / max(1, sum(own.values())))
    return 0.0


def _left(run: Path, head: bytes) -> float | None:
    reached = progress_of(run)
    for start in _records(head, _START):
        if reached.epochs:
            return float(max(1.0, (reached.epochs - reached.epoch) * start["samples"]))
    return None
