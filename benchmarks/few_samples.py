"""A training step of few samples beside one of many: what of it does not shrink with the samples.

    python -m benchmarks.few_samples [--networks quick rules] [--samples 1 4 12 64] [--seconds 20] [--results FILE]

A worker that shares a step's samples gets few of them. One thread, seconds of the processor, not of the clock, so that
other programs matter little; all sizes take turns, and of each the fastest tenth of its steps counts. Convolutions are
measured as a worker measures them that shares steps of the largest size. Where PyTorch is installed its faster eager
mode takes turns with ours. "fixed" is where the line through the two largest sizes meets no samples at all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks.common import TWO_CONVOLUTIONS, Images
from benchmarks.runs import machine
from daskcnn.arrays import Device, keep_freed_memory, single_threaded_blas
from daskcnn.job.tables import Job
from daskcnn.nn import StepPace
from daskcnn.nn.models import model_spec
from daskcnn.ps import RULES
from daskcnn.store import Batch
from daskcnn.training.replica import Replica
from daskcnn.training.worker_calibration import tune_convolutions

LR = 1e-5
TURN = 5
"""Steps of a turn; the first, whose caches another size left, is not counted."""


def replica_of(network: str, samples: int, images: Images | None = None) -> Replica:
    """A replica whose convolutions are planned as in a run with steps of so many samples, which workers share."""
    images = images or Images()
    layers = TWO_CONVOLUTIONS if network == "rules" else model_spec(network, images.shape, 10)
    job = Job.model_validate({"model": {"layers": layers}, "train": {"batch_size": samples, "threads": 1}})
    job = job.model_copy(update={"rule": RULES["bsp"]()})
    replica = Replica(job, images, Device.of("cpu", threads=1), clock=time.thread_time)
    tune_convolutions(replica)
    return replica


def batch_of(samples: int, shape: Sequence[int]) -> Batch:
    """Noise for images (H, W, C)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*shape[:2], samples, shape[2]), dtype=np.float32)
    return Batch(x, rng.integers(0, 10, samples), np.arange(samples, dtype=np.uint64))


def steps_of(replica: Replica, samples: int) -> dict[str, Callable[[], object]]:
    """Our step and, where it is installed, PyTorch's in two memory layouts."""
    batch = batch_of(samples, replica.dataset.shape)
    steps: dict[str, Callable[[], object]] = {"ours": lambda: replica.step(batch, StepPace(LR))}
    if find_spec("torch") is not None:
        from benchmarks.step_vs_torch import torch_step

        steps |= {mode: torch_step(mode, replica, batch) for mode in ("eager", "channels_last")}
    return steps


def measure(network: str, sizes: Sequence[int], seconds: float, images: Images | None = None) -> dict[str, Any]:
    """Milliseconds of a step of each size, and what follows from them."""
    replica = replica_of(network, max(sizes), images)
    steps = {(n, side): step for n in sizes for side, step in steps_of(replica, n).items()}
    taken: dict[tuple[int, str], list[float]] = {key: [] for key in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or any(len(each) < 2 for each in taken.values()):
        for key, step in steps.items():
            for _ in range(TURN):
                begun = time.thread_time()
                step()
                taken[key].append(time.thread_time() - begun)
            del taken[key][-TURN]
    found = {key: quantiles(each, n=10)[0] * 1e3 for key, each in taken.items()}
    rows = [_row(n, {side: ms for (size, side), ms in found.items() if size == n}) for n in sizes]
    return {"network": network, "rows": rows, **_shared(rows)}


def _row(samples: int, ms: Mapping[str, float]) -> dict[str, Any]:
    row = {"samples": samples, "ms": round(ms["ours"], 3), "images_per_second": round(samples / ms["ours"] * 1e3)}
    torch = [each for side, each in ms.items() if side != "ours"]
    return {**row, "torch_ms": round(min(torch), 3)} if torch else row


def _shared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fixed milliseconds, and images/s of each size, as a share of those of the largest."""
    found: dict[str, Any] = {}
    sides = [key for key in ("ms", "torch_ms") if key in rows[0]]
    for key in sides:
        few, many = rows[-2], rows[-1]
        slope = (many[key] - few[key]) / (many["samples"] - few["samples"])
        found[f"fixed_{key}"] = round(few[key] - slope * few["samples"], 3)
        rate = many["samples"] / many[key]
        found[f"share_{key}"] = {str(r["samples"]): round(r["samples"] / r[key] / rate, 3) for r in rows}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--networks", nargs="+", default=["quick", "rules"])
    parser.add_argument("--samples", nargs="+", type=int, default=[1, 4, 12, 64], help="two sizes or more, rising")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring a network")
    parser.add_argument("--results", type=Path, help="file to write")
    arguments = parser.parse_args()
    keep_freed_memory()  # as a worker does
    with single_threaded_blas():
        measured = [measure(network, arguments.samples, arguments.seconds) for network in arguments.networks]
    text = json.dumps({"machine": machine(), "results": measured}, indent=1)
    if arguments.results:
        arguments.results.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
