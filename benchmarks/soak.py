"""A run under faults: workers and the server's host are killed, stopped, ended and cut off, and the disk is full.

    python -m benchmarks.soak --minutes 60 [--data data/cifar10.zarr] [--model quick] [--strategy bsp] [--every 20]
        [--links] [--json FILE] [--picture FILE]

An undisturbed run of an epoch says how many epochs fit into two thirds of the minutes; as many are then trained under a
fault every `--every` seconds, drawn by `--seed`. What was killed is started anew. With `--links` (root, `ip` and `tc`)
each worker is a host of its own, whose link is cut for half a minute too. As root that may mount a disk, that of the
runs is filled for a minute; else the run does without that fault.

Exit 1 where the run does not end by itself with every presentation made, an accuracy is more than 1.5 points below that
of an undisturbed run (`--compare`), or memory, open files, tasks or threads of scheduler, server or driver grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from distributed import Client

from benchmarks.network.netns import Host, Network, network, run, signals_end_it
from benchmarks.runs import command, machine
from daskcnn.ps import RULES

WORKERS, SERVERS = 3, 2
LOOK = 2.0
"""Seconds between two looks at the processes."""
GROWS = 1.25
"""Growth that is allowed from the second quarter of a run to the last."""
SPARE = {"memory": 64 << 20, "files": 16, "threads": 8, "tasks": 200}
"""And this much more, whatever it had."""
POINTS = 0.015
DISK = 256 << 20
DASK = (sys.executable, "-m", "dask")


@dataclass
class Cluster:
    """Scheduler and workers as a user starts them, each a process, with hosts of their own where there is a network."""

    folder: Path
    net: Network | None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a worker, or the scheduler, where it is not there."""
        own = self.processes.get(name)
        if own is not None and own.poll() is None:
            return
        file, common = str(self.folder / "scheduler.json"), ["--no-dashboard"]
        if name == "scheduler":
            address = self.net.gateway if self.net else "127.0.0.1"
            command = [*DASK, "scheduler", "--scheduler-file", file, "--host", address, "--port", "0", *common]
        else:
            if self.net is not None and name not in self.hosts:
                self.hosts[name] = self.net.host()
            host = self.hosts.get(name)
            resource = "PS=1" if name.startswith("ps") else "CPU=1"
            common += ["--name", name, "--resources", resource, "--nthreads", "1", "--no-nanny"]
            where = ["--host", host.address if host else "127.0.0.1", "--local-directory", str(self.folder / name)]
            command = [*DASK, "worker", "--scheduler-file", file, *common, *where]
            command = host.command(*command) if host else command
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def end(self) -> None:
        """Kill all of it."""
        for each in self.processes.values():
            with suppress(ProcessLookupError):
                each.kill()
            each.wait()

    @property
    def workers(self) -> list[str]:
        """The names of the workers that train."""
        return [f"w-{i}" for i in range(WORKERS)]


# --- faults: each begins, and returns what ends it and after how many seconds ---


Over = tuple[Callable[[], None], float]


def kill(cluster: Cluster, draw: random.Random) -> Over:
    """SIGKILL of a worker, which is started anew."""
    return _gone(cluster, draw.choice(cluster.workers), signal.SIGKILL, 5.0)


def kill_server(cluster: Cluster, draw: random.Random) -> Over:
    """SIGKILL of a host that is set apart for the server."""
    return _gone(cluster, f"ps-{draw.randrange(SERVERS)}", signal.SIGKILL, 5.0)


def terminate(cluster: Cluster, draw: random.Random) -> Over:
    """SIGTERM to a worker, which leaves in good order."""
    return _gone(cluster, draw.choice(cluster.workers), signal.SIGTERM, 12.0)


def stop(cluster: Cluster, draw: random.Random) -> Over:
    """SIGSTOP of a worker for 10 to 60 s."""
    own = cluster.processes[draw.choice(cluster.workers)]
    own.send_signal(signal.SIGSTOP)
    return lambda: own.send_signal(signal.SIGCONT), draw.uniform(10, 60)


