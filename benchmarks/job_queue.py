"""A queue of jobs: seconds to a job's first task, memory and processor of an idle service, a list of 10,000 jobs.

    python -m benchmarks.job_queue [--jobs 10000] [--idle 60] [--turns 3] [--json FILE]
    python -m benchmarks.job_queue --part sharing [--samples 8000] [--json FILE] [--keep FOLDER]

Scheduler, worker, service and commands are processes of their own, as a user starts them. From `submit` to the first
task is measured from the start of the command to the worker's first task of the job. Seconds of the list are those of
the whole command, its start included; seconds of the processor stand beside them. Of the turns the median counts.
Exit 1 where a bar is missed: 6 s to the first task, 0.5 s for the list, 100 MB and 0.5 % of a core for the service.

`--part sharing` has two jobs on four workers that compute six times slower than they can, so that two cores are enough
for them. The long one trains six epochs; the short one comes a few seconds later and trains two. First each wants all
workers, so that they go one after the other; then each takes one to four. Seconds are the service's: of both from the
first submission to the last end, of the short one from its submission to its end. Bars: 1.1 and 0.6 times those of one
after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

from daskcnn.arrays import cpu_count, device_profile
from daskcnn.batch import spool as spools
from daskcnn.batch.records import STARTABLE, Attempt, Count, Submission
from daskcnn.batch.spool import Spool

BARS = {"first_task_seconds": 6.0, "list_seconds": 0.5, "idle_bytes": 100e6, "idle_share": 0.005}
DASKCNN = [sys.executable, "-c", "from daskcnn.cli import main; main()"]
DASK = [sys.executable, "-m", "dask"]
SHARED_BARS = {"both_ratio": 1.1, "short_ratio": 0.6}
DESKS, THROTTLED, APART = 4, "6", 5.0
LONG, SHORT = 6, 2  # epochs
SMALL = ["--set", "data.limit=200", "--set", "data.validation=50", "--model", "lenet5", "--epochs", "1"]


@contextmanager
def process(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended in the end."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
    with subprocess.Popen(command, **silent) as started:
        try:
            yield started
        finally:
            started.kill()


def full_spool(folder: Path, jobs: int) -> None:
    """A spool with this number of jobs that are done."""
    spools.DURABLE, durable = "OFF", spools.DURABLE  # 30,000 changes would wait for the disk
    with Spool(folder) as spool:
        new = [Submission(f"t{i}", "ann", {}, workers={"cpu": Count(1, 1)}) for i in range(jobs)]
        for job in spool.add(new, Path("/runs"), 0.0):
            spool.begin(job.id, ["desk-1"], 1.0, boot="", step=-1)
            spool.end(job.id, Attempt(0), 2.0, reached=(1.0, 0.5))
    spools.DURABLE = durable


def listing(folder: Path, turns: int) -> dict[str, float]:
    """Seconds of `daskcnn jobs`, and seconds of the processor."""
    walls, cpus = list[float](), list[float]()
    for _ in range(turns):
        before, begun = _of_children(), time.perf_counter()
        subprocess.run([*DASKCNN, "jobs", "--spool", str(folder)], check=True, stdout=subprocess.DEVNULL)
        walls.append(time.perf_counter() - begun)
        cpus.append(_of_children() - before)
    return {"list_seconds": statistics.median(walls), "list_cpu_seconds": statistics.median(cpus)}


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def idle(service: psutil.Process, seconds: float) -> dict[str, float]:
    """Memory of a service without jobs, and its share of a core."""
    before = sum(service.cpu_times()[:2])
    time.sleep(seconds)
    used = sum(service.cpu_times()[:2]) - before
    return {"idle_bytes": float(service.memory_info().rss), "idle_share": used / seconds}


def first_task(client: Client, address: str, folder: Path) -> float:
    """Seconds from the start of `daskcnn submit` to the first task of the job."""
    known = _tasks(client)
    begun = time.time()
    subprocess.run(
        [*DASKCNN, "submit", "--scheduler", address, "--workers", "cpu=1", *SMALL],
        check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (new := _tasks(client) - known):
        time.sleep(0.02)
    return min(at for _, at in new) - begun


def _tasks(client: Client) -> set[tuple[str, float]]:
    """Tasks that have ended, and when each began to compute."""
    streams = client.get_task_stream()
    return {(each["key"], min(part["start"] for part in each["startstops"])) for each in streams if each["startstops"]}


@contextmanager
def served(folder: Path, workers: int, **environment: str) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """A scheduler, workers and a service. Gives a client, and the service's process."""
    file, env = folder / "scheduler.json", {**os.environ, **environment}
    with ExitStack() as stack:
        how = ["--host", "127.0.0.1", "--scheduler-file", str(file), "--no-dashboard"]
        stack.enter_context(process(*DASK, "scheduler", "--port", "0", *how))
        worker = ["--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard", "--resources", "CPU=1"]
        for desk in range(1, workers + 1):
            own = ["--name", f"desk-{desk}", "--local-directory", str(folder / f"desk-{desk}")]
            stack.enter_context(process(*DASK, "worker", "--no-nanny", *worker, *own, env=env))
        while not file.exists():
            time.sleep(0.1)
        client = stack.enter_context(Client(scheduler_file=str(file)))
        client.wait_for_workers(workers)
        serve = [*DASKCNN, "serve", "--scheduler", client.scheduler.address, "--spool", str(folder / "spool")]
        log = stack.enter_context((folder / "serve.log").open("wb"))
        yield client, stack.enter_context(process(*serve, cwd=folder, stdout=log, stderr=log))


