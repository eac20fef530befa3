"""Images a second of a whole training step, and the seconds of each layer, forward and backward.

Local layers next to each other run as one chain and are timed as one: relu1+lrn1+maxpool1.

python -m benchmarks.step [--model quick lenet5 50:500] [--batch 128] [--threads 1] [--seconds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device, Pool, device_profile, keep_freed_memory, single_threaded_blas
from daskcnn.nn import LOSSES, SGD, Context, Layer, Layout, Sequential, build_model, init_network, loss_and_gradients
from daskcnn.nn.layer import Initializer, Params, Residual, Shape, State, glorot_uniform
from daskcnn.nn.local import Chain

IMAGE, CLASSES = (32, 32, 3), 10


@dataclass
class Clock:
    """Seconds of each pass, by layer and direction."""

    passes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.passes[name].append(perf_counter() - start)

    def medians(self) -> dict[str, float]:
        return {name: median(seconds) for name, seconds in self.passes.items()}


@dataclass(frozen=True)
class Timed(Layer):
    """A layer that notes how long its passes take."""

    name: str
    layer: Layer
    clock: Clock

    def out_shape(self, in_shape: Shape) -> Shape:
        return self.layer.out_shape(in_shape)

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        return self.layer.init(rng, in_shape, initial=initial)

    def initial_before(self, after: Initializer) -> Initializer:
        return self.layer.initial_before(after)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        with self.clock.time(f"{self.name} forward"):
            return self.layer.forward(params, state, x, ctx)

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Any, Params]:
        with self.clock.time(f"{self.name} backward"):
            return self.layer.backward(params, residual, dy, ctx)


def timed(model: Sequential, clock: Clock) -> Sequential:
    """The model with every layer timed, and every chain of local layers as one, named after all of them."""
    children, parts = model.layers, []
    while children:
        count = max(1, len(Chain.of([layer for _, layer in children]).layers))
        own = Sequential(children[:count])
        name = "+".join(name for name, _ in own.layers)
        parts.append((name, Timed(name, own, clock)))
        children = children[count:]
    return Sequential(tuple(parts))


def measure(model_name: str, batch: int, threads: int, seconds: float) -> dict[str, Any]:
    """Train on random images for so many seconds, the first two steps not counted; medians."""
    clock, device = Clock(), Device(pool=Pool(threads))
    model = timed(build_model(model_name, None, IMAGE, CLASSES), clock)
    params, state = init_network(model, 0, IMAGE, "float32")
    layout = Layout.of(params, state)
    vector = layout.flatten(params, state)
    params, state = layout.views(vector)
    weights, grads = vector[: layout.parameter_size], np.zeros(layout.parameter_size, "f")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*IMAGE[:2], batch, IMAGE[2]), dtype="float32")
    labels, loss, sgd = rng.integers(0, CLASSES, batch), LOSSES["softmax"], SGD(0.9, True, 1e-3)
    moving = sgd.init(weights)

    def step() -> None:
        with clock.time("step"):
            _, _, found, _ = loss_and_gradients(model, params, state, x, labels, loss, Context(device))
            with clock.time("descent"):
                sgd.step(weights, layout.flatten(found, {}, out=grads), moving, 1e-4, device)

    for _ in range(2):
        step()
    clock.passes.clear()
    end = perf_counter() + seconds
    while perf_counter() < end or len(clock.passes["step"]) < 3:
        step()
    return _figures(model_name, batch, clock.medians())


def _figures(model: str, batch: int, medians: dict[str, float]) -> dict[str, Any]:
    step = medians.pop("step")
    conv = sum(seconds for name, seconds in medians.items() if name.startswith("conv"))
    return {
        "model": model,
        "batch": batch,
        "images_per_second": batch / step,
        "step_seconds": step,
        "convolution_seconds": conv,
        "layers": medians,
    }


def show(figures: dict[str, Any]) -> str:
    """The figures as a table: milliseconds forward and backward of each layer, and their part of the step."""
    step, passes = figures["step_seconds"], figures["layers"]
    head = "{model}, batch {batch}: {images_per_second:.0f} images/s".format(**figures)
    rows = [f"{head}, {step * 1e3:.1f} ms a step, {figures['convolution_seconds'] / step:.0%} of it convolution"]
    for name in dict.fromkeys(key.split()[0] for key in passes):
        pair = [passes.get(f"{name} {direction}", passes.get(name, 0.0)) for direction in ("forward", "backward")]
        pair = [passes[name], 0.0] if name in passes else pair
        rows.append(f"  {name:24} {pair[0] * 1e3:8.2f} {pair[1] * 1e3:8.2f} ms {sum(pair) / step:6.1%}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", default=["quick", "lenet5", "50:500"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, a model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    keep_freed_memory()  # as a worker does
    with single_threaded_blas():
        results = [measure(model, arguments.batch, arguments.threads, arguments.seconds) for model in arguments.model]
    if arguments.json:
        print(
            json.dumps(
                {"processor": device_profile("cpu", 1).name, "threads": arguments.threads, "results": results}, indent=1
            )
        )
    else:
        print("\n".join(map(show, results)))


if __name__ == "__main__":
    main()
