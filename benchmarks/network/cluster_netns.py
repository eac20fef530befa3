"""Layer sharding over slow links: scheduler, workers and driver as hosts of their own, measured and predicted.

    sudo python -m benchmarks.network.cluster_netns --data data/cifar10.zarr [--models 50:500 …] [--batches 64 …]
        [--bandwidths "5 MB/s" "100 Mb/s" "1 Gb/s" unlimited] [--wire float16] [--parts 2] [--workers 2]
        [--slower 4 2] [--star] [--json FILE]

Every host is a network namespace whose link is limited both ways (`tc tbf`; needs root, `ip` and `tc`). Links of every
speed have their turn in each round. What a step takes and moves is measured beside what the simulator says of the same
kernels by the workers' calibration; what a step over the fastest link takes beyond that is the overhead of all of them.
--slower: how many times slower than a core each worker is. --star: steps of the papers' star too (`star_steps`), of
which the first worker is the master, and steps of that worker by itself. Exit 1 where a prediction over another link
than the fastest is more than 10 % off. All namespaces are gone afterwards, those of an earlier broken run too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.network.netns import FRAMING, Host, Network, network
from benchmarks.runs import kept_in, throttle
from benchmarks.sharded_steps import MODELS, Sharded, alone_on, opened
from benchmarks.star_steps import star_on
from daskcnn.arrays import cpu_count, device_profile
from daskcnn.cluster.run.context import RunContext
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.planning.simulate import scenario_of
from daskcnn.sim.cluster import SimulatedCluster, Worker
from daskcnn.sim.sharded_step import Direct

BANDWIDTHS: dict[str, float | None] = {"5 MB/s": 5e6, "100 Mb/s": 1.25e7, "1 Gb/s": 1.25e8, "unlimited": None}
"""Bytes a second; headers are part of them."""
CLOSE = 0.1
"""How far off a prediction may be."""

# --- on the driver's host ---


def moved() -> tuple[int, int]:
    """Bytes that this host has sent and got since it is there; runs on workers."""
    import psutil

    links = [link for name, link in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(link.bytes_sent for link in links), sum(link.bytes_recv for link in links)


def inside(given: argparse.Namespace) -> None:
    """Measure on the cluster at this address whenever a line says so; a line of figures each time."""
    with Client(given.inside, timeout=60) as client:
        client.wait_for_workers(given.workers, timeout=120)
        for number, factor in enumerate(given.slower):
            throttle(client, factor, f"cpu-{number}")
        for model in given.models:
            for batch in given.batches:
                more = {"workers": given.workers, "parts": given.parts}
                with opened(client, given.data, model, batch, given.wire, **more) as context:
                    sharded = Sharded(context)
                    _say({"calibration": {name: asdict(own) for name, own in context.calibrations.items()}})
                    while sys.stdin.readline() == MEASURE:
                        _say(_measured(client, sharded, given.seconds) | (_star(context, given) if given.star else {}))


MEASURE, NEXT = "measure\n", "next\n"


def _say(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def _measured(client: Client, sharded: Sharded, seconds: float) -> dict[str, Any]:
    first, begun, scheduler = sharded.number, client.run(moved), client.run_on_scheduler(time.process_time)
    steps, counters, count = sharded.seconds(seconds)
    ended, scheduler = client.run(moved), client.run_on_scheduler(time.process_time) - scheduler
    members, all_of_them = sharded.context.workers.alive.values(), sharded.number - first
    return {
        "steps": steps,
        "home": sharded.graph.home,
        "kernels": sharded.shares.by_worker(),
        "divided": next(iter(sharded.shares.event().divided.values())),
        "scheduler": scheduler / all_of_them,
        "busy": {name: own.busy / count for name, own in counters.items()},
        "up": {name: own.bytes_up / count for name, own in counters.items()},
        "down": {name: own.bytes_down / count for name, own in counters.items()},
        "link": {m.name: (ended[m.address][0] - begun[m.address][0]) / all_of_them for m in members},
    }


def _star(context: RunContext, given: argparse.Namespace) -> dict[str, Any]:
    alone = alone_on(context, sorted(context.workers.alive)[:1], given.seconds)[0]
    found = {name: star_on(context, given.seconds, back=back) for name, back in (("forth", False), ("both", True))}
    return {"first_alone": 1 / alone, "star": {name: step for name, (step, _) in found.items()}}


# --- outside: hosts, and predictions ---


class Driver:
    """The process on the driver's host, told what to do line by line."""

    def __init__(self, net: Network, host: Host, command: Sequence[str]) -> None:
        self._net = net
        self._process = net.talk(host, *command)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next figures; whatever else it says is passed over. Raises SystemExit where it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"the driver ended with {self._process.wait()}; the hosts said:\n{self._net.logs()}")