def fill(cluster: Cluster, draw: random.Random) -> Over:
    """The disk of the runs is full for a minute."""
    full = cluster.folder / "disk" / "full"
    with suppress(OSError), full.open("wb") as file:
        for _ in range(DISK >> 20):
            file.write(bytes(1 << 20))
    return lambda: full.unlink(missing_ok=True), 60.0


def cut(cluster: Cluster, draw: random.Random) -> Over:
    """A worker's link loses every packet, both ways, for 30 s."""
    assert cluster.net is not None
    host = cluster.hosts[draw.choice(cluster.workers)]
    cluster.net.cut(host)
    return partial(cluster.net.mend, host), 30.0


def _gone(cluster: Cluster, name: str, signum: int, seconds: float) -> Over:
    with suppress(ProcessLookupError):
        cluster.processes[name].send_signal(signum)
    return lambda: cluster.start(name), seconds


# --- looking ---


def looked_at(pid: int) -> dict[str, float]:
    """Memory, open files and threads of a process; empty where it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return {}
        return {
            "memory": process.memory_info().rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
        }
    return {}


def scheduler_tasks(dask_scheduler: Any) -> int:
    """The tasks that the scheduler has; runs there."""
    return len(dask_scheduler.tasks)


@dataclass
class Watch:
    """Looks at scheduler, servers and driver. seen: of each process and number, the times and values."""

    cluster: Cluster
    driver: int
    begun: float = field(default_factory=time.monotonic)
    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    faults: list[tuple[float, str]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The faults that there were."""
        return {name for _, name in self.faults}

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun

    def look(self, client: Client) -> None:
        """Take the numbers of now."""
        pids = {"scheduler": self.cluster.processes["scheduler"].pid, "driver": self.driver}
        pids |= {f"ps-{i}": self.cluster.processes[f"ps-{i}"].pid for i in range(SERVERS)}
        found = {f"{name} {what}": value for name, pid in pids.items() for what, value in looked_at(pid).items()}
        with suppress(OSError, TimeoutError):
            found["scheduler tasks"] = client.run_on_scheduler(scheduler_tasks)
        for name, value in found.items():
            self.seen.setdefault(name, []).append((self.now, value))

    def grown(self) -> list[str]:
        """Numbers of processes that live as long as the run, and that have grown."""
        return [
            f"{name}: {before:,.0f}, then {after:,.0f}"
            for name, values in self.seen.items()
            if name.startswith(("scheduler", "driver")) and len(values) >= 16
            for before, after in [[median(v for _, v in part) for part in (quarter(values, 1), quarter(values, 3))]]
            if after > GROWS * before + SPARE[name.rpartition(" ")[2]]
        ]


