"""GB/s of every compiled loop, there and back, beside plain copying of as many bytes in the same run.

python -m benchmarks.compiled [--shape 32 32 64 50] [--threads 1 2] [--rounds 9] [--only relu lrn] [--json]
A loop's bytes are what it must read and write at least: a map that is read twice counts once. Copying and all loops
take turns, so that a busy machine meets all alike. A new loop is one entry of LOOPS.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device, Pool, device_profile, keep_freed_memory, single_threaded_blas
from daskcnn.nn import LOSSES, SGD, Context, Layer, Sequential
from daskcnn.nn.layers import (
    GELU,
    LRN,
    AveragePool,
    BatchNorm,
    Dense,
    Dropout,
    L2Pool,
    LeakyReLU,
    MaxPool,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
)
from daskcnn.nn.scaled import channel_sum
from daskcnn.ps.vectors import adagrad, add_scaled, cast, elastic, weighted_sum
from daskcnn.store import Scattered
from daskcnn.store.augmentation import NAMED, first_move, with_chances
from daskcnn.store.augmentation.step import ShownSamples
from daskcnn.store.loader import placed

Work = Callable[[], Any]


@dataclass(frozen=True)
class Turn:
    """A loop's call, and the bytes that it must read and write."""

    work: Work
    nbytes: int


Turns = dict[str, Turn]
"""By direction: "forward", "backward"; or by what is made of a vector."""


def passes(*layers: Layer) -> Callable[[Array, Device], Turns]:
    """Forward and backward of neighbouring layers on a map, in training."""

    def turns(x: Array, device: Device) -> Turns:
        net = Sequential(tuple((f"{i}", layer) for i, layer in enumerate(layers)))
        rng = np.random.default_rng(0)
        params, state, _ = net.init(rng, (*x.shape[:2], x.shape[3]))
        params, state = _cast(params, x.dtype), _cast(state, x.dtype)
        ctx = Context(device, training=True, keys=rng.integers(0, 1 << 63, x.shape[2], dtype=np.uint64))
        y, _, residual = net.forward(params, state, x, ctx)
        dy = rng.standard_normal(y.shape, dtype=y.dtype)
        return {
            "forward": Turn(lambda: net.forward(params, state, x, ctx), x.nbytes + y.nbytes),
            "backward": Turn(lambda: net.backward(params, residual, dy, ctx), 2 * x.nbytes + dy.nbytes),
        }

    return turns


