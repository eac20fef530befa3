"""Layer sharding on two, three and four unequal workers, the slowest first, as in Marques' table 4.

    python -m benchmarks.studies.layer_unequal --data data/cifar10.zarr [--models 50:500 …] [--batches 64 …]
        [--no-relu] [--page FILE]

Workers have one thread each. `--slower` gives how many times slower than a core each is (DASKCNN_THROTTLE). One of
factor 2 keeps half of a core busy, so that two cores carry four. Each network has its ReLU, and with `--no-relu` it has
exactly the layers that the papers list. A step of the first worker by itself, one of the last, all at once each by
itself (the machine's own ceiling), sharded steps, and steps of the papers' star (`star_steps`) have their turns in each
round; medians count. What --results has is not measured again. All networks take 80 minutes, and `500:1500` 40 of
them: `--models` measures some.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import add_command, kept_in, machine, markdown, save, show, throttle
from benchmarks.sharded_steps import MODELS
from benchmarks.studies.layer_scaling import measure
from benchmarks.studies.layer_study import PAPER_CPUS
from daskcnn.cluster.link.connect import connect
from daskcnn.job.tables import Cluster, Workers

RESULTS = Path(__file__).parent / "results" / "layer_unequal.json"
SLOWER = (4.0, 3.0, 2.5, 2.0)
PLAIN = " without ReLU"
TIMES = {
    "one": "slowest alone",
    "last": "fastest alone",
    "step": "together",
    "star": "star",
    "star, both ways": "star, both ways",
}
"""Seconds of a step in the results, and what the page calls them."""
PARTS = ("together: convolutions", "other layers", "sending and waiting")
"""The parts of a step in fig. 6. They are those of the worker that computes longest."""


def page(results: Mapping[str, Any]) -> str:
    """The page: a row for each network, batch and set of workers."""
    times_of = [*TIMES.values(), *PARTS, "MB", "star, MB"]
    speedups = ["together", "star", "star, both ways", "each by itself", "of the fastest", "papers' best"]
    times, ratios = [], []
    for name, found in sorted(results["measured"].items(), key=lambda each: MODELS.index(each[0].split()[0])):
        what, _, factors = name.partition(": ")
        sent = [f"{found[key] / 1e6:.0f}" for key in ("bytes", "star, both ways, bytes")]
        parts = found["shards"], found["busy"] - found["shards"], found["step"] - found["busy"]
        times.append(
            [what, factors, *(f"{1e3 * each:.0f}" for each in (*(found[key] for key in TIMES), *parts)), *sent]
        )
        by_slowest = (found["one"] / found[key] for key in ("step", "star", "star, both ways"))
        own = [*by_slowest, found["ceiling"], found["last"] / found["step"]]
        papers = PAPER_CPUS[what.split()[0]][len(factors.split())]
        ratios.append([what, factors, *(f"{each:.2f}" for each in (*own, papers))])
    first = ["network, batch", "workers"]
    return "\n\n".join(
        [
            "# Layer sharding on unequal workers",
            f"`benchmarks/studies/layer_unequal.py`, {results['machine']['processor']}, {results['machine']['cores']} "
            'cores. Workers of one thread, by how many times slower than a core they are. "Together" is '
            '`strategy = "layer"`. "Star" sends as the papers do: the slowest worker is the master, and inputs, '
            "kernels and maps travel as doubles with each minibatch. The way back is left to the master, as "
            'Algorithms 1 and 2 leave it, or made by all ("both ways").',
            "Each part had one or two rounds of 8 or 10 s, and four steps at least: differences of some percent are "
            "noise.",
            "## Times as fast",
            '"Together" and "star" are against the slowest worker alone, as the papers have it. "Each by itself" is '
            'what the same workers make of this machine without sharding, on the same scale: the ceiling. "Of the '
            'fastest" is what "together" brings to the fastest of them.',
            markdown([*first, *speedups], ratios),
            "## Milliseconds of a step, and what it sends",
            'Seconds of a step are medians of steps. "Convolutions" and "other layers" are means of the worker that '
            "computes longest, and sending and waiting is what is left: where few steps fit, it can be below 0.",
            markdown([*first, *times_of], times) + "\n",
        ]
    )


def main() -> None:
    """Measure the first two of the workers, the first three, and so on, network by network."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--models", nargs="+", default=[*MODELS])
    options.add_argument("--batches", nargs="+", type=int, default=[64])
    options.add_argument("--slower", nargs="+", type=float, default=SLOWER, help="the slowest first")
    options.add_argument("--no-relu", action="store_true")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=10.0, help="of each part of a round; four steps at least")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--page", type=Path, metavar="FILE", help="write the tables to this page, and measure nothing")
    given = options.parse_args()
    results = kept_in(given.results, machine())
    measured = results.setdefault("measured", {})
    if given.page is None:
        add_command(results)
        for count in range(2, len(given.slower) + 1):
            with connect(Cluster(workers=Workers(cpu=count))) as client:
                for model, batch in itertools.product(given.models, given.batches):
                    name = named(model, batch, given.slower[:count], relu=not given.no_relu)
                    if name in measured:
                        continue
                    for number, factor in enumerate(given.slower[:count]):
                        throttle(client, factor, f"cpu-{number}")
                    how = {"rounds": given.rounds, "seconds": given.seconds, "workers": count}
                    measured[name] = measure(
                        client, given.data, model, batch, wire="float32", relu=not given.no_relu, star=True, **how
                    )
                    save(given.results, results)
                    print(name, {key: value for key, value in measured[name].items() if key != "kernels"}, flush=True)
    show(page(results), given.page)


def named(model: str, batch: int, slower: Sequence[float], *, relu: bool) -> str:
    """The name of a configuration in the results."""
    return f"{model} {batch}{'' if relu else PLAIN}: {' '.join(map('{:g}'.format, slower))}"


if __name__ == "__main__":
    main()
