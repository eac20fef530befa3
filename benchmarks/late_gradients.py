"""Accuracy by epoch where each gradient steps the weights one step late, in one process.

    python -m benchmarks.late_gradients [--data data/cifar10.zarr] [--networks quick rules] [--seeds 2] [--epochs 3]
        [--json FILE]

All exchanges of `bsp` could go on behind the next step if that were computed before their gradient is merged. Nothing
else differs between the two sides: samples, order, rate and momentum are the same. Runs that FILE has are not made
again.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import LAYERS, RULES_NETWORK
from benchmarks.runs import add_command, kept_in, machine, save
from daskcnn.arrays import Array, Device, keep_freed_memory, single_threaded_blas
from daskcnn.job.dataset import opened
from daskcnn.job.network import training_samples
from daskcnn.job.resolve import resolve
from daskcnn.store.split import held_out
from daskcnn.training.replica import Replica

RATES = {"quick": 0.02, RULES_NETWORK: 0.01}
SAMPLES = 50_000


class Late:
    """Returns each gradient a number of steps after it was given; zeros until then."""

    def __init__(self, steps: int) -> None:
        self._steps, self._kept = steps, deque[Array]()

    def __call__(self, gradient: Array) -> Array:
        """Take a gradient, and return the one whose turn it is."""
        self._kept.append(np.array(gradient))
        return self._kept.popleft() if len(self._kept) > self._steps else np.zeros_like(gradient)


def accuracies(network: str, late: int, seed: int, epochs: int, data: str) -> list[float]:
    """The accuracy on the validation samples after each epoch, 64 samples a step."""
    job = resolve(
        {
            "data": {"name": "cifar10", "path": data, "validation": held_out(SAMPLES)},
            "model": {"layers": LAYERS[network]} if network in LAYERS else {"name": network},
            "train": {"strategy": "bsp", "epochs": epochs, "seed": seed, "batch_size": 64, "lr": RATES[network]}
            | {"optimizer": "sgd", "schedule": "poly", "threads": 1},
        }
    )
    dataset, device = opened(job.data), Device.of("cpu", threads=1)
    replica, gradients = Replica(job, dataset, device, clock=time.perf_counter), Late(late)
    n, found = training_samples(job, dataset), list[float]()
    for epoch in range(epochs):
        progress = epoch / epochs, (epoch + 1) / epochs
        replica.train(((0, n),), n, presentation=epoch, progress=progress, adjust=gradients)
        found.append(round(replica.evaluate(dataset.train, n, SAMPLES).quality, 4))
    return found


def main() -> int:
    """Print a line for each run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--networks", nargs="+", choices=RATES, default=[*RATES])
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--json", type=Path, metavar="FILE", help="keeps the runs")
    given = options.parse_args()
    kept: dict[str, Any] = kept_in(given.json, machine())
    parts = kept.setdefault("parts", {})
    keep_freed_memory()
    with single_threaded_blas():
        for seed, network, late in product(range(given.seeds), given.networks, (0, 1)):
            name = f"{network} late={late} epochs={given.epochs} seed={seed}"
            if name not in parts:
                parts[name] = accuracies(network, late, seed, given.epochs, given.data)
                if given.json:
                    add_command(kept)
                    save(given.json, kept)
            print(f"{name}: {', '.join(f'{each:.1%}' for each in parts[name])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
