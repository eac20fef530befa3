"""Hegde and Usmani's cost model beside what was measured, and their aggregation in log k rounds beside our two ways.

    python -m benchmarks.studies.hegde_costs [--figures FOLDER]

It measures nothing, takes seconds, and prints three tables:

1. Bytes of each rule's run in `results/rules.json`, two real workers, beside the model's. The model has one of the k
   machines keep the sum, so that 2·p·(k - 1) travel in a meeting; our server is none of the workers, so that 2·p·k do.
   Its θ·p of Downpour has no weights that come back.
2. Milliseconds of a meeting of two in `results/meeting.json` beside 2·log k·(L + p/B), with L and B of plain sockets.
3. Milliseconds of a meeting of 2 to 64 workers at 1 Gb/s: the server and alltoall-sum-allgather (ASA) simulated, the
   tree of log k rounds there and back by the model, which nothing here runs. Each has the same cost a message.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import TWO_CONVOLUTIONS
from benchmarks.network.simulated_workers import GIGABIT
from benchmarks.runs import markdown
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Figure
from daskcnn.sim.cluster import Costs, Server, SimulatedCluster, Worker

RULES = Path(__file__).parent / "results" / "rules.json"
MEETINGS = Path(__file__).parents[1] / "results" / "meeting.json"
MEETS = ("bsp", "admm", "parallel-sgd")
WORKERS = (2, 4, 8, 16, 32, 64)
VECTORS: Mapping[str, int] = {"138 kB": 34_538, "AlexNet's 244 MB": 60_965_224}
"""Numbers of a vector: the network of the rules' study, and AlexNet (`daskcnn model alexnet`)."""
LATENCY, EXCHANGE = 0.0002, 0.0008
"""Seconds of a message on the link and of its handling, as in sooner.py."""
STEPS = 10, 30
SERVER, TREE, ASA = "server, simulated", "tree of log k rounds, by the model", "ASA, simulated"


def kept(path: Path) -> Any:
    """A file of results."""
    return json.loads(path.read_text(encoding="utf-8"))


# --- 1: bytes ---


def bytes_of_rules() -> Iterator[list[str]]:
    """Measured and modelled bytes of each rule of the model."""
    yield ["run on two workers", "messages up", "measured, MB", "the model, MB", "measured / model"]
    for name, run in kept(RULES)["parts"].items():
        rule = name.split()[0]
        if rule not in (*MEETS, "downpour") or "bytes" not in run:
            continue
        vector = 4 * VECTORS["138 kB"]
        modelled = run["pushes"] * vector if rule == "downpour" else run["pushes"] / 2 * 2 * vector * (2 - 1)
        words = " ".join(name.split()[:2])
        yield [
            words,
            str(run["pushes"]),
            f"{run['bytes'] / 1e6:.1f}",
            f"{modelled / 1e6:.1f}",
            f"{run['bytes'] / modelled:.2f}",
        ]


# --- 2: a meeting of two ---


def meetings_of_two() -> Iterator[list[str]]:
    """Measured and modelled milliseconds of a meeting, by length of the vector."""
    found = kept(MEETINGS)["results"]
    for work, cores in ((0.0, "idle cores"), (10.0, "busy cores")):
        ways: dict[str, dict[int, float]] = {}
        for each in found:
            if each["work_ms"] == work:
                ways.setdefault(each["kind"], {})[each["size"]] = each["median"]
        sizes = list(ways["plain sockets"])
        slope, latency = np.polyfit(sizes, [ways["plain sockets"][size] / 2 for size in sizes], 1)
        if work == 0.0:
            yield ["a meeting of two, ms", *(f"{size / 1e3:,.0f} kB" for size in sizes)]
        modelled = {size: 2 * (max(0.0, latency) + slope * size) for size in sizes}
        for name, own in (("2·log k·(L + p/B)", modelled), *((n, w) for n, w in ways.items() if n != "plain sockets")):
            yield [f"{name}, {cores}", *(f"{own[size]:.2f}" if size in own else "–" for size in sizes)]