def measure(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All configurations, by name; of each its calibration, and rows by the speed of the links."""
    with network() as net:
        hosts = [net.host() for _ in range(2 + given.workers)]
        scheduler = net.scheduler(hosts[0])
        for i, host in enumerate(hosts[2:]):
            net.worker(host, scheduler, f"cpu-{i}")
        driver = Driver(net, hosts[1], _command(given, scheduler))
        return {
            f"{model} {batch}": _in_turns(net, hosts, driver, given)
            for model in given.models
            for batch in given.batches
        }


def _command(given: argparse.Namespace, scheduler: str) -> list[str]:
    options = ["--data", given.data, "--wire", given.wire, "--seconds", f"{given.seconds}"]
    options += ["--slower", *map(str, given.slower), *(["--star"] if given.star else [])]
    counts = ["--workers", f"{given.workers}", "--parts", f"{given.parts}", "--batches", *map(str, given.batches)]
    return [
        sys.executable,
        "-m",
        "benchmarks.network.cluster_netns",
        "--inside",
        scheduler,
        *options,
        *counts,
        "--models",
        *given.models,
    ]


def _in_turns(net: Network, hosts: Sequence[Host], driver: Driver, given: argparse.Namespace) -> dict[str, Any]:
    """One configuration over links of every speed, round after round, so that what disturbs one disturbs all."""
    calibration = driver.answer()["calibration"]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in given.bandwidths}
    for _ in range(given.rounds):
        for name, own in rounds.items():
            for host in hosts:
                net.limit(host, BANDWIDTHS[name])
            driver.tell(MEASURE)
            own.append(driver.answer())
    for host in hosts:
        net.limit(host, None)
    driver.tell(NEXT)
    return {"calibration": calibration, "rows": {name: _row(own) for name, own in rounds.items()}}


def _row(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds: steps together, other figures from the middle one."""
    steps = sorted(each for own in rounds for each in own["steps"])
    middle = sorted(rounds, key=lambda own: median(own["steps"]))[len(rounds) // 2]
    return {**middle, "steps": len(steps), "step": median(steps), "least": steps[0], "most": steps[-1]}


def job_of(given: argparse.Namespace, model: str, batch: int) -> Job:
    return resolve(
        {
            "data": {"name": "cifar10", "path": given.data},
            "model": {"name": model},
            "train": {"strategy": "layer", "batch_size": batch, "sub_batches": given.parts},
            "cluster": {"wire": given.wire},
        }
    )


def simulated(job: Job, calibration: dict[str, Any], row: dict[str, Any], rate: float | None) -> Direct:
    """The step of a row's kernels over such links, by the calibration."""
    workers = [
        Worker(
            name=name,
            images_per_second=1 / own["seconds_per_sample"],
            conv_seconds=own["conv_seconds"],
            conv_fixed=own["conv_fixed"],
            rest_seconds=own.get("rest_seconds"),
            bandwidth=rate and rate * FRAMING,
        )
        for name, own in calibration.items()
    ]
    chosen, kernels = scenario_of(job, SimulatedCluster(worker=workers), "measured"), row["kernels"]
    layers = next(iter(kernels.values()))
    given = {layer: {name: own[layer] for name, own in kernels.items()} for layer in layers}
    first = row["divided"][next(iter(layers))]
    return replace(chosen.sharding(chosen.cluster), given=given, at=row["home"], first_conv=first)


def compare(job: Job, name: str, found: dict[str, Any]) -> None:
    """Put what the simulator says beside each measured row; the fastest link's tells the overhead."""
    rows, calibration = found["rows"], found["calibration"]
    first = max(rows, key=lambda link: BANDWIDTHS[link] or math.inf)
    overhead = rows[first]["step"] - simulated(job, calibration, rows[first], BANDWIDTHS[first]).step().seconds
    for link, row in rows.items():
        model = simulated(job, calibration, row, BANDWIDTHS[link])
        step = model.step()
        row["overhead"], row["predicted"] = overhead, step.seconds + overhead
        row["predicted_bytes"], row["tasks"] = sum(step.up), model.plan.task_count
        row["off"] = row["predicted"] / row["step"] - 1
        print(
            f"{name:14} {link:>9}: {1e3 * row['step']:7.0f} ms ({1e3 * row['least']:.0f} to {1e3 * row['most']:.0f}), "
            f"predicted {1e3 * row['predicted']:7.0f} ms ({100 * row['off']:+.0f} %); "
            f"{sum(row['up'].values()) / 1e6:.2f} MB, predicted {row['predicted_bytes'] / 1e6:.2f}, "
            f"on the links {sum(row['link'].values()) / 1e6:.2f}",
            flush=True,
        )
        if "star" in row:
            times = row["first_alone"], row["star"]["forth"], row["star"]["both"]
            alone, forth, both = (f"{1e3 * each:.0f} ms" for each in times)
            print(f"{name:14} {link:>9}: the first alone {alone}, star {forth}, both ways {both}", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--models", nargs="+", default=list(MODELS[:1]))
    options.add_argument("--batches", nargs="+", type=int, default=[64])
    options.add_argument("--bandwidths", nargs="+", choices=list(BANDWIDTHS), default=list(BANDWIDTHS))
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--parts", type=int, default=1, help="sub-batches of a minibatch")
    options.add_argument("--slower", nargs="*", type=float, default=[], help="factors of the workers, in their order")
    options.add_argument("--star", action="store_true", help="steps as the papers send them too")
    options.add_argument("--wire", choices=("float32", "float16"), default="float32")
    options.add_argument("--rounds", type=int, default=3, help="in each of which all links have their turn")
    options.add_argument("--seconds", type=float, default=5.0, help="of each turn; four steps at least")
    options.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    options.add_argument("--inside", metavar="ADDRESS", help=argparse.SUPPRESS)
    return options.parse_args(arguments)


def main() -> int:
    """Exit code 1 where a prediction is off."""
    given = parse()
    if given.inside:
        inside(given)
        return 0
    given.data = str(Path(given.data).resolve())
    machine = {"processor": device_profile("cpu", cpu_count()).name, "cores": cpu_count()}
    kept = {"measured": {}, **kept_in(given.json, machine)}
    good = True
    for name, found in measure(given).items():
        model, batch = name.split()
        compare(job_of(given, model, int(batch)), name, found)
        good &= all(abs(row["off"]) <= CLOSE for row in found["rows"].values())
        slower = f", slower {' '.join(map('{:g}'.format, given.slower))}" if given.slower else ""
        kept["measured"][f"{name} {given.wire} {given.workers} workers, {given.parts} parts{slower}"] = found
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print("every prediction is within 10 %" if good else "a prediction is more than 10 % off")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
