"""Model parallelism by layers, simulated: consecutive layers on each worker, micro-batches that follow one another.

    python -m benchmarks.studies.pipeline [--workers 2 4] [--links 1.25e8 inf]

Hegde and Usmani's section 2 describes it: a layer fits the memory of one machine, and machines hand outputs on, one
after another. Nothing here does it. Seconds of the layers are those of `results/step.json`, one thread, batches of 128.
Batches are cut into equal micro-batches. A micro-batch takes its part of a batch's seconds. That favours pipelines: in
truth few samples take longer a sample. Workers are equal. Maps go forward and their gradients back over a link of its
own between neighbours, 1 ms a message besides; a worker computes meanwhile. All micro-batches go forward, then all
back, as in GPipe. Of all cuts and of 1 to 32 micro-batches the best counts.

`at most` is what no cut can exceed: the whole step by its longest layer. Beside it, sharded kernels of two real workers
(`results/layer_scaling.json`), best batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, prod
from pathlib import Path
from typing import Any

from benchmarks.runs import markdown
from benchmarks.step import CLASSES, IMAGE
from daskcnn.nn import build_model

STEPS = Path(__file__).parents[1] / "results" / "step.json"
SHARDED = Path(__file__).parent / "results" / "layer_scaling.json"
WORKERS, LINKS = (2, 4), (1.25e8, inf)
MICRO = (1, 2, 4, 8, 16, 32)
MESSAGE = 0.001
"""Seconds of a message, as in hegde_costs.py."""


@dataclass(frozen=True)
class Layer:
    """Seconds of a whole batch, forward and backward, and bytes of its output."""

    forward: float
    backward: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Seconds forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Best:
    """The best pipeline: how many times as fast as one worker, its cuts and micro-batches."""

    speedup: float
    cuts: tuple[int, ...]
    micro: int


def layers_of(measured: dict[str, Any]) -> dict[str, Layer]:
    """A network's layers by name, as they were timed: local ones next to each other may be one, "relu1+lrn1"."""
    shape, sizes = IMAGE, dict[str, int]()
    for name, layer in build_model(measured["model"], None, IMAGE, CLASSES).layers:
        shape = layer.out_shape(shape)
        sizes[name] = 4 * measured["batch"] * prod(shape)
    seconds = measured["layers"]
    names = dict.fromkeys(each.split()[0] for each in seconds if each.endswith(" forward"))
    return {
        name: Layer(seconds[f"{name} forward"], seconds[f"{name} backward"], sizes[name.split("+")[-1]])
        for name in names
    }


def step_seconds(stages: Sequence[Sequence[Layer]], micro: int, bandwidth: float) -> float:
    """Seconds of a step of these stages."""
    ready = [0.0] * micro
    for place, stage in enumerate(stages, 1):
        nbytes = stage[-1].nbytes if place < len(stages) else 0
        ready = _through(ready, sum(each.forward for each in stage), nbytes, bandwidth)
    ready = [max(ready)] * micro  # the last stage turns when it has all
    for stage, before in zip(reversed(stages), (*reversed(stages[:-1]), None), strict=True):
        nbytes = 0 if before is None else before[-1].nbytes
        ready = _through(ready, sum(each.backward for each in stage), nbytes, bandwidth)
    return ready[-1]


def _through(ready: Sequence[float], seconds: float, nbytes: int, bandwidth: float) -> list[float]:
    """When each micro-batch is at the next worker. ready: when each is at this one."""
    free = line = 0.0
    there = []
    for at in ready:
        free = max(free, at) + seconds / len(ready)
        line = max(line, free) + nbytes / len(ready) / bandwidth
        there.append(line + MESSAGE if nbytes else free)
    return there


def best(layers: Sequence[Layer], workers: int, bandwidth: float) -> Best:
    """The best cuts and micro-batches."""
    alone = sum(each.seconds for each in layers)
    found = []
    for cuts in combinations(range(1, len(layers)), workers - 1):
        stages = [layers[lo:hi] for lo, hi in zip((0, *cuts), (*cuts, len(layers)), strict=True)]
        found += [Best(alone / step_seconds(stages, micro, bandwidth), cuts, micro) for micro in MICRO]
    return max(found, key=lambda each: each.speedup)


def sharded(model: str) -> str:
    """The best measured speed-up of two workers with sharded kernels; a dash without one."""
    kept = json.loads(SHARDED.read_text(encoding="utf-8"))["measured"]
    found = [each["speedup"] for name, each in kept.items() if name.split()[0] == model]
    return f"{max(found):.2f}" if found else "–"


def rows(workers: Sequence[int], links: Sequence[float]) -> Iterator[list[str]]:
    """The table's head, and its rows."""
    places = [(k, link) for k in workers for link in links]
    names = ["no limit" if link == inf else f"{8 * link / 1e9:g} Gb/s" for _, link in places]
    yield [
        "network",
        "longest layer",
        "at most",
        *(f"{k}, {name}" for (k, _), name in zip(places, names, strict=True)),
        "2, sharded kernels",
    ]
    for each in json.loads(STEPS.read_text(encoding="utf-8"))["results"]:
        layers = layers_of(each)
        whole, longest = sum(own.seconds for own in layers.values()), max(layers, key=lambda name: layers[name].seconds)
        found = [best(list(layers.values()), k, link) for k, link in places]
        yield [
            f"`{each['model']}`",
            f"`{longest}`, {100 * layers[longest].seconds / whole:.0f} %",
            f"{whole / layers[longest].seconds:.2f}",
            *(f"{own.speedup:.2f} ({own.micro})" for own in found),
            sharded(each["model"]),
        ]


def table(rows: Iterator[list[str]]) -> str:
    """The same in Markdown."""
    return markdown(next(rows), rows, left=[0, 1])


def tables() -> Iterator[str]:
    """Yield the table of the default workers and links."""
    yield table(rows(WORKERS, LINKS))


def main() -> None:
    """Print the table: times as fast as one worker, and micro-batches."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    options.add_argument("--links", nargs="+", type=float, default=LINKS, help="bytes a second")
    given = options.parse_args()
    print(table(rows(given.workers, given.links)))


if __name__ == "__main__":
    main()
