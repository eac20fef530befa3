"""What a run costs beside training: what follows it, and its start.

    python -m benchmarks.following --data data/cifar10.zarr [--parts overhead start] [--turns 5] [--json FILE]

overhead: processor seconds of a run of `quick` on two one-thread workers that is followed by the dashboard's page,
TensorBoard and Prometheus, as a share of those of the same run with none of them. Both take turns; of the turns' shares
the median counts. Processor seconds are those of driver, scheduler and workers, from their start to their end. While a
run goes on, `/metrics` of its scheduler is read every 15 seconds, as Prometheus does.
start: wall seconds from the command, and from its first line, until samples are allocated to the workers: the next
thing that happens is the first step. Loops are compiled, and no measurements of convolutions are kept.

tensorboardX imports PyTorch where it finds it, for a second. daskcnn does not bring it, so it is hidden here.
Exit 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.common import Results
from daskcnn.compiled.loop import cache_path
from daskcnn.events import SamplesAllocated
from daskcnn.runs.log import read_events

OVERHEAD, START = 0.02, 8.0
"""The bars: more processor seconds, and seconds to the first step."""
SCRAPE = 15.0
"""Seconds between two readings of metrics: Prometheus' example configuration."""
PARTS = ("overhead", "start")
FOLLOWERS = ("dashboard", "tensorboard", "prometheus")
DASHBOARD = re.compile(r"^dashboard: (http://127\.0\.0\.1:\d+)")


class Run:
    """A run of `quick` in processes of its own, in this folder."""

    def __init__(self, folder: Path, data: str, epochs: int, *, followed: bool) -> None:
        self.folder = folder
        hidden = folder / "hidden"
        (hidden / "torch").mkdir(parents=True)
        (hidden / "torch" / "__init__.py").write_text("raise ImportError('hidden')\n", encoding="utf-8")
        settings = [f"run.{name}={'true' if followed else 'false'}" for name in FOLLOWERS]
        settings += [f"run.dir={folder}", f"train.epochs={epochs}", "cluster.workers={cpu = 2}"]
        flags = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "daskcnn.run", "--data", data, "--model", "quick", "--name", "run", *flags]
        variables = {"PYTHONPATH": str(hidden), "DASKCNN_CACHE_DIR": str(folder / "cache")}
        variables["NUMBA_CACHE_DIR"] = str(cache_path())
        self.began = time.time()
        self._process = subprocess.Popen(
            command, env=os.environ | variables, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    def finished(self) -> tuple[float, float]:
        """Processor seconds of all its processes, and the time of its first line. Raises SystemExit where it failed."""
        assert self._process.stderr is not None
        first, over, told = 0.0, Event(), []
        for line in self._process.stderr:
            first = first or time.time()
            told.append(line)
            if found := DASHBOARD.match(line):
                Thread(target=_read_metrics, args=(f"{found[1]}/metrics", over), daemon=True).start()
        over.set()
        _, status, used = os.wait4(self._process.pid, 0)
        if status:
            raise SystemExit("".join(told))
        return used.ru_utime + used.ru_stime, first

    def first_step(self) -> float:
        """The time when samples were allocated."""
        log = read_events(self.folder / "run" / "events.jsonl")
        return next(event.at for event in log if isinstance(event, SamplesAllocated))


def _read_metrics(address: str, over: Event) -> None:
    while not over.wait(SCRAPE):
        with suppress(URLError, OSError), urlopen(address, timeout=5) as answer:
            answer.read()


def overhead(data: str, epochs: int, turns: int) -> dict[str, Any]:
    """Processor seconds of both kinds of runs, and the median of the turns' shares."""
    taken: dict[str, list[float]] = {"alone": [], "followed": []}
    for turn in range(turns):
        kinds = [("alone", False), ("followed", True)]
        for name, followed in kinds if turn % 2 else reversed(kinds):
            with tempfile.TemporaryDirectory() as folder:
                spent, _ = Run(Path(folder), data, epochs, followed=followed).finished()
            taken[name].append(spent)
            print(f"{name} {spent:.1f} s", flush=True)
    shares = [f / a - 1 for a, f in zip(taken["alone"], taken["followed"], strict=True)]
    return {"epochs": epochs, "processor_seconds": taken, "shares": shares, "share": median(shares)}


def start(data: str, turns: int) -> dict[str, Any]:
    """Seconds to the first step, from the command and from its first line."""
    command, line = [], []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder), data, 1, followed=False)
            _, first = run.finished()
            command.append(run.first_step() - run.began)
            line.append(run.first_step() - first)
    return {"command": command, "first_line": line}


def main() -> int:
    """Exit code 1 where a bar is missed."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    options.add_argument("--epochs", type=int, default=10, help="of runs whose overhead is measured; default 10")
    options.add_argument("--turns", type=int, default=5, help="default %(default)s")
    options.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    given = options.parse_args()
    results, missed = Results(given.json), False
    if "overhead" in given.parts:
        found = overhead(given.data, given.epochs, given.turns)
        results.add({"what": "overhead"}, found)
        print(f"overhead {found['share']:+.1%} of processor seconds, bar {OVERHEAD:.0%}")
        missed |= found["share"] > OVERHEAD
    if "start" in given.parts:
        found = start(given.data, given.turns)
        results.add({"what": "start"}, found)
        command, line = (median(found[key]) for key in ("command", "first_line"))
        print(f"first step {line:.1f} s after the first line, {command:.1f} s after the command; bar {START:g} s")
        missed |= line > START
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
