"""A step of `bsp` over links of a speed: what of it is computing, waiting and communication, with parts sent ahead.

    sudo python -m benchmarks.steps_over_links --data data/cifar10.zarr [--model quick] [--batch 64] [--rounds 3]
        [--bandwidths "100 Mb/s" "1 Gb/s" unlimited] [--samples 20000] [--json FILE]

Every host is a network namespace whose link is limited both ways (`tc tbf`; needs root, `ip` and `tc`): two workers of
one thread, the server, and the driver. "whole" sends a step's gradients in one message, once the step is computed, as
before; "parts" sends what the way back has found while it goes on; "usual" tries both, as a run does, and "float16"
does so in that type. "alone" is one of the workers, which meets nobody. Ways and links take turns; medians of rounds,
milliseconds a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.network import netns
from benchmarks.network.cluster_netns import BANDWIDTHS, Driver
from benchmarks.network.netns import Host, Network, network
from daskcnn.arrays import cpu_count, device_profile
from daskcnn.events import RoundEnded
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import train_job
from daskcnn.runs.log import read_events

LINKS = ["100 Mb/s", "1 Gb/s", "unlimited"]
WAYS = ("alone", "whole", "parts", "usual", "float16")


# --- on the driver's host ---


def send(way: str) -> None:
    """On the server's worker: have gradients sent in this way, in the runs that follow."""
    from daskcnn.ps.parts_trial import PartsTrial

    found: Any = PartsTrial
    found.usual = getattr(found, "usual", found.sends)
    found.sends = {"whole": lambda *_: False, "parts": lambda *_: True}.get(way, found.usual)


def train(client: Client, given: argparse.Namespace, way: str) -> dict[str, float]:
    """Train one epoch; the slower worker's milliseconds of a step, by what they went into."""
    client.run(send, way)
    workers = 1 if way == "alone" else 2
    with tempfile.TemporaryDirectory() as runs:
        job = {
            "data": {"name": "cifar10", "path": given.data, "limit": given.samples, "validation": 500},
            "model": {"name": given.model},
            "train": {"strategy": "bsp", "epochs": 1, "batch_size": given.batch, "lr": 0.01, "optimizer": "sgd"},
            "cluster": {"workers": {"cpu": workers}, "wire": "float16" if way == "float16" else "float32"},
            "run": {"dir": runs, "checkpoint_every": 1000.0},
        }
        result = train_job(resolve(job), client=client)
        rounds = [each for each in read_events(result.run / "events.jsonl") if isinstance(each, RoundEnded)]
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    steps = (given.samples - 500) / given.batch
    for each in rounds:
        for name in ("busy", "wait", "communication"):
            seconds[each.worker][name] += getattr(each, name) / steps
    return max(seconds.values(), key=lambda own: sum(own.values()))


def inside(given: argparse.Namespace) -> None:
    """Train whenever a line names a way; a line of figures each time."""
    with Client(given.inside, timeout=60) as client:
        client.wait_for_workers(3, timeout=120)
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(train(client, given, line.strip())), flush=True)


# --- outside: hosts ---


netns.BURST = 0.0004
"""Seconds that a link may be ahead: with those of other benchmarks a whole message of a fast link would go at once."""


def measure(given: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Figures of every round, by link and way."""
    with network() as net:
        hosts = [net.host() for _ in range(5)]
        scheduler = net.scheduler(hosts[0])
        for host, name, resource in zip(hosts[2:], ("cpu-0", "cpu-1", "ps"), ("CPU", "CPU", "PS"), strict=True):
            net.worker(host, scheduler, name, resource)
        driver = Driver(net, hosts[1], command(given, scheduler))
        driver.answer()
        turn(net, hosts, driver, given.bandwidths[-1], "parts")  # loops are loaded, and convolutions measured
        found: dict[str, dict[str, list[dict[str, float]]]] = {link: defaultdict(list) for link in given.bandwidths}
        for _ in range(given.rounds):
            for link in given.bandwidths:
                for way in given.ways:
                    found[link][way].append(turn(net, hosts, driver, link, way))
        return found


def turn(net: Network, hosts: Sequence[Host], driver: Driver, link: str, way: str) -> dict[str, float]:
    for host in hosts:
        net.limit(host, BANDWIDTHS[link])
    driver.tell(f"{way}\n")
    return driver.answer()


def command(given: argparse.Namespace, scheduler: str) -> list[str]:
    options = ["--data", given.data, "--model", given.model, "--batch", str(given.batch)]
    return [
        sys.executable,
        "-m",
        "benchmarks.steps_over_links",
        "--inside",
        scheduler,
        *options,
        "--samples",
        str(given.samples),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--model", default="quick")
    options.add_argument("--batch", type=int, default=64, help="samples of a step")
    options.add_argument("--samples", type=int, default=20_000, help="of each turn, 500 for validation included")
    options.add_argument(
        "--bandwidths", nargs="+", choices=list(BANDWIDTHS), default=["100 Mb/s", "1 Gb/s", "unlimited"]
    )
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options.add_argument("--inside", metavar="ADDRESS", help=argparse.SUPPRESS)
    return options.parse_args(arguments)


def main() -> int:
    """Print a table."""
    given = parse()
    if given.inside:
        inside(given)
        return 0
    given.data = str(Path(given.data).resolve())
    found = measure(given)
    for link, ways in found.items():
        for way, rounds in ways.items():
            own = {name: median(each[name] for each in rounds) for name in rounds[0]}
            whole = sum(own.values())
            parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in own.items())
            share = own["communication"] / whole
            print(f"{link:>9} {way:8} {1e3 * whole:6.2f} ms: {parts}; communication {share:.1%}", flush=True)
    if given.json:
        machine = {"processor": device_profile("cpu", cpu_count()).name, "cores": cpu_count()}
        kept = {"machine": machine, "model": given.model, "batch": given.batch, "measured": found}
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
