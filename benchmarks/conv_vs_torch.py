"""Each convolution of the networks, in each direction and with each algorithm, against PyTorch's.

    python -m benchmarks.conv_vs_torch [--models 50:500] [--batches 64] [--threads 2] [--json FILE]
    python -m benchmarks.conv_vs_torch --models depthwise pointwise grouped groups-of-8 dilated dilated-4 stem stem-7

Directions: forward, the gradients of the data and of the kernels, and both gradients together. Ours, with every
algorithm that supports the layer and fits, PyTorch's in either memory format, and a product of two 2048×2048 matrices
take turns; medians count. forward includes preparing the kernels, as in a training step. GFLOP/s are those of the
direct convolution, so an algorithm that spares multiplications may have more than the machine's sgemm. A first layer is
planned without the gradient of its data, which training does not need. The models of the second line are single
convolutions, as other networks have them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import (
    CLASSES,
    IMAGE,
    NO_TORCH,
    Budget,
    Configuration,
    Results,
    configurations,
    in_fresh_process,
    parser,
    take_turns,
)
from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.conv import ALGORITHMS, ConvPlan, ConvSpec, plan
from daskcnn.conv.tuner import tune
from daskcnn.job.network import convolutions
from daskcnn.nn import build_model, sequential_from_spec
from daskcnn.training.worker_calibration import TUNING

try:
    import torch
    from torch import nn
except ModuleNotFoundError as missing:
    raise SystemExit(NO_TORCH) from missing

Calls = dict[str, Callable[[], Any]]
"""By direction."""
Arrays = tuple[Array, Array, Array]
"""x (H, W, N, C), w (R, S, C, K), dy (out_H, out_W, N, K)."""

DIRECTIONS: Mapping[str, int] = {"forward": 1, "backward_data": 1, "backward_filter": 1, "backward": 2}
"""And how many convolutions each is worth."""
FORMATS: Mapping[str, torch.memory_format] = {
    "torch": torch.contiguous_format,
    "torch channels_last": torch.channels_last,
}
MAP, KERNELS, OUR_KERNELS = (2, 3, 0, 1), (3, 2, 0, 1), (2, 3, 1, 0)
"""Axes: (H, W, N, C) to PyTorch's (N, C, H, W) and back; (R, S, C, K) to (K, C, R, S); and back."""
SINGLE: Mapping[str, tuple[tuple[int, int, int], Mapping[str, Any]]] = {
    "depthwise": ((28, 28, 256), {"kernels": 256, "size": 3, "pad": 1, "groups": 256}),
    "pointwise": ((28, 28, 256), {"kernels": 256, "size": 1}),
    "grouped": ((28, 28, 256), {"kernels": 256, "size": 3, "pad": 1, "groups": 4}),
    "groups-of-8": ((28, 28, 256), {"kernels": 256, "size": 3, "pad": 1, "groups": 32}),
    "dilated": ((28, 28, 256), {"kernels": 256, "size": 3, "pad": 2, "dilation": 2}),
    "dilated-4": ((32, 32, 64), {"kernels": 64, "size": 3, "pad": 4, "dilation": 4}),
    "stem": ((64, 64, 3), {"kernels": 32, "size": 3, "stride": 2, "pad": 1}),
    "stem-7": ((112, 112, 3), {"kernels": 64, "size": 7, "stride": 2, "pad": 3}),
}
"""Single convolutions that `--models` may name: the size of the input, and the layer's options."""
SGEMM, SIDE = ("sgemm", ""), 2048
ALIKE = 1e-4
"""How far results may be apart, relative to their norm: sums of up to a million float32 products."""


def noise(spec: ConvSpec) -> Arrays:
    """Random arrays of the problem's shapes."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape, dtype=np.float32) for shape in (spec.x_shape, spec.w_shape, spec.y_shape))
    return x, w, dy


def ours(name: str, spec: ConvSpec, arrays: Arrays, device: Device) -> Calls:
    """An algorithm of ours."""
    (x, w, dy), conv = arrays, ALGORITHMS[name].bind(spec, device.backend, device.workspace_limit)
    prepared = conv.prepare(w, device)
    return {
        "forward": lambda: conv.forward(x, conv.prepare(w, device), device),
        "backward_data": lambda: conv.backward_data(dy, prepared, device),
        "backward_filter": lambda: conv.backward_filter(x, dy, device),
        "backward": lambda: conv.backward(x, dy, prepared, device),
    }


def theirs(layout: torch.memory_format, spec: ConvSpec, arrays: Arrays) -> Calls:
    """PyTorch in a memory format."""
    axes = zip(arrays, (MAP, KERNELS, MAP), strict=True)
    x, w, dy = (torch.from_numpy(a.transpose(order)).contiguous(memory_format=layout) for a, order in axes)
    assert spec.pad_end == (0, 0), "PyTorch pads both sides alike"
    rest = (None, spec.stride, spec.pad, spec.dilation, False, (0, 0), spec.groups)

    def gradients(*wanted: bool) -> Callable[[], Any]:
        return lambda: torch.ops.aten.convolution_backward(dy, x, w, *rest, (*wanted, False))

    return {
        "forward": lambda: nn.functional.conv2d(x, w, None, spec.stride, spec.pad, spec.dilation, spec.groups),
        "backward_data": gradients(True, False),
        "backward_filter": gradients(False, True),
        "backward": gradients(True, True),
    }


def sgemm(device: Device) -> Callable[[], Any]:
    """The machine's own product of two square matrices, on the device's threads."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    out, parts = np.empty_like(a), device.pool.slices(SIDE)
    return lambda: device.pool.map(lambda rows: np.matmul(a[rows], b, out=out[rows]), parts)


