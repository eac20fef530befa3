"""A worker that becomes slower in mid-run: samples a second of a `bsp` run, beside what the workers' speeds allow.

    python -m benchmarks.slowed --data data/cifar10.zarr [--models quick rules] [--factor 4] [--repeat 3] [--json FILE]

Two one-thread workers share the steps of one run. In mid-run the second one begins to take --factor times as long: it
sleeps after each of its steps. A worker's speed is its samples by its seconds of computing and sleeping; both speeds
together are what is allowed. Before: the steps ahead of the change, without the first ones. After: those from the
20th on behind it. Shares of what is allowed hold communication and waiting. Exit 1 if the median share after the change
is less than 0.95 of that before it.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.common import RULES_NETWORK, TWO_CONVOLUTIONS
from benchmarks.runs import machine, run
from daskcnn.cluster.link.connect import MEMORY, connect
from daskcnn.job.tables import Cluster, Workers

SAMPLES, EPOCHS, BATCH = 20_000, 2, 64
SETTLED, BEHIND = 60, 20
"""Steps at the start, and behind the change, that do not count."""
LEAST = 0.95
SLOWER = "cpu-1"


# --- on the workers ---


def record() -> None:
    """Keep begin, end and samples of every step of this process, and slow down steps once a factor is set."""
    from daskcnn.training.replica import Replica

    patched: Any = Replica
    kept: list[tuple[float, float, int]] = []
    if not hasattr(patched, "plain_step"):
        patched.plain_step = patched.step

    def step(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        begun = time.monotonic()
        found = patched.plain_step(self, batch, *args, **options)
        time.sleep((time.monotonic() - begun) * (patched.slower - 1))
        kept.append((begun, time.monotonic(), len(batch.labels)))
        return found

    patched.step, patched.kept, patched.slower = step, kept, 1.0


def slow(factor: float) -> float:
    """Let each step take that many times as long. Returns the time."""
    from daskcnn.training.replica import Replica

    patched: Any = Replica
    patched.slower = factor
    return time.monotonic()


def steps() -> list[tuple[float, float, int]]:
    """Return what was kept, and keep nothing more."""
    from daskcnn.training.replica import Replica

    patched: Any = Replica
    patched.step = patched.plain_step
    kept: list[tuple[float, float, int]] = patched.kept
    return kept


# --- here ---


def measured(client: Client, data: str, model: str, factor: float) -> dict[str, Any]:
    """Shares of what the speeds allow, before and after the change of one run."""
    info = client.scheduler_info(n_workers=-1)["workers"]
    address = next(each for each, known in info.items() if known["name"] == SLOWER)
    trained = [each for each, known in info.items() if str(known["name"]).startswith("cpu")]
    client.run(record, workers=trained)
    changed: list[float] = []
    job = {
        "data": {"name": "cifar10", "path": data, "limit": SAMPLES, "validation": 500},
        "model": {"layers": TWO_CONVOLUTIONS} if model == RULES_NETWORK else {"name": model},
        "train": {"strategy": "bsp", "epochs": EPOCHS, "batch_size": BATCH, "lr": 0.01, "threads": 1},
        "cluster": {"workers": {"cpu": 2}},
        "run": {"checkpoint_every": 1000.0},
    }
    ended = threading.Event()

    def change() -> None:
        half = EPOCHS * (SAMPLES - 500) // BATCH // 2
        while not ended.wait(0.05):
            if client.run(count, workers=[address])[address] > half:
                changed.extend(client.run(slow, factor, workers=[address]).values())
                return

    watcher = threading.Thread(target=change)
    watcher.start()
    try:
        run(job, client)
    finally:
        ended.set()
        watcher.join()
    return shares(client.run(steps, workers=trained), changed[0])


def count() -> int:
    """Return the steps of this process so far."""
    from daskcnn.training.replica import Replica

    patched: Any = Replica
    return len(patched.kept)


def shares(kept: Mapping[str, Sequence[tuple[float, float, int]]], changed: float) -> dict[str, Any]:
    """Images a second and their share of what is allowed, on both sides of the change."""
    own = list(kept.values())
    at = next(n for n, (begun, _, _) in enumerate(own[0]) if begun > changed)
    sides = {"before": slice(SETTLED, at - 1), "after": slice(at + BEHIND, len(own[0]) - 1)}
    return {side: share([each[steps] for each in own]) for side, steps in sides.items()}


def share(own: Sequence[Sequence[tuple[float, float, int]]]) -> dict[str, float]:
    """Images a second of the same steps of all workers, and that by the sum of their speeds."""
    taken = median_gap(own[0])
    samples = sum(median(n for _, _, n in each) for each in own)
    allowed = sum(median(n / (ended - begun) for begun, ended, n in each) for each in own)
    rate = samples / taken
    return {"images_per_second": round(rate), "allowed": round(allowed), "share": round(rate / allowed, 3)}


def median_gap(own: Sequence[tuple[float, float, int]]) -> float:
    """Seconds from the begin of a step to that of the next."""
    return median(after[0] - before[0] for before, after in pairwise(own))


def main() -> int:
    """Print a line for each run and the verdict."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--models", nargs="+", default=["quick", RULES_NETWORK])
    options.add_argument("--factor", type=float, default=4.0)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    given = options.parse_args()
    os.environ.update(MEMORY)
    found: dict[str, list[dict[str, Any]]] = {model: [] for model in given.models}
    with connect(Cluster(workers=Workers(cpu=2))) as client:
        client.wait_for_workers(3, timeout=60)
        for _ in range(given.repeat):
            for model, own in found.items():
                own.append(measured(client, given.data, model, given.factor))
                print(model, own[-1], flush=True)
    missed = False
    for model, own in found.items():
        ratio = median(each["after"]["share"] / each["before"]["share"] for each in own)
        missed |= ratio < LEAST
        print(f"{model}: the share after the change is {ratio:.2f} of that before it (bar {LEAST})")
    if given.json:
        kept = {"machine": machine(), "factor": given.factor, "measured": found}
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
