"""Seconds that a worker's end costs the others: SIGKILL, SIGTERM and SIGSTOP, beside torchrun (elastic, gloo).

    python -m benchmarks.recovery --data data/cifar10.zarr [--strategies bsp sgwu agwu layer torchrun]
        [--signals KILL TERM STOP] [--repeat 50] [--workers 3] [--stall-timeout 10] [--json FILE]

A scheduler, workers of one thread with nannies, and one for the server are processes of this machine. In mid-run one of
the workers gets the signal, with its nanny; before the next turn another takes its place. All settings are the
defaults, but for SIGSTOP: a worker that hangs is given up after --stall-timeout.

Next step: from the signal until the slowest of the others begins a step. Of `bsp` they wait at most at the barrier; of
`sgwu` and `agwu` they go on by themselves, so that it may be the step that they would have made anyway. Pause: the
longest time, from the signal on, between two steps of one of the others, without what it was before. With `layer` it
is from the signal until a step ends that had not ended before, as the driver hears of it. Done again: samples of
`layer` and of torchrun whose steps ended twice. Of the rules it is what the worker had trained on since its last push,
and nothing after SIGTERM. torchrun stops all ranks at any change of its members; they begin again from the last
checkpoint, which the script writes every 20 steps. They notice a rank that hangs after 30 minutes, gloo's timeout: a
turn ends after two. With the store that its agent shares by default, torchrun of PyTorch 2.13 never goes on: the ranks
of the next attempt find the addresses of the last one there. So it gets `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`.

What FILE holds of other strategies and signals stays there.

Exit 1 if the 95th percentile of the next step misses a bar: 5 s after SIGKILL (`layer`: 10 s), 1 s after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from distributed import Client

from benchmarks.network.netns import signals_end_it
from benchmarks.runs import machine
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import train_job
from daskcnn.training.coordinator import facts, orders

STRATEGIES, SIGNALS = ("bsp", "sgwu", "agwu", "layer", "torchrun"), ("KILL", "TERM", "STOP")
BARS = {"KILL": 5.0, "TERM": 1.0}
LAYER_BAR = 10.0
SETTLED, AFTER = 3.0, 3.0
"""Seconds of training before the signal, and behind the recovery, that belong to a turn."""
LONGEST = 120.0
Figures = dict[str, float]


class Enough(Exception):
    """A turn's run has shown what it had to."""


# --- on the workers ---


