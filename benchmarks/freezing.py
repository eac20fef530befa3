"""Seconds of a training step on one thread with and without frozen layers, in turns.

python -m benchmarks.freezing [--model quick 50:500] [--freeze conv1 conv2] [--batch 128] [--seconds 10] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from daskcnn.arrays import Device, device_profile, single_threaded_blas
from daskcnn.nn import (
    LOSSES,
    SGD,
    Context,
    Descent,
    Layout,
    Sequential,
    StepPace,
    build_model,
    freeze,
    init_network,
    loss_and_gradients,
)

IMAGE, CLASSES = (32, 32, 3), 10


def step_of(model: Sequential, batch: int) -> Callable[[], object]:
    """A whole step of this network on random images: both passes, and the optimiser on what is trained."""
    params, state = init_network(model, 0, IMAGE, "float32")
    layout = Layout.of(params, state)
    vector = layout.flatten(params, state)
    params, state = layout.views(vector)
    grads = np.zeros(layout.parameter_size, "f")
    rng, device, sgd = np.random.default_rng(0), Device(), SGD(0.9, True, 1e-3)
    descent, moving = Descent(sgd, model.frozen), sgd.init(grads)
    x = rng.standard_normal((*IMAGE[:2], batch, IMAGE[2]), dtype="float32")
    labels = rng.integers(0, CLASSES, batch)
    trained = descent.spans(layout)

    def step() -> None:
        _, _, found, _ = loss_and_gradients(model, params, state, x, labels, LOSSES["softmax"], Context(device))
        layout.flatten(found, {}, out=grads)
        descent.step(vector, grads, moving, trained, StepPace(1e-4), device)

    return step


def measure(name: str, patterns: list[str], batch: int, seconds: float) -> dict[str, Any]:
    """Medians of the steps, the first two of each kind not counted."""
    whole = build_model(name, None, IMAGE, CLASSES)
    steps = {"trained": step_of(whole, batch), "frozen": step_of(freeze(whole, patterns, IMAGE), batch)}
    passes: dict[str, list[float]] = {kind: [] for kind in steps}
    end = perf_counter() + seconds
    while perf_counter() < end or len(passes["frozen"]) < 5:
        for kind, step in steps.items():
            begun = perf_counter()
            step()
            passes[kind].append(perf_counter() - begun)
    trained, frozen = (median(own[2:]) for own in passes.values())
    return {"model": name, "freeze": patterns, "batch": batch, "trained": trained, "frozen": frozen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", default=["quick", "50:500"])
    parser.add_argument("--freeze", nargs="+", default=["conv*"], metavar="PATTERN")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring, a model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    with single_threaded_blas():
        results = [measure(m, arguments.freeze, arguments.batch, arguments.seconds) for m in arguments.model]
    if arguments.json:
        print(json.dumps({"processor": device_profile("cpu", 1).name, "threads": 1, "results": results}, indent=1))
        return
    for own in results:
        ratio = own["trained"] / own["frozen"]
        print(
            f"{own['model']}, batch {own['batch']}: {own['trained'] * 1e3:.1f} ms a step, {own['frozen'] * 1e3:.1f} ms "
            f"with {', '.join(own['freeze'])} frozen: {ratio:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