def check(sides: Mapping[str, Calls]) -> None:
    """Run everything once. Raises RuntimeError where a result differs from the first side's."""
    right: dict[str, list[Array]] = {}
    for name, calls in sides.items():
        for direction, call in calls.items():
            found = _arrays(call())
            for a, b in zip(found, right.setdefault(direction, found), strict=True):
                if not (error := np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel())) <= ALIKE:
                    raise RuntimeError(f"{name}, {direction}: {error:.1e} away from PyTorch: another computation")


def _arrays(result: Any) -> list[Array]:
    """Results in our layout: y, dx, dw, or dx and dw."""
    parts = result if isinstance(result, tuple) else (result,)
    if not any(isinstance(part, torch.Tensor) for part in parts):
        return list(parts)
    axes = zip(parts, (MAP, OUR_KERNELS), strict=False)  # PyTorch's third gradient is a bias's
    return [part.permute(order).numpy() for part, order in axes if part is not None]


def layer(spec: ConvSpec, device: Device, budget: Budget, *, need_dx: bool) -> dict[str, Any]:
    """Seconds, GFLOP/s and share of sgemm of every side and direction, and the ratio of PyTorch's best to ours."""
    arrays = noise(spec)
    fit = [n for n, a in ALGORITHMS.items() if a.supports(spec) and a.workspace(spec) <= device.workspace_limit]
    sides = {name: theirs(layout, spec, arrays) for name, layout in FORMATS.items()}
    sides |= {name: ours(name, spec, arrays, device) for name in fit}
    check(sides)
    works = {(name, direction): call for name, calls in sides.items() for direction, call in calls.items()}
    taken = take_turns({SGEMM: sgemm(device), **works}, budget)
    planned = plan(spec, device, need_dx=need_dx)
    return figures(planned, {work: median(turns) for work, turns in taken.items()})


def figures(plan: ConvPlan, medians: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """What is kept of a layer."""
    spec = plan.spec
    peak = 2 * SIDE**3 / medians[SGEMM] / 1e9
    found: dict[str, Any] = {"planned": plan.algorithm, "sgemm_gflops": peak, "directions": {}}
    for direction, worth in DIRECTIONS.items():
        planned = plan.forward_algorithm if direction == "forward" else plan.backward_algorithm
        seconds = {name: s for (name, of), s in medians.items() if of == direction}
        gflops = {name: worth * spec.flops / s / 1e9 for name, s in seconds.items()}
        found["directions"][direction] = {
            "planned": planned,
            "ratio": min(seconds[name] for name in FORMATS) / seconds[planned],
            "seconds": seconds,
            "gflops": gflops,
            "share_of_sgemm": {name: rate / peak for name, rate in gflops.items()},
        }
    return found


def problems(c: Configuration) -> dict[str, ConvSpec]:
    """The convolutions of a network, or the single one of this name."""
    if c.model not in SINGLE:
        return dict(convolutions(build_model(c.model, None, IMAGE, CLASSES), IMAGE, c.batch, "float32"))
    image, options = SINGLE[c.model]
    return dict(convolutions(sequential_from_spec([{"layer": "conv", **options}]), image, c.batch, "float32"))


def measure(c: Configuration, budget: Budget) -> dict[str, dict[str, Any]]:
    """The figures of every convolution of a network, by name; the planner measures them first, as before a run."""
    torch.set_num_threads(c.threads)
    device = Device.of("cpu", threads=c.threads)
    layers, inner = problems(c), 0 if c.model in SINGLE else 1
    with single_threaded_blas():
        tune(layers.values(), device, clock=time.perf_counter, seconds=TUNING)
        return {n: layer(spec, device, budget, need_dx=i >= inner) for i, (n, spec) in enumerate(layers.items())}


HEAD = "network         batch threads layer direction        ratio GFLOP/s sgemm's   milliseconds, * planned"


def show(c: Configuration, name: str, found: Mapping[str, Any]) -> None:
    """A line for each direction."""
    for direction, values in found["directions"].items():
        planned = values["planned"]
        rate, share = values["gflops"][planned], values["share_of_sgemm"][planned]
        times = (f"{side}{'*' * (side == planned)} {s * 1e3:.1f}" for side, s in values["seconds"].items())
        line = f"{c} {name:5} {direction:15} {values['ratio']:6.2f} {rate:7.1f} {share:6.0%}    {', '.join(times)}"
        print(line, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    return parser(__doc__, seconds=10.0, what="a layer").parse_args()


def main() -> None:
    """Measure what is asked for, each configuration in a process of its own."""
    options = arguments()
    results, budget = Results(options.json), Budget(options.rounds, options.seconds)
    print(HEAD)
    for c in configurations(options):
        for name, found in in_fresh_process(measure, c, budget).items():
            show(c, name, found)
            results.add({"model": c.model, "batch": c.batch, "threads": c.threads, "layer": name}, found)


if __name__ == "__main__":
    main()
