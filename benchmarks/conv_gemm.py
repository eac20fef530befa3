"""Convolution by im2col on one thread against the machine's own sgemm: python -m benchmarks.conv_gemm [--json FILE].

sgemm (2048³) and the three directions of every layer take turns, so that whatever else the machine does meets all
of them alike; medians are reported. A direction's rate counts 2·out_H·out_W·N·K·R·S·C operations, which im2col
does, whatever algorithm a plan would choose: so its share of sgemm says how well it does them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from daskcnn.arrays import Device, cpu_count, device_profile, single_threaded_blas
from daskcnn.conv import ALGORITHMS, ConvSpec

ALGORITHM = "im2col"
SIDE = 2048
PAD2 = {"R": 5, "S": 5, "pad": (2, 2)}
LAYERS = {
    "150:800 conv2, batch 64": ConvSpec(N=64, H=16, W=16, C=150, K=800, **PAD2),
    "50:500 conv2, batch 64": ConvSpec(N=64, H=16, W=16, C=50, K=500, **PAD2),
    "quick conv1, batch 128": ConvSpec(N=128, H=32, W=32, C=3, K=32, **PAD2),
    "quick conv2, batch 128": ConvSpec(N=128, H=16, W=16, C=32, K=32, **PAD2),
    "quick conv3, batch 128": ConvSpec(N=128, H=8, W=8, C=32, K=64, **PAD2),
}
TARGET = "150:800 conv2, batch 64"
TARGET_SHARE = 0.6

Work = Callable[[], Any]


def seconds(work: Work) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def directions(spec: ConvSpec, device: Device) -> dict[str, Work]:
    """The three directions of a layer by im2col on random values, kernels prepared."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s, dtype=np.float32) for s in (spec.x_shape, spec.w_shape, spec.y_shape))
    im2col = ALGORITHMS[ALGORITHM].bind(spec, device.backend, device.workspace_limit)
    prepared = im2col.prepare(w, device)
    return {
        "forward": lambda: im2col.forward(x, prepared, device),
        "backward_data": lambda: im2col.backward_data(dy, prepared, device),
        "backward_filter": lambda: im2col.backward_filter(x, dy, device),
    }


def sgemm() -> Work:
    """The machine's own product of two square matrices."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    return lambda: np.matmul(a, b, out=out)


def measure(spec: ConvSpec, reference: Work, device: Device, rounds: int) -> dict[str, dict[str, float]]:
    """Median GFLOP/s of each direction, and its share of sgemm's in the same rounds."""
    works = {"sgemm": reference, **directions(spec, device)}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            times[name].append(seconds(work))
    flops = dict.fromkeys(works, spec.flops) | {"sgemm": 2 * SIDE**3}
    rates = {name: flops[name] / statistics.median(t[1:]) / 1e9 for name, t in times.items()}  # the first warms up
    return {name: {"gflops": rate, "share_of_sgemm": rate / rates["sgemm"]} for name, rate in rates.items()}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    blas = [i for i in threadpool_info() if i["user_api"] == "blas"]
    return {
        "processor": device_profile("cpu", 1).name,
        "cores": cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": [{k: i.get(k) for k in ("internal_api", "version", "architecture")} for i in blas],
    }


def show(name: str, result: dict[str, dict[str, float]]) -> None:
    """One line a layer."""
    cells = [f"{n} {r['gflops']:6.1f} ({r['share_of_sgemm']:4.0%})" for n, r in result.items() if n != "sgemm"]
    print(f"{name:26} sgemm {result['sgemm']['gflops']:6.1f} GFLOP/s, {ALGORITHM}  " + "  ".join(cells))


def main() -> int:
    """Exit code 1 where the target layer stays below its share."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds a layer (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    results = {}
    with single_threaded_blas():
        reference, device = sgemm(), Device()
        for name, spec in LAYERS.items():
            results[name] = measure(spec, reference, device, options.rounds)
            show(name, results[name])
    if options.json:
        report = {
            "machine": machine(),
            "algorithm": ALGORITHM,
            "threads": 1,
            "rounds": options.rounds,
            "layers": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if min(r["share_of_sgemm"] for r in results[TARGET].values()) >= TARGET_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