def _cast(tree: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {k: _cast(v, dtype) if isinstance(v, dict) else v.astype(dtype) for k, v in tree.items()}


def channel_sums(x: Array, device: Device) -> Turns:
    return {"forward": Turn(lambda: channel_sum(x, device), x.nbytes)}


def descent(x: Array, device: Device) -> Turns:
    """Momentum, Nesterov's, with decay: reads and writes weights, velocity and gradients."""
    weights, grads = (np.zeros(x.size, x.dtype) for _ in range(2))
    sgd = SGD(0.9, nesterov=True, weight_decay=1e-3)
    state = sgd.init(weights)
    return {"forward": Turn(lambda: sgd.step(weights, grads, state, 0.1, device), 6 * x.nbytes)}


def merges(x: Array, device: Device) -> Turns:
    """The merges of the server. The bytes are those of the vectors read and of the vectors written."""
    center, *pushed = (np.ones(x.size, x.dtype) for _ in range(5))
    weights = [0.1, 0.2, 0.3, 0.4]
    return {
        "add_scaled": Turn(lambda: add_scaled(center, 0.3, pushed[0]), 3 * x.nbytes),
        "sum of 2": Turn(lambda: weighted_sum(pushed[:2], weights[:2]), 3 * x.nbytes),
        "sum of 4": Turn(lambda: weighted_sum(pushed, weights), 5 * x.nbytes),
        "elastic": Turn(lambda: elastic(center, pushed[0], 0.5), 4 * x.nbytes),
        "adagrad": Turn(lambda: adagrad(center, pushed[0], pushed[1], 0.1, least=1e-8), 5 * x.nbytes),
    }


def half(x: Array, device: Device) -> Turns:
    """Between float32 and float16, as vectors go over the wire."""
    single = x.astype(np.float32).reshape(-1)
    less = single.astype(np.float16)
    nbytes = single.nbytes + less.nbytes
    return {"to": Turn(lambda: cast(single, "float16"), nbytes), "from": Turn(lambda: cast(less, "float32"), nbytes)}


def minibatch(x: Array, device: Device) -> Turns:
    """Bytes of images in memory, normalised, cropped and mirrored."""
    H, W, N, C = x.shape
    rng = np.random.default_rng(0)
    images = Scattered.of(rng.integers(0, 256, (N, H, W, C), np.uint8))
    keys = rng.integers(0, 1 << 63, N, np.uint64)
    move, _ = first_move(with_chances(NAMED["crop-mirror"], ShownSamples(keys, np.arange(N), 0, 0)), (H, W))
    data: Any = SimpleNamespace(mean=np.full(C, 128.0), deviation=np.full(C, 64.0), nodata=None)
    return {"forward": Turn(lambda: placed(data, images, x.dtype, move), x.size + x.nbytes)}


def softmax(x: Array, device: Device) -> Turns:
    scores = x.reshape(-1, 10)
    labels = np.arange(len(scores)) % 10
    return {"forward": Turn(lambda: LOSSES["softmax"](scores, labels), 2 * x.nbytes)}


LOOPS: dict[str, Callable[[Array, Device], Turns]] = {
    "relu": passes(ReLU()),
    "sigmoid": passes(Sigmoid()),
    "tanh": passes(Tanh()),
    "leakyrelu": passes(LeakyReLU()),
    "gelu": passes(GELU()),
    "silu": passes(SiLU()),
    "lrn": passes(LRN()),
    "maxpool 2": passes(MaxPool(2)),
    "maxpool 3/2": passes(MaxPool(3, 2)),
    "averagepool 2": passes(AveragePool(2)),
    "l2pool 2": passes(L2Pool(2)),
    "dropout": passes(Dropout(0.5)),
    "batchnorm": passes(BatchNorm()),
    "relu lrn maxpool": passes(ReLU(), LRN(), MaxPool(2)),
    "relu averagepool": passes(ReLU(), AveragePool(2)),
    "relu maxpool 3/2 lrn": passes(ReLU(), MaxPool(3, 2), LRN()),
    "batchnorm relu": passes(BatchNorm(), ReLU()),
    "batchnorm relu maxpool": passes(BatchNorm(), ReLU(), MaxPool(2)),
    "dense": passes(Dense(10)),
    "channel sums": channel_sums,
    "descent": descent,
    "softmax": softmax,
    "minibatch": minibatch,
    "merge": merges,
    "half": half,
}


def copying(x: Array, device: Device) -> Turn:
    """Copying a map."""
    y, rows = np.empty_like(x), device.pool.slices(len(x))
    return Turn(lambda: device.pool.map(lambda r: np.copyto(y[r], x[r]), rows), 2 * x.nbytes)


def measure(shape: tuple[int, ...], dtype: str, threads: int, rounds: int, only: list[str]) -> dict[str, float]:
    """Median GB/s of each loop and direction, and of copying."""
    device = Device(pool=Pool(threads))
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    turns = {"copy": copying(x, device)}
    for name in only:
        turns |= {f"{name} {direction}": turn for direction, turn in LOOPS[name](x, device).items()}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds + 1):
        for name, turn in turns.items():
            begun = perf_counter()
            turn.work()
            seconds[name].append(perf_counter() - begun)
    device.pool.close()
    return {name: turn.nbytes / median(seconds[name][1:]) / 1e9 for name, turn in turns.items()}


def show(shape: tuple[int, ...], results: dict[int, dict[str, float]]) -> str:
    """A table: a row for each loop and direction; GB/s and the part of copying's, for each number of threads."""
    head = "".join(f"{f'{n} thr. GB/s':>14} of copying" for n in results)
    lines = [f"{'×'.join(map(str, shape)):32}{head}"]
    for name in next(iter(results.values())):
        cells = "".join(f"{r[name]:14.1f}{r[name] / r['copy']:11.2f}" for r in results.values())
        lines.append(f"{name:32}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", nargs=4, type=int, default=[32, 32, 64, 50], metavar=("H", "W", "N", "C"))
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")
    parser.add_argument("--only", nargs="+", choices=LOOPS, default=list(LOOPS), metavar="LOOP", help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    shape = tuple(options.shape)
    keep_freed_memory()  # as a worker does
    with single_threaded_blas():
        results = {n: measure(shape, options.dtype, n, options.rounds, options.only) for n in options.threads}
    if options.json:
        machine = {"processor": device_profile("cpu", 1).name, "dtype": options.dtype}
        print(json.dumps({**machine, "shape": shape, "GB_per_second": results}, indent=1))
    else:
        print(show(shape, results))


if __name__ == "__main__":
    main()
