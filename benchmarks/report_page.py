"""How long `daskcnn report RUN --html FILE` takes for a long run, and how large its page is.

    python -m benchmarks.report_page [--events 100000] [--workers 16 1000] [--turns 3] [--json FILE]

A log is made: rounds of workers of unequal speed, a look at the center after every round of all, some warnings.
The command runs in a process of its own, imports and start included. Seconds are those of the processor, all threads
together; the wall's stand beside them. Of the turns the median counts. Exit 1 above five seconds or five megabytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daskcnn.arrays import cpu_count, device_profile
from daskcnn.events import (
    CalibratedWorker,
    EpochEnded,
    Event,
    Judged,
    RoundEnded,
    RunEnded,
    RunStarted,
    Warned,
    WorkersCalibrated,
)
from daskcnn.runs.directory import RunDirectory

SECONDS, BYTES = 5.0, 5e6
"""The bars."""
BEGIN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
SAMPLES, VECTOR = 1000, 358_312


def long_run(events: int, workers: int) -> Iterator[tuple[float, Event]]:
    """The events of a run of SGWU, each with its time in seconds. A round takes the slowest worker two seconds."""
    names = [f"cpu-{i}" for i in range(workers)]
    rounds = max(1, events // (workers + 1))
    rows = tuple(CalibratedWorker(name=name, device="cpu", images_per_second=500.0) for name in names)
    yield (
        0.0,
        RunStarted(
            run="long",
            strategy="sgwu",
            partition="udpa",
            epochs=float(rounds),
            samples=SAMPLES * workers,
            parameters=89_578,
        ),
    )
    yield 0.0, WorkersCalibrated(workers=rows)
    for number in range(rounds):
        now, loss = 2.5 * (number + 1), 2.3 / (1 + 0.01 * number)
        for i, name in enumerate(names):
            yield now, _round(name, number, 1 + i / workers + 0.1 * ((7 * number + i) % 5) / 5, loss)
        judged = Judged(accuracy=1 - loss / 2.5, loss=1.1 * loss, auc=1 - loss / 5)
        shown = {
            "epoch": number + 1.0,
            "step": 8 * (number + 1),
            "seconds": 2.5,
            "loss": loss,
            "accuracy": 1 - loss / 2.4,
        }
        yield now, EpochEnded(validation=judged, **shown)
        if number % 200 == 100:
            yield now, Warned(value=names[number % workers], reason="loads slowly", remedy="use a faster disk")
    yield 2.5 * rounds, RunEnded(status="done", seconds=2.5 * rounds, test=Judged(accuracy=0.9, loss=0.3))


def _round(worker: str, number: int, busy: float, loss: float) -> RoundEnded:
    return RoundEnded(
        worker=worker,
        round=number,
        epoch=number + 1.0,
        samples=SAMPLES,
        busy=busy,
        load=0.05 * busy,
        wait=2.2 - busy,
        communication=0.1,
        evaluation=0.2,
        bytes_up=VECTOR,
        bytes_down=VECTOR,
        version=number + 1,
        base_version=number,
        staleness=0,
        accuracy=0.5,
        loss=loss,
        lr=0.02,
    )


def measure(events: int, workers: int, turns: int, folder: Path) -> dict[str, Any]:
    """Seconds of the command in each turn, and the page's bytes."""
    with RunDirectory.create(folder, f"run-{workers}", strategy="sgwu", now=datetime.now(UTC)) as run:
        run.write_job({})
    lines = [json.dumps(event.record() | {"at": _date(at)}) for at, event in long_run(events, workers)]
    (run.path / "events.jsonl").write_text("\n".join(lines) + "\n")
    page = folder / f"{workers}.html"
    command = [
        sys.executable,
        "-c",
        "from daskcnn.cli import main; main()",
        "report",
        str(run.path),
        "--html",
        str(page),
    ]
    seconds, wall = [], []
    for _ in range(turns):
        began, spent = time.perf_counter(), _processor_seconds()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(_processor_seconds() - spent)
        wall.append(time.perf_counter() - began)
    found = {"events": len(lines), "workers": workers, "seconds": seconds, "wall_seconds": wall}
    return found | {"bytes": page.stat().st_size}


def _processor_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _date(at: float) -> str:
    return datetime.fromtimestamp(BEGIN + at, UTC).isoformat(timespec="milliseconds")


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--events", type=int, default=100_000, help="default %(default)s")
    options.add_argument("--workers", type=int, nargs="+", default=[16, 1000], help="a log for each; default 16 1000")
    options.add_argument("--turns", type=int, default=3, help="default %(default)s")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(given.events, workers, given.turns, Path(folder)) for workers in given.workers]
    missed = False
    for found in results:
        seconds = statistics.median(found["seconds"])
        missed |= seconds > SECONDS or found["bytes"] > BYTES
        print(
            f"{found['events']:,} events of {found['workers']:,} workers: {seconds:.1f} s "
            f"({statistics.median(found['wall_seconds']):.1f} s by the wall clock), {found['bytes'] / 1e6:.2f} MB "
            f"(bars {SECONDS:g} s, {BYTES / 1e6:g} MB)"
        )
    if given.json:
        machine = {"processor": device_profile("cpu", 1).name, "cores": cpu_count()}
        given.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