def record() -> None:
    """Keep begin and end of every step of this process."""
    from daskcnn.training.replica import Replica

    patched: Any = Replica
    if hasattr(patched, "kept"):
        return
    plain = patched.step
    kept: list[tuple[float, float]] = []

    def step(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        begun = time.monotonic()
        found = plain(self, batch, *args, **options)
        kept.append((begun, time.monotonic()))
        return found

    patched.step, patched.kept = step, kept


def steps() -> list[tuple[float, float]]:
    """Return what was kept since it was last asked."""
    from daskcnn.training.replica import Replica

    patched: Any = Replica
    found = list(patched.kept)
    del patched.kept[: len(found)]
    return found


# --- here ---


class Machines:
    """Scheduler and workers, each with the process group that a signal to it reaches."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, dict[str, subprocess.Popen[bytes]]()
        self._file, self._serial = str(folder / "scheduler.json"), 0
        self._start("scheduler", "scheduler", "--port", "0", "--no-dashboard")
        while not Path(self._file).exists():
            time.sleep(0.1)
        self.client = Client(scheduler_file=self._file, set_as_default=False)
        self.add("ps", "PS=1")

    def _start(self, name: str, *command: str) -> None:
        options = ("--scheduler-file", self._file, "--host", "127.0.0.1")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        command = (sys.executable, "-m", "dask", command[0], *options, *command[1:])
        self._started[name] = subprocess.Popen(command, **quiet)

    def add(self, name: str, resource: str = "CPU=1") -> None:
        """Start a worker."""
        folder = ("--local-directory", str(self._folder / name), "--no-dashboard")
        self._start(name, "worker", "--name", name, "--nthreads", "1", "--resources", resource, *folder)

    def ready(self, count: int) -> list[str]:
        """Have this number of workers; return their names."""
        while len(self._started) - 2 < count:
            self._serial += 1
            self.add(f"w{self._serial}")
        deadline = time.monotonic() + LONGEST
        while self.addresses.keys() != self._started.keys() - {"scheduler"} and time.monotonic() < deadline:
            time.sleep(0.1)
        return [name for name in self._started if name not in ("scheduler", "ps")]

    @property
    def addresses(self) -> dict[str, str]:
        """Those of workers that are there, by name."""
        there = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        return {info["name"]: address for address, info in there.items()}

    def signal(self, name: str, kind: str) -> None:
        """Send it to the worker: SIGTERM to its nanny, as a user would, and the others to both."""
        process = self._started[name]
        if kind == "TERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, getattr(signal, f"SIG{kind}"))

    def drop(self, name: str) -> None:
        """End a worker for good."""
        process = self._started.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all."""
        self.client.close()
        for name in [*self._started]:
            self.drop(name)


class Heard:
    """Hears a run's facts; sends the signal in mid-run, and ends the run some time behind the recovery."""

    def __init__(self, machines: Machines, name: str, kind: str) -> None:
        self._machines, self._name, self._kind = machines, name, kind
        self.begun = self.signalled = self.gone = 0.0
        self.ended: list[tuple[float, int]] = []  # steps of `layer`, with their numbers
        self._timer: threading.Timer | None = None

    def _act(self) -> None:
        self.signalled = time.monotonic()
        self._machines.signal(self._name, self._kind)

    def __call__(self, fact: Any, found: Sequence[Any]) -> None:
        now = time.monotonic()
        started = any(isinstance(order, orders.StartRound | orders.RunSegment) for order in found)
        if started and self._timer is None:
            self._timer = threading.Timer(SETTLED, self._act)
            self._timer.start()
        if isinstance(fact, facts.StepDone):
            self.ended.append((now, fact.number))
        if self.signalled and any(isinstance(order, orders.Dismiss) for order in found):
            self.gone = self.gone or now
        if self.gone and now > self.gone + AFTER and (not self.ended or self.new_step):
            raise Enough
        if self.signalled and now > self.signalled + LONGEST:
            raise Enough

    @property
    def new_step(self) -> float | None:
        """Seconds from the signal to the end of a step of `layer` that had not ended before the worker was gone."""
        last = max((number for at, number in self.ended if at < self.gone), default=-1)
        later = [at for at, number in self.ended if at >= self.gone and number > last]
        return later[0] - self.signalled if later else None


def turn(machines: Machines, job: Mapping[str, Any], workers: int, kind: str) -> Figures:
    """One run, with a worker that gets the signal."""
    names = machines.ready(workers)
    hit, others = names[-1], names[:-1]
    machines.client.run(record)
    machines.client.run(steps)
    heard = Heard(machines, hit, kind)
    with suppress(Enough):
        train_job(resolve(job), client=machines.client, heard=heard)
    found = figures_of_layer(heard, job) if job["train"]["strategy"] == "layer" else figures(machines, others, heard)
    machines.drop(hit)
    return found


def figures(machines: Machines, others: Sequence[str], heard: Heard) -> Figures:
    """The figures of a run by a rule."""
    addresses = machines.addresses
    kept = machines.client.run(steps, workers=[addresses[name] for name in others])
    at, behind, pauses = heard.signalled, [0.0], [0.0]
    for made in kept.values():
        later = [begun for begun, _ in made if begun > at]
        gaps = [(ended, begun - ended) for (_, ended), (begun, _) in pairwise(made)]
        usual = [gap for ended, gap in gaps if ended < at]
        since = [gap for ended, gap in gaps if ended > at - 1]
        behind.append(later[0] - at if later else LONGEST)
        pauses.append(max(since, default=LONGEST) - (median(usual) if usual else 0.0))
    return {"next": max(behind), "pause": max(pauses), "gone": heard.gone - at}


def figures_of_layer(heard: Heard, job: Mapping[str, Any]) -> Figures:
    """The figures of a run by strategy `layer`."""
    numbers = [number for _, number in heard.ended]
    again = len(numbers) - len({*numbers})
    found = heard.new_step
    return {
        "next": LONGEST if found is None else found,
        "pause": max((b - a for (a, _), (b, _) in pairwise(heard.ended) if b > heard.signalled), default=LONGEST),
        "gone": heard.gone - heard.signalled,
        "again": float(again * job["train"]["batch_size"]),
    }


def job_of(data: str, strategy: str, workers: int, stall: float | None, runs: str) -> dict[str, Any]:
    """A run that lasts longer than a turn."""
    cluster: dict[str, Any] = {"workers": {"cpu": workers}, "wait": 120.0}
    cluster |= {} if stall is None else {"stall_timeout": stall}
    train = {"strategy": strategy, "epochs": 1000, "batch_size": 64}
    return {
        "data": {"path": data, "limit": 12_000, "validation": 1_000},
        "model": {"name": "quick"},
        "train": train,
        "cluster": cluster,
        "run": {"dir": runs},
    }


@contextmanager
def started(folder: Path) -> Iterator[Machines]:
    """Scheduler and server, as long as this lasts."""
    machines = Machines(folder)
    try:
        yield machines
    finally:
        machines.close()


# --- torchrun ---

SCRIPT = """
import os, sys, time, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, folder = distributed.get_rank(), sys.argv[1]
log = open(f"{folder}/rank-{rank}", "a", buffering=1)
net = nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(2048, 10))
saved, first = f"{folder}/checkpoint", 0
if os.path.exists(saved):
    kept = torch.load(saved)
    net.load_state_dict(kept["net"])
    first = kept["step"]
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
for step in range(first, 10**9):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    print(time.monotonic(), step, os.getpid(), file=log)
    if rank == 0 and step % 20 == 19:
        torch.save({"net": net.state_dict(), "step": step + 1}, saved + "-new")
        os.replace(saved + "-new", saved)
"""


def torchrun_turn(workers: int, kind: str, longest: float) -> Figures:
    """The ranks of one torchrun. The last one gets the signal."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        script = folder / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        options = [f"--nproc-per-node={workers}", "--standalone", "--max-restarts=3"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), own]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        own_store = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with subprocess.Popen(command, env=own_store, **quiet) as agent:
            try:
                return _torchrun_figures(folder, workers, kind, longest)
            finally:
                agent.kill()
                # each rank has a session of its own
                for pid in {row[2] for rank in range(workers) for row in _rows(folder, rank)}:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _rows(folder: Path, rank: int) -> list[tuple[float, int, int]]:
    """The time, the number and the process of each step that a rank has ended."""
    path = folder / f"rank-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(a), int(b), int(c)) for a, b, c in (line.split() for line in lines if line.count(" ") == 2)]


def _torchrun_figures(folder: Path, workers: int, kind: str, longest: float) -> Figures:
    deadline = time.monotonic() + LONGEST
    while len(_rows(folder, workers - 1)) < 50 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(SETTLED)
    pid, at = _rows(folder, workers - 1)[-1][2], time.monotonic()
    os.kill(pid, getattr(signal, f"SIG{kind}"))
    most = max(number for _, number, _ in _rows(folder, 0))
    while time.monotonic() < at + longest:
        later = [row for row in _rows(folder, 0) if row[0] > at + 0.5 and row[1] > most + 1]
        if later:
            again = sum(row[0] > at and row[1] <= most for row in _rows(folder, 0))
            return {"next": later[0][0] - at, "again": float(again * 64 * workers)}
        time.sleep(0.05)
    return {"next": longest}


# --- tables ---


def summary(turns: Sequence[Figures]) -> Figures:
    """Median and 95th percentile of each figure."""
    found: Figures = {"turns": len(turns)}
    for name in dict.fromkeys(name for each in turns for name in each):
        values = [each[name] for each in turns if name in each]
        high = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
        found |= {name: round(median(values), 3), f"{name}_p95": round(high, 3)}
    return found


def bar_of(strategy: str, kind: str) -> float | None:
    """The most that the next step may take; None: nothing is asked."""
    if strategy == "torchrun" or kind not in BARS:
        return None
    return LAYER_BAR if (strategy, kind) == ("layer", "KILL") else BARS[kind]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--stall-timeout", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kept = asked.json and asked.json.exists()
    found: dict[str, dict[str, Figures]] = json.loads(asked.json.read_text())["found"] if kept else {}
    missed = False
    with signals_end_it(), tempfile.TemporaryDirectory() as own, started(Path(own)) as machines:
        for strategy in asked.strategies:
            for kind in asked.signals:
                if strategy == "torchrun" and find_spec("torch") is None:
                    print("torchrun: torch is not installed", flush=True)
                    continue
                stall = asked.stall_timeout if kind == "STOP" else None
                job = job_of(asked.data, strategy, asked.workers, stall, str(Path(own, "runs")))
                turns = [
                    torchrun_turn(asked.workers, kind, LONGEST)
                    if strategy == "torchrun"
                    else turn(machines, job, asked.workers, kind)
                    for _ in range(asked.repeat)
                ]
                found.setdefault(strategy, {})[kind] = figures_now = summary(turns)
                bar = bar_of(strategy, kind)
                missed |= bar is not None and figures_now["next_p95"] > bar
                print(f"{strategy} SIG{kind}: {figures_now}" + (f" (bar {bar:g} s)" if bar else ""), flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps({"machine": machine(), "found": found}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
