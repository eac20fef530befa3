"""The part of a run's processor time that measuring the gradient noise takes.

    python -m benchmarks.noise_cost [--models quick resnet20] [--batch 64] [--workers 2 8] [--turns 15]

Processor time of one thread, medians. A step is the passes over --batch samples, of all workers together, without the
optimizer. At every fourth meeting the server takes the squared norms of the workers' gradients and of the merged one. A
worker that is alone makes a step from both halves of its minibatch; where its fixed time is less than a part in twenty
of a step it never does, and else once in as many steps as keep that to 1 %. Exit 1 where either is above 1 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from benchmarks.step import CLASSES, IMAGE
from daskcnn.arrays import Device, Pool, keep_freed_memory, single_threaded_blas
from daskcnn.events import CalibratedWorker
from daskcnn.nn import LOSSES, Context, Layout, build_model, init_network, loss_and_gradients
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES
from daskcnn.ps.gradient_noise import GradientNoise, takes_norms
from daskcnn.training.coordinator.growth import StepGrowth
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import Settings

BAR = 0.01
"""The most of a run's time."""
STEPS = 4000
"""Steps of a run, those with norms of every one included."""


def seconds(work: Callable[[], Any], turns: int) -> float:
    """The processor time of the work, at the median."""
    found = []
    for _ in range(turns + 1):
        begun = process_time()
        work()
        found.append(process_time() - begun)
    return median(found[1:])


def passes(model: str, batch: int) -> tuple[Callable[[], Any], int]:
    """The passes over a minibatch of noise, and the number of the network's parameters."""
    network, rng, device = build_model(model, None, IMAGE, CLASSES), np.random.default_rng(0), Device(pool=Pool(1))
    params, state = init_network(network, 0, IMAGE, "float32")
    H, W, C = IMAGE
    x = rng.standard_normal((H, W, batch, C), dtype=np.float32)
    labels, keys = rng.integers(0, CLASSES, batch), np.arange(batch, dtype=np.uint64)

    def work() -> None:
        ctx = Context(device, training=True, keys=keys)
        loss_and_gradients(network, params, state, x, labels, LOSSES["softmax"], ctx)

    return work, Layout.of(params, state).parameter_size


def of_server(parameters: int, workers: int, turns: int) -> float:
    """The processor time of a meeting's norms, on average over a run."""
    vectors = [np.ones(parameters, np.float32) for _ in range(workers + 1)]
    noise = GradientNoise()
    each = seconds(lambda: noise.met([8] * workers, [float(np.vdot(v, v)) for v in vectors]), turns)
    return each * sum(map(takes_norms, range(STEPS))) / STEPS


def steps_by_halves(step: float, fixed: float, batch: int) -> int:
    """The coordinator's choice: one step in this number is made by halves; 0: none."""
    settings = Settings(
        strategy="bsp",
        rule=RULES["bsp"](),
        partitioner=None,  # type: ignore[arg-type] # not asked for
        samples=STEPS * batch,
        validation=0,
        epochs=1,
        batch_size=batch,
        largest_step=STEPS * batch,
    )
    row = Measured(step / batch, CalibratedWorker(name="alone", step_fixed=fixed))
    return StepGrowth(settings, {}).measuring(Round("alone", 0, (), 0, (0.0, 1.0), alone=True), row).halved


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 where the bar is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=["quick", "resnet20"])
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--workers", nargs="+", type=int, default=[2, 8])
    options.add_argument("--turns", type=int, default=15)
    given, missed = options.parse_args(words), False
    keep_freed_memory()
    with single_threaded_blas():
        for model in given.models:
            whole, parameters = passes(model, given.batch)
            half, _ = passes(model, given.batch // 2)
            step = seconds(whole, given.turns)
            extra = max(0.0, 2 * seconds(half, given.turns) - step)  # also a step's fixed time
            every = steps_by_halves(step, extra, given.batch)
            parts = {f"{n} workers": of_server(parameters, n, given.turns) / step for n in given.workers}
            parts["a worker alone"] = extra / step / every if every else 0.0
            for who, part in parts.items():
                missed |= part > BAR
                print(f"{model}, {parameters:,} parameters, {who}: {100 * part:.3f} % of a step of {1e3 * step:.1f} ms")
            print(f"{model}, a worker alone: " + (f"1 step in {every} by halves" if every else "no step by halves"))
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