# --- 3: many ---


def tree(workers: int, numbers: int) -> float:
    """Seconds of an aggregation and of the broadcast of its result, in log k rounds each (section 5.1.1)."""
    return 2 * math.log2(workers) * (LATENCY + EXCHANGE + 4 * numbers / GIGABIT)


def simulated(exchange: str, workers: int, numbers: int) -> float:
    """Seconds that a step of BSP takes longer with its meeting than without."""
    link = {"bandwidth": GIGABIT, "latency": LATENCY}
    return _step(exchange, workers, numbers, link, EXCHANGE) - _step(exchange, workers, 1, {}, 0.0)


def _step(exchange: str, workers: int, numbers: int, link: Mapping[str, float], handling: float) -> float:
    """Seconds of a step in the midst of a run, of one sample for each worker."""
    few, many = (_run(exchange, workers, numbers, link, handling, steps) for steps in STEPS)
    return (many - few) / (STEPS[1] - STEPS[0])


def _run(exchange: str, workers: int, numbers: int, link: Mapping[str, float], handling: float, steps: int) -> float:
    job = resolve(
        {
            "data": {"name": "cifar10", "limit": steps * workers + 100, "validation": 100},
            "model": {"layers": TWO_CONVOLUTIONS},
            "train": {"strategy": "bsp", "partition": "udpa", "epochs": 1, "increments": 1, "batch_size": 1},
            "rule": {"batch": "worker", "exchange": exchange},
            "cluster": {"workers": {"cpu": workers}},
        }
    )
    cluster = SimulatedCluster(
        server=Server(bandwidth=link.get("bandwidth")),
        costs=Costs(exchange=handling),
        worker=[Worker(name="worker", count=workers, images_per_second=1000.0, **link)],
    )
    scenario = replace(scenario_of(job, cluster, "this benchmark"), numbers=numbers)
    return simulate(scenario).report.seconds or 0.0


Curves = dict[str, dict[int, float]]


def by_workers(numbers: int) -> Curves:
    """Seconds of a meeting by way and by workers."""
    return {
        SERVER: {k: simulated("allreduce", k, numbers) for k in WORKERS},
        TREE: {k: tree(k, numbers) for k in WORKERS},
        ASA: {k: simulated("asa", k, numbers) for k in WORKERS},
    }


def meetings_of_many(curves: Mapping[str, Curves]) -> Iterator[list[str]]:
    """The third table."""
    yield ["a meeting, ms", *(f"{k} workers" for k in WORKERS)]
    for vector, ways in curves.items():
        for way, own in ways.items():
            yield [f"{vector}: {way}", *(f"{1e3 * own[k]:,.{1 if own[k] < 0.1 else 0}f}" for k in WORKERS)]


def figures(curves: Mapping[str, Curves]) -> Iterator[Figure]:
    """The third table as pictures."""
    for (vector, ways), name in zip(curves.items(), ("small", "alexnet"), strict=True):
        drawn = {way: (list(own), list(own.values())) for way, own in ways.items()}
        title = f"a meeting at 1 Gb/s, {vector}"
        yield Figure(f"hegde-meeting-{name}", title, "", "workers", "seconds", drawn, doubling=True)


def table(rows: Iterator[list[str]]) -> str:
    """Rows in Markdown."""
    return markdown(next(rows), rows, left=[0])


def tables() -> Iterator[str]:
    """Yield the tables of meetings."""
    yield table(meetings_of_two())
    yield table(meetings_of_many({name: by_workers(numbers) for name, numbers in VECTORS.items()}))


def main() -> None:
    """Print the tables; draw the last one where asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--figures", type=Path, metavar="FOLDER")
    given = options.parse_args()
    curves = {name: by_workers(numbers) for name, numbers in VECTORS.items()}
    print(table(bytes_of_rules()), table(meetings_of_two()), table(meetings_of_many(curves)), sep="\n\n")
    for figure in figures(curves) if given.figures else ():
        print(draw(figure, given.figures / f"{figure.name}.svg"))


if __name__ == "__main__":
    main()
