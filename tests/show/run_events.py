"""Events of made-up runs, as a log has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from daskcnn.events import parsed
from daskcnn.runs import totals
from daskcnn.runs.totals import WorkerTotals
from daskcnn.show import report_tables
from daskcnn.show.report_tables import RunReport

Event = dict[str, Any]


def tables(log: Iterable[Event]) -> RunReport:
    """The report of a log."""
    return report_tables.tables(parsed(log))


def worker_totals(log: Iterable[Event], seconds: float | None = None) -> list[WorkerTotals]:
    """The totals of a log."""
    return totals.worker_totals(parsed(log), seconds)


def start(**changes: Any) -> Event:
    event = {"event": "start", "run": "2026-11-20T20-15-03-sgwu", "strategy": "sgwu", "epochs": 10}
    return {**event, "samples": 48000, "validation_samples": 2000, "parameters": 89578, **changes}


def calibration(*names: str) -> Event:
    return {"event": "calibration", "workers": [_calibrated(i, name) for i, name in enumerate(names)]}


def _calibrated(i: int, name: str) -> Event:
    where = {"address": f"tcp://10.0.0.{i}:4000", "host": "node", "device": "cpu", "threads": 1}
    return {"name": name, **where, "images_per_second": 1234.5, "memory": 8_000_000_000}


def round_of(worker: str, **changes: Any) -> Event:
    event = {"event": "round", "worker": worker, "round": 3, "epoch": 3.4, "samples": 12000, "loss": 1.234}
    event |= {"accuracy": 0.551, "samples_per_second": 1187.2, "busy": 9.7, "wait": 0.2, "communication": 0.1}
    event |= {"evaluation": 0.5, "bytes_up": 1000, "bytes_down": 2000, "version": 4, "base_version": 3}
    return {**event, "staleness": 0, "gamma": None, "q": None, "lr": 0.0132, **changes}


def epoch(**changes: Any) -> Event:
    event = {"event": "epoch", "epoch": 3.4, "epochs": 10, "step": 1275, "loss": 1.234, "accuracy": 0.551}
    event |= {"validation": {"loss": 1.1, "accuracy": 0.573}, "samples_per_second": 2345.0, "lr": 0.0132}
    return {**event, "seconds": 20.0, **changes}


def steps(**changes: Any) -> Event:
    workers = [
        {"name": "w0", "kernels": {"conv1": 20, "conv2": 16, "conv3": 40}, "conv_seconds": 0.1},
        {"name": "w1", "kernels": {"conv1": 6, "conv2": 8, "conv3": 12}, "conv_seconds": 0.25},
    ]
    return {
        "event": "steps",
        "step": 640,
        "epoch": 1.7,
        "loss": 1.9,
        "seconds_per_step": 0.213,
        "workers": workers,
        **changes,
    }


def data_parallel() -> list[Event]:
    """A run of two equal workers and an idle one, some way in."""
    return [
        start(),
        calibration("w0", "w1", "w2"),
        {"event": "allocation", "increment": 1, "sizes": {"w0": 24000, "w1": 16000, "w2": 8000}},
        round_of("w0"),
        round_of("w1", busy=5.0, wait=4.5, communication=0.5, loss=1.301),
        epoch(),
    ]


def asynchronous() -> list[Event]:
    """The same under an asynchronous rule, one worker lost and one that joined late."""
    return [
        start(strategy="agwu"),
        *data_parallel()[1:],
        round_of("w1", staleness=2),
        {"event": "worker-lost", "worker": "w2", "reason": "killed", "samples_moved": 8000},
        {
            "event": "worker-ignored",
            "address": "tcp://10.0.0.9:40123",
            "reason": "the job asks for 2 cpu workers",
            "remedy": "name 3",
        },
    ]


def layer_sharded() -> list[Event]:
    """A run of the layer strategy."""
    return [start(strategy="layer"), calibration("w0", "w1"), steps()]
