"""How fast the loader is: images a second of CIFAR-10-like data, with and without augmentation.

    python -m benchmarks.loader [--data PATH] [--batch-size 128] [--repeat 3] [--json]

Without --data, 50,000 random images of 32x32x3 are made first. Run it under `taskset -c 0` for the rate on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from daskcnn.arrays import cpu_count, device_profile
from daskcnn.store import BatchPlan, Dataset, batches, open_dataset, verify
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe

MIB = 1 << 20


def random_data(path: Path) -> str:
    """A data set the size of CIFAR-10."""
    rng = np.random.default_rng(0)
    train, test = (
        (rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), (np.arange(n) % 10).astype(np.uint8))
        for n in (50_000, 10_000)
    )
    source = Source("random", tuple("0123456789"), train, test, {})
    write(source, describe(source, chunk=1000, order="stored", seed=0), str(path), lambda part: None)
    return str(path)


def rate(data: Dataset, augment: str, batch_size: int, presentation: int) -> float:
    """Images a second of one presentation of the training part to a consumer that does nothing."""
    plan = BatchPlan(((0, len(data.train)),), batch_size, seed=0, presentation=presentation, augment=augment)
    started = time.perf_counter()
    with batches(data, data.train, plan) as stream:
        seen = sum(len(batch.labels) for batch in stream)
    return seen / (time.perf_counter() - started)


def measure(path: str, batch_size: int, repeat: int) -> dict[str, float | int | str]:
    """Rates in images/s: the first pass reads and checks the files, later ones find them in memory (best of all)."""
    data = open_dataset(path)
    started = time.perf_counter()
    verify(data)
    verified = sum(stored.chunks * stored.chunk_bytes for stored in (data.train.stored, data.test.stored))
    seconds = time.perf_counter() - started
    CACHE.clear()
    return {
        "processor": device_profile("cpu", cpu_count()).name,
        "cores": cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "images": len(data.train),
        "batch_size": batch_size,
        "verify_mib_per_second": round(verified / MIB / seconds),
        "crop_mirror_first_pass": round(rate(data, "crop-mirror", batch_size, 0)),
        "crop_mirror": round(max(rate(data, "crop-mirror", batch_size, i) for i in range(1, 1 + repeat))),
        "none": round(max(rate(data, "none", batch_size, i) for i in range(1, 1 + repeat))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a prepared data set instead of random images")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.data or random_data(Path(folder, "random.zarr"))
        found = measure(path, args.batch_size, args.repeat)
    told = {name: value if isinstance(value, str) else f"{value:,}" for name, value in found.items()}
    print(json.dumps(found) if args.json else "\n".join(f"{name:>24}  {value}" for name, value in told.items()))


if __name__ == "__main__":
    main()
