"""Nanoseconds an element of every memory-bound layer, alone and chained, forward and backward, and of plain copying.

python benchmarks/layers.py [--shape 32 32 64 50] [--threads 1 2] [--rounds 7] [--block-kib 256] [--json]
An element is a number of the layer's input; `descent` and `bias` are SGD with momentum and a convolution's bias and
its gradient, over as many. Copying reads and writes every element once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from daskcnn.arrays import NUMPY, Device, Pool, device_profile, single_threaded_blas
from daskcnn.nn import SGD, Context, Layer, Sequential
from daskcnn.nn.channels import channel_sum
from daskcnn.nn.layers import LRN, AveragePool, BatchNorm, Dense, Dropout, L2Pool, MaxPool, ReLU, Tanh

Work = Callable[[], Any]


def chain(*layers: Layer) -> Sequential:
    return Sequential(tuple((type(layer).__name__, layer) for layer in layers))


LAYERS: dict[str, Layer] = {
    "relu": ReLU(),
    "tanh": Tanh(),
    "lrn": LRN(),
    "maxpool": MaxPool(2),
    "maxpool 3/2": MaxPool(3, 2),
    "averagepool": AveragePool(2),
    "l2pool": L2Pool(2),
    "dropout": Dropout(0.5),
    "batchnorm": BatchNorm(),
    "dense": Dense(10),
    "relu+averagepool": chain(ReLU(), AveragePool(2)),
    "relu+lrn+maxpool": chain(ReLU(), LRN(), MaxPool(2)),
}


def seconds(work: Work) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def passes(layer: Layer, x: Any, device: Device) -> tuple[Work, Work]:
    """Forward and backward of one layer on x, in training."""
    rng = np.random.default_rng(0)
    params, state, _ = layer.init(rng, (*x.shape[:2], x.shape[3]))
    params, state = ({k: v.astype(x.dtype) for k, v in tree.items()} for tree in (params, state))
    ctx = Context(device, training=True, keys=rng.integers(0, 1 << 63, x.shape[2], dtype=np.uint64))
    dy, _, residual = layer.forward(params, state, x, ctx)
    return lambda: layer.forward(params, state, x, ctx), lambda: layer.backward(params, residual, dy, ctx)


def others(x: Any, device: Device) -> dict[str, tuple[Work, Work | None]]:
    """Copying, the gradient of a bias, and descent."""
    y = np.empty_like(x)
    rows = device.pool.slices(len(x))
    weights, grads, velocity = (np.zeros(x.size, x.dtype) for _ in range(3))
    descent = SGD(0.9, nesterov=True, weight_decay=1e-3)
    return {
        "copy": (lambda: device.pool.map(lambda r: np.copyto(y[r], x[r]), rows), None),
        "bias's gradient": (lambda: channel_sum(x, device), None),
        "descent": (lambda: descent.step(weights, grads, velocity, 0.1, device), None),
    }


def measure(shape: tuple[int, ...], threads: int, rounds: int, block_bytes: int) -> dict[str, list[float | None]]:
    """Medians, ns an element, of forward and backward. All take turns, so that a busy machine meets all alike."""
    device = Device(replace(NUMPY, block_bytes=block_bytes), Pool(threads))
    x = np.random.default_rng(0).standard_normal(shape, dtype="float32")
    works: dict[str, tuple[Work, Work | None]] = {
        **others(x, device),
        **{name: passes(layer, x, device) for name, layer in LAYERS.items()},
    }
    times: dict[tuple[str, int], list[float]] = {(name, i): [] for name in works for i in (0, 1)}
    for _ in range(rounds + 1):
        for name, pair in works.items():
            for i, work in enumerate(pair):
                if work is not None:
                    times[name, i].append(seconds(work) / x.size * 1e9)
    device.pool.close()
    return {name: [median(t[1:]) if (t := times[name, i]) else None for i in (0, 1)] for name in works}


def show(shape: tuple[int, ...], results: dict[int, dict[str, list[float | None]]]) -> str:
    """A table: a row for each layer, forward and backward for each number of threads."""
    head = "".join(f"{f'{n} thr. fwd':>12}{'bwd':>8}" for n in results)
    lines = [f"{'×'.join(map(str, shape)):20}{head}   ns an element"]
    for name in next(iter(results.values())):
        cells = "".join(f"{_cell(fwd):>12}{_cell(bwd):>8}" for fwd, bwd in (r[name] for r in results.values()))
        lines.append(f"{name:20}{cells}")
    return "\n".join(lines)


def _cell(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", nargs=4, type=int, default=[32, 32, 64, 50], metavar=("H", "W", "N", "C"))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    parser.add_argument("--block-kib", type=int, default=NUMPY.block_bytes >> 10, help="what the backend calls a block")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    shape = tuple(options.shape)
    with single_threaded_blas():
        results = {n: measure(shape, n, options.rounds, options.block_kib << 10) for n in options.threads}
    if options.json:
        machine = {"processor": device_profile("cpu", 1).name, "block_kib": options.block_kib}
        print(json.dumps({**machine, "shape": shape, "ns_per_element": results}, indent=1))
    else:
        print(show(shape, results))


if __name__ == "__main__":
    main()
