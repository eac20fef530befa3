"""Whole runs of jobs: what studies train with, what is kept of a run, and the file that a study goes on from."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from daskcnn.arrays import cpu_count, device_profile
from daskcnn.cluster.worker.session import THROTTLE
from daskcnn.events import SamplesAllocated, WorkersCalibrated
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import train_job
from daskcnn.runs.log import read_events
from daskcnn.show.report_tables import RunReport, tables

THROTTLED = 2.3
BY_SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.02, "batch_size": 128, "schedule": "poly"}
"""The training of all parts. Minibatches are a worker's own: rules that meet within a round do so every ten steps."""
TUNED: dict[str, dict[str, Any]] = {
    "bsp": {"every": 10},
    "easgd": {"tau": 10},
    "downpour": {"n_push": 10, "n_fetch": 10},
    "dc-asgd": {"every": 10},
    "admm": {"every": 10},
    "parallel-sgd": {"rounds": 4},
    "local-sgd": {"every": 10},
}
"""Parameters of the rules that meet within a round: after every step the small network would do little else."""


def run(job: Mapping[str, Any], client: Client, runs: Path | None = None) -> dict[str, Any]:
    """Train, and return what is kept of it; the run directory stays where there is a folder for it.

    Seconds count from the last calibration; samples are given out `begun` seconds later.
    """
    with tempfile.TemporaryDirectory() as own:
        placed = {**job, "run": {**job["run"], "dir": str(runs or own)}}
        result = train_job(resolve(placed), client=client)
        events = list(read_events(result.run / "events.jsonl"))
    counted, begun = (
        next(event.at for event in events if isinstance(event, kind)) for kind in (WorkersCalibrated, SamplesAllocated)
    )
    return {**kept_of(tables(events)), "begun": begun - counted}


def kept_of(report: RunReport) -> dict[str, Any]:
    """The figures of a run, real or simulated."""
    later, total, test = report.from_increment(3), report.total, report.test
    return {
        "test": test and test.accuracy,
        "seconds": report.seconds,
        "looks": [[look.at, look.epoch, look.rounds, look.validation_accuracy, look.auc] for look in report.looks],
        "wait": report.balance and report.balance.wait,
        "waited": total.wait,
        "communication": total.communication,
        "balance": report.balance and report.balance.balance,
        "balance_from_increment_3": later and later.balance,
        "bytes": total.bytes_up + total.bytes_down,
        "of_eq_11": report.traffic.share,
        "pushes": total.pushes,
        "staleness": total.staleness_mean,
        "gamma": total.gamma,
        "samples": {worker.name: worker.samples for worker in report.workers},
        "images_per_second": {worker.name: worker.images_per_second for worker in report.workers},
    }


def reached(kept: Mapping[str, Any], target: float, column: int = 0) -> float | None:
    """Seconds, epochs (1) or rounds (2) to this validation accuracy, in proportion between two looks; None: never.

    The first look counts as it is where it has the accuracy: nothing is known of the time before it.
    """
    last = None
    for look in kept["looks"]:
        at, accuracy = look[column], look[3]
        if accuracy >= target:
            before, lower = last or (at, 0.0)
            return before + (at - before) * (target - lower) / (accuracy - lower)
        last = at, accuracy
    return None


def at_first_look(kept: Mapping[str, Any], target: float) -> bool:
    """Return True if its first look has this accuracy: `reached` is the latest time that it can have been, then."""
    return bool(kept.get("looks")) and kept["looks"][0][3] >= target


def time_to(runs: Sequence[Mapping[str, Any]], target: float, column: int = 0) -> float:
    """The median of `reached`. A run that diverged, or never gets there, counts as infinite."""
    found = (None if "diverged" in kept else reached(kept, target, column) for kept in runs)
    return median(math.inf if at is None else at for at in found)


def told_time(
    runs: Sequence[Mapping[str, Any]], target: float, column: int = 0, digits: int = 1, never: str = "never"
) -> str:
    """Tell `time_to` in a cell of a table, with a sign before it where the median run's first look has the accuracy."""
    at = time_to(runs, target, column)
    if math.isinf(at):
        return never
    first = any(at_first_look(kept, target) and reached(kept, target, column) == at for kept in runs)
    return f"{'≤ ' if first else ''}{at:.{digits}f}"


def throttle(client: Client, factor: float, worker: str = "cpu-1") -> None:
    """Let a worker take this many times as long in the runs that follow."""
    slow = [a for a, i in client.scheduler_info(n_workers=-1)["workers"].items() if i["name"] == worker]
    client.run(_set, THROTTLE, str(factor), workers=slow)


def _set(name: str, value: str) -> None:
    os.environ[name] = value


# --- what is kept ---


def load(path: Path) -> dict[str, Any]:
    """The results so far, to be read. `kept_in` is for those that are added to."""
    return json.loads(path.read_text()) if path.exists() else {"machine": machine(), "parts": {}}


def kept_in(path: Path | None, on: Mapping[str, Any]) -> dict[str, Any]:
    """The measurements that a file has so far. Raises SystemExit where they are of another machine than this one."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    if not kept.get("machine", {}).items() <= on.items():
        raise SystemExit(f"{path}: its figures are of another machine, {kept['machine']}; give another file")
    return {**kept, "machine": dict(on)}


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write them in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


def command() -> str:
    """The command that is running."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def add_command(results: dict[str, Any]) -> None:
    """Add the command that is running to those that the results come from."""
    results["commands"] = list(dict.fromkeys([*results.get("commands", ()), command()]))


def show(page: str, path: Path | None) -> None:
    """Write a page to a file, or print it."""
    if path is None:
        print(page)
    else:
        path.write_text(page, encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] | None = None) -> str:
    """A table. left: columns that are aligned left, as others are aligned right; None: all."""
    count = len(head)
    kept = range(count) if left is None else {column % count for column in left}
    lines = [head, ["---" if column in kept else "---:" for column in range(count)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine() -> dict[str, Any]:
    """The machine: its processor, cores and memory."""
    cpu = device_profile("cpu", cpu_count())
    return {"processor": cpu.name, "cores": cpu.threads, "memory_GiB": round(cpu.memory / 2**30)}