def quarter(values: Sequence[tuple[float, float]], number: int) -> Sequence[tuple[float, float]]:
    """Return a quarter of them, from 0."""
    return values[len(values) * number // 4 : len(values) * (number + 1) // 4]


# --- runs ---


def job_command(given: argparse.Namespace, folder: Path, name: str, epochs: int) -> list[str]:
    """The command of a run of these epochs."""
    fewest = RULES[given.strategy].fewest if given.strategy in RULES else 1
    return [
        *(sys.executable, "-m", "daskcnn.run", "--scheduler-file", str(folder / "scheduler.json"), "--json"),
        *("--data", given.data, "--model", given.model, "--strategy", given.strategy, "--epochs", str(epochs)),
        *("--workers", f"cpu={fewest}..{WORKERS}", "--wait", "120", "--name", name, "--run-dir", str(folder / "disk")),
        *given.job,
    ]


def finished(command: Sequence[str]) -> dict[str, Any]:
    """Run a job undisturbed. Returns its summary."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"the undisturbed run ended with {ended.returncode}: {ended.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(ended.stdout)
    return summary


def disturbed(given: argparse.Namespace, cluster: Cluster, epochs: int) -> tuple[int, str, dict[str, Any], Watch]:
    """Train under faults. Returns the exit code, what was said, the summary, and what was seen."""
    faults = [kill, kill_server, terminate, stop, *([cut] if cluster.net else []), *([fill] if given.fills else [])]
    draw, over, due = random.Random(given.seed), list[tuple[float, Callable[[], None]]](), float(given.every)
    said = cluster.folder / "driver.log"
    with said.open("w") as errors, said.with_suffix(".json").open("w") as out:
        stall = ["--set", f"cluster.stall_timeout={given.stall}"]
        command = [*job_command(given, cluster.folder, "soak", epochs), *stall]
        driver = subprocess.Popen(command, stdout=out, stderr=errors)
        watch = Watch(cluster, driver.pid)
        with Client(scheduler_file=str(cluster.folder / "scheduler.json"), set_as_default=False) as client:
            while driver.poll() is None:
                time.sleep(LOOK)
                watch.look(client)
                for at, end in [each for each in over if each[0] <= watch.now]:
                    end()
                    over.remove((at, end))
                if due <= watch.now <= 60 * given.minutes:
                    early = watch.now <= 20 * given.minutes  # a full disk at the end is another matter: exit 6
                    fault = draw.choice([each for each in faults if early or each is not fill])
                    end, seconds = fault(cluster, draw)
                    seconds = min(seconds, 10 * given.minutes)  # a short run may be over sooner than it is reckoned
                    over.append((watch.now + seconds, end))
                    watch.faults.append((watch.now, fault.__name__))
                    print(f"{watch.now:7.0f} s  {fault.__name__}", flush=True)
                    due = watch.now + given.every
                if watch.now > 60 * given.minutes * 2 + 600:
                    driver.kill()
        for _, end in over:
            end()
    text = said.with_suffix(".json").read_text()
    return driver.wait(), said.read_text(), json.loads(text) if text.strip() else {}, watch


def presentations(run_folder: Path) -> tuple[int, int, int]:
    """Presentations that the log has, those of an epoch, and pushes that came again and were not merged twice.

    With `layer` there are no rounds: what was made again after a loss does not count, and the last epoch says the rest.
    """
    events = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]
    samples = next(event["samples"] for event in events if event["event"] == "start")
    rounds = [event["samples"] for event in events if event["event"] == "round"]
    whole = [round(event["epoch"] * samples) for event in events if event["event"] == "epoch"]
    repeated = sum(event["repeated"] for event in events if event["event"] == "server")
    return sum(rounds) if rounds else max(whole, default=0), samples, repeated


def draw_picture(watch: Watch, path: Path) -> None:
    """Each number over time, with the faults as lines."""
    from matplotlib.figure import Figure

    kinds = [*SPARE]
    figure = Figure(figsize=(9, 2.2 * len(kinds)), layout="constrained")
    for axes, kind in zip(figure.subplots(len(kinds), sharex=True), kinds, strict=True):
        for name, values in watch.seen.items():
            if name.endswith(kind):
                axes.plot(*zip(*values, strict=True), label=name.rpartition(" ")[0])
        for at, _ in watch.faults:
            axes.axvline(at, color="0.85", linewidth=0.8, zorder=0)
        axes.set_ylabel(kind)
        axes.legend(fontsize="x-small", loc="upper left")
    axes.set_xlabel("seconds; a line is a fault")
    figure.savefig(path)


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """A folder for the runs. Gives True if it is a disk of its own, which can be filled: as root that may mount one."""
    folder.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder))
    own = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield own
    finally:
        if own:
            run("umount", "--lazy", str(folder))


def soak(given: argparse.Namespace) -> dict[str, Any]:
    """Run it, and return what was found."""
    with ExitStack() as stack:
        stack.enter_context(signals_end_it())
        net = stack.enter_context(network()) if given.links else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True)))
        given.fills = stack.enter_context(disk(folder / "disk"))
        cluster = Cluster(folder, net)
        stack.callback(cluster.end)
        for name in ("scheduler", *(f"ps-{i}" for i in range(SERVERS)), *cluster.workers):
            cluster.start(name)
        first = finished(job_command(given, folder, "first", 1))
        epochs = given.epochs or max(2, round(40 * given.minutes / max(first["seconds"], 0.1)))
        print(f"{epochs} epochs of {first['seconds']:.1f} s", flush=True)
        code, said, summary, watch = disturbed(given, cluster, epochs)
        if given.picture:
            draw_picture(watch, given.picture)
        found = figures(folder / "disk" / "soak", code, said, summary, epochs, watch)
        keep(given, found)  # the run to compare with takes as long again, and may be broken off
        if given.compare and not code:
            usual = finished(job_command(given, folder, "undisturbed", epochs))["test"]["accuracy"]
            found["undisturbed"] = usual
            if found["accuracy"] < usual - POINTS:
                found["wrong"].append(f"accuracy {found['accuracy']}, undisturbed {usual}")
            keep(given, found)
    return found


def figures(
    run_folder: Path, code: int, said: str, summary: dict[str, Any], epochs: int, watch: Watch
) -> dict[str, Any]:
    """The figures of the run under faults; `wrong` has the lines of what should not have been."""
    made, samples, repeated = presentations(run_folder)
    found = wrong(code, said, summary, epochs, watch)
    if not code and (made < epochs * samples or (made > epochs * samples and kill_server.__name__ not in watch.names)):
        found.append(f"{made:,} presentations, {epochs * samples:,} are those of the job")
    return {
        "machine": machine(),
        "command": command(),
        "exit": code,
        "epochs": epochs,
        "presentations": made,
        "repeated": repeated,
        "samples": samples,
        "faults": len(watch.faults),
        "seconds": round(watch.now, 1),
        "wrong": found,
        "accuracy": summary.get("test") and summary["test"]["accuracy"],
        "seen": {name: [round(v) for _, v in own[:: max(1, len(own) // 50)]] for name, own in watch.seen.items()},
    }


def keep(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what was found to --json."""
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


def wrong(code: int, said: str, summary: dict[str, Any], epochs: int, watch: Watch) -> list[str]:
    """The faults that were found, a line each."""
    if code:
        return [f"the run ended with {code}: {said[-1500:]}"]
    found = [f"grown: {each}" for each in watch.grown()]
    if summary["status"] != "done" or summary["epochs"] != epochs:
        found.append(f"{summary['status']} after {summary['epochs']} epochs of {epochs}")
    return found


def main() -> int:
    """Exit code 1 where something is not as it should be."""
    head, _, more = __doc__.partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=head, epilog=more, formatter_class=form)
    options.add_argument("--minutes", type=float, default=3.0, help="of faults; default %(default)s")
    options.add_argument("--every", type=float, default=20.0, help="seconds between two faults; default %(default)s")
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--model", default="quick")
    options.add_argument("--strategy", default="bsp")
    options.add_argument(
        "--stall", type=float, default=30.0, help="cluster.stall_timeout under faults; default %(default)s"
    )
    options.add_argument("--epochs", type=int, help="instead of what fits into the minutes")
    options.add_argument("--seed", type=int, default=0, help="of the faults; default %(default)s")
    options.add_argument("--links", action="store_true", help="workers have hosts of their own; needs root")
    options.add_argument("--compare", action="store_true", help="train undisturbed too, and compare accuracies")
    options.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file")
    options.add_argument("--picture", type=Path, metavar="FILE", help="draw the numbers over time")
    options.add_argument("--job", nargs=argparse.REMAINDER, default=[], help="more flags of the runs")
    given = options.parse_args()
    given.data = str(Path(given.data).resolve())
    found = soak(given)
    print(json.dumps({key: value for key, value in found.items() if key != "seen"}, indent=2))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