def two_jobs(address: str, folder: Path, spool: Spool, workers: str, job: list[str]) -> dict[str, float]:
    """Seconds of a long and a short job on all workers, by the service's clock."""
    numbers, submit = list[int](), [*DASKCNN, "submit", "--scheduler", address, "--workers", workers, *job]
    for epochs in (LONG, SHORT):
        printed = subprocess.run(
            [*submit, "--epochs", str(epochs)], check=True, cwd=folder, stdout=subprocess.PIPE, text=True
        ).stdout
        numbers.append(int(printed.split()[0]))
        while (state := spool.job(numbers[0]).state) != "running":
            assert state in STARTABLE, f"job {numbers[0]} is {state}: see daskcnn logs {numbers[0]} --spool"
            time.sleep(0.1)  # the spool tells nobody
        time.sleep(APART if epochs == LONG else 0)
    while spool.jobs():
        time.sleep(0.5)
    long, short = (spool.job(number) for number in numbers)
    assert long.state == short.state == "done", (long.why, short.why)
    return {
        "both_seconds": max(long.since, short.since) - long.submitted,
        "short_seconds": short.since - short.submitted,
    }


def sharing(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Two jobs that share workers against one after the other."""
    job = ["--model", "quick", "--strategy", "bsp", "--set", f"data.limit={options.samples}"]
    job += ["--data", str(options.data.absolute())] if options.data else []
    with served(folder, DESKS, DASKCNN_THROTTLE=THROTTLED) as (client, _), Spool(folder / "spool") as spool:
        address = client.scheduler.address
        before = two_jobs(address, folder, spool, f"cpu={DESKS}", job)
        shared = two_jobs(address, folder, spool, f"cpu=1..{DESKS}", job)
    found = {f"{name}_in_turn": value for name, value in before.items()} | shared
    names = (("both_ratio", "both_seconds"), ("short_ratio", "short_seconds"))
    return found | {ratio: shared[name] / before[name] for ratio, name in names}


def measured(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """All figures."""
    full_spool(folder / "full", options.jobs)
    found = listing(folder / "full", options.turns)
    with served(folder, 1) as (client, service):
        client.get_task_stream()  # begins to be kept
        address = client.scheduler.address
        time.sleep(10)
        found |= idle(psutil.Process(service.pid), options.idle)
        seconds = list[float]()
        for _ in range(options.turns):
            seconds.append(first_task(client, address, folder))
            with Spool(folder / "spool", must_exist=True) as spool:
                while spool.jobs():
                    time.sleep(0.5)
        found["first_task_seconds"] = statistics.median(seconds)
        found["bytes_after_jobs"] = float(psutil.Process(service.pid).memory_info().rss)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["single", "sharing"], default="single")
    parser.add_argument("--samples", type=int, default=8_000, help="of the jobs that share workers")
    parser.add_argument("--data", type=Path, help="their prepared data set; default: the built-in one of 8,000 samples")
    parser.add_argument("--keep", type=Path, help="folder for runs and logs, which stay there")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as kept:
        folder = Path(kept).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        found = (sharing if options.part == "sharing" else measured)(options, folder)
    bars = SHARED_BARS if options.part == "sharing" else BARS
    for name, value in found.items():
        print(f"{name:22} {value:14,.3f}" + (f"   bar {bars[name]:,.3f}" if name in bars else ""))
    if options.json:
        cpu = device_profile("cpu", cpu_count())
        machine = {"cpu": cpu.name, "threads": cpu.threads, "load": os.getloadavg()[0]}
        size = {"samples": options.samples} if options.part == "sharing" else {"jobs": options.jobs}
        text = json.dumps({"machine": machine, **size, **found}, indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return int(any(found[name] > bar for name, bar in bars.items()))


if __name__ == "__main__":
    sys.exit(main())
