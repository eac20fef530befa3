"""A Dask array larger than the workers' memory through `daskcnn.prepare`: does it end, and what do the workers hold?

Random tiles of 64×64 pixels and twelve channels of uint16 are made lazily, 6 GB by default, and written by two workers
of 1 GB each. Reported: seconds, the most memory of each worker's process, bytes that Dask spilled to disk, and workers
that were killed (a nanny that restarts one gives it another process).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import dask.array as da
import psutil
from distributed import Client, LocalCluster, Worker

import daskcnn
from daskcnn.arrays import cpu_count, device_profile

TILE = (64, 64, 12)


def spilled(dask_worker: Worker) -> int:
    """Bytes that this worker has written to disk to free memory since it started."""
    stored: Any = dask_worker.data
    metrics = stored.cumulative_metrics
    return int(sum(value for (what, unit), value in metrics.items() if (what, unit) == ("disk-write", "bytes")))


class Watch(threading.Thread):
    """Looks at the memory of processes ten times a second."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(daemon=True)
        self.most = dict.fromkeys(numbers, 0)
        self.over = threading.Event()

    def run(self) -> None:
        """Look until `over` is set."""
        while not self.over.wait(0.1):
            for number in self.most:
                if psutil.pid_exists(number):
                    self.most[number] = max(self.most[number], psutil.Process(number).memory_info().rss)


def measured(gigabytes: float, memory: str, chunk: int, folder: str) -> dict[str, object]:
    """Prepare once and return the figures."""
    count = int(gigabytes * 1e9 / (2 * 64 * 64 * 12))
    images = da.random.default_rng(0).integers(0, 4096, (count, *TILE), dtype="uint16", chunks=(chunk, *TILE))
    labels = da.random.default_rng(1).integers(0, 10, count, chunks=count)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=memory, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        before = client.run(os.getpid)
        watch = Watch(list(before.values()))
        watch.start()
        begun = time.perf_counter()
        dataset = daskcnn.prepare(images, labels, Path(folder, "tiles.zarr"))
        seconds = time.perf_counter() - begun
        watch.over.set()
        watch.join()
        after, written = client.run(os.getpid), client.run(spilled)
    return {
        "samples": len(dataset.train) + len(dataset.test),
        "gigabytes": count * 2 * 64 * 64 * 12 / 1e9,
        "seconds": round(seconds, 1),
        "worker_peak_mb": [round(most / 1e6) for most in watch.most.values()],
        "spilled_bytes": sum(written.values()),
        "workers_killed": len(set(before.values()) - set(after.values())),
    }


def main() -> None:
    """Measure and print; keep the figures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--memory", default="1GB", help="limit of each worker")
    parser.add_argument("--chunk", type=int, default=500, help="samples in a chunk of the Dask array")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="daskcnn-bench-") as folder:
        found = measured(options.gigabytes, options.memory, options.chunk, folder)
    print(json.dumps(found, indent=2))
    if options.json:
        Path(options.json).write_text(
            json.dumps({"processor": device_profile("cpu", cpu_count()).name, "cores": cpu_count(), **found}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
