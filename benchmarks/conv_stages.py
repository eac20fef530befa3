"""Where a spectral convolution's time goes: a roofline of each stage on one thread.

    python -m benchmarks.conv_stages [--json FILE]

For conv2 of the papers' networks, forward and both gradients: seconds of each stage, its operations a second, their
share of sgemm (2048³, in the same rounds), and the bytes a second that it must move to and from memory. Medians.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import machine
from benchmarks.conv_gemm import SIDE, sgemm
from daskcnn.arrays import Device, keep_freed_memory, single_threaded_blas
from daskcnn.compiled import spectral
from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.spec import Work

NETWORKS = ((50, 500), (150, 800), (300, 1000), (500, 1500))
BATCHES = (64, 256)
LOOPS = {
    **dict.fromkeys(("multiply_rows", "differentiate_rows"), "products"),
    **dict.fromkeys(("forth", "back"), "transform of {}"),
}
"""Compiled loops, and the stages that they are."""


class Stages:
    """Seconds of every stage of one pass, noted around the compiled loops that do its arithmetic."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.sides: dict[int, str] = {}
        for loop, name in LOOPS.items():
            self._time(loop, name)

    def _time(self, loop: str, name: str) -> None:
        inner = getattr(spectral, loop)

        def timed(*arguments: Any) -> None:
            begun = time.perf_counter()
            inner(*arguments)
            # the second argument of a transform is its matrix along the height
            self.seconds[name.format(self.sides.get(id(arguments[1])))] += time.perf_counter() - begun

        setattr(spectral, loop, timed)

    def of(self, work: Callable[[], Any]) -> dict[str, float]:
        """Seconds of the stages of one call, and of the whole."""
        self.seconds.clear()
        begun = time.perf_counter()
        work()
        whole = time.perf_counter() - begun
        return {**self.seconds, "whole": whole}


def measure(spec: ConvSpec, stages: Stages, rounds: int) -> dict[str, Any]:
    """Figures of both directions."""
    algorithm, device, rng = ALGORITHMS["spectral"], Device(), np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s, dtype=np.float32) for s in (spec.x_shape, spec.w_shape, spec.y_shape))
    conv: Any = algorithm.bind(spec, device.backend, device.workspace_limit)
    prepared, reference = conv.prepare(w, device), sgemm()
    stages.sides = {id(side.height): name for name, side in vars(conv.f).items() if name != "units"}
    passes = {
        "forward": lambda: conv.forward(x, prepared, device),
        "backward": lambda: conv.backward(x, dy, prepared, device),
    }
    taken: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds + 1):
        taken["sgemm"].append(stages.of(reference))
        for direction, work in passes.items():
            taken[direction].append(stages.of(work))
    roof = 2 * SIDE**3 / median(t["whole"] for t in taken["sgemm"][1:])
    return {"sgemm_gflops": roof / 1e9} | {
        direction: figures(algorithm.work(spec, direction), taken[direction][1:], roof) for direction in passes
    }


def figures(works: tuple[Work, ...], taken: list[dict[str, float]], roof: float) -> dict[str, Any]:
    """Of every stage: milliseconds, GFLOP/s, share of sgemm, GB/s; the same work's stages together."""
    flops, moved = defaultdict(int), defaultdict(int)
    for work in works:
        flops[work.stage] += work.flops
        moved[work.stage] += work.bytes
    found = {}
    for stage in taken[0]:
        seconds = median(t[stage] for t in taken)
        found[stage] = {"ms": seconds * 1e3}
        if stage in flops:
            rate = flops[stage] / seconds
            found[stage] |= {"gflops": rate / 1e9, "share_of_sgemm": rate / roof, "GB_s": moved[stage] / seconds / 1e9}
    return found


def show(name: str, result: dict[str, Any]) -> None:
    """A line a stage."""
    print(f"{name}: sgemm {result['sgemm_gflops']:.0f} GFLOP/s")
    for direction in ("forward", "backward"):
        for stage, f in result[direction].items():
            rest = (
                f"{f['gflops']:7.1f} GFLOP/s {f['share_of_sgemm']:5.0%} {f['GB_s']:6.1f} GB/s" if "gflops" in f else ""
            )
            print(f"  {direction:9} {stage:22} {f['ms']:9.1f} ms {rest}")


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    keep_freed_memory()
    stages, results = Stages(), {}
    with single_threaded_blas():
        for (C, K), N in [(network, batch) for batch in options.batches for network in NETWORKS]:
            name = f"{C}:{K} conv2, batch {N}"
            results[name] = measure(ConvSpec(N=N, H=16, W=16, C=C, K=K, R=5, S=5, pad=(2, 2)), stages, options.rounds)
            show(name, results[name])
    if options.json:
        report = {"machine": machine(), "threads": 1, "rounds": options.rounds, "layers": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
