"""Does loading stay ahead? Training from a store against training from memory, and a store over a link of 1 Gb/s.

    python -m benchmarks.loader_turns local [--samples 3000] [--rounds 7] [--json FILE]
    sudo python -m benchmarks.loader_turns link [--samples 16000] [--rounds 3] [--bandwidth "1 Gb/s"] [--json FILE]

Images are 64x64x12 of uint16. `local` trains a small network on one thread, with an empty cache each time: from a
prepared store, from a zarr array in place and from memory, in turns. `link` reads a prepared store that nginx serves
(Python's http.server where it is missing) from a network namespace of its own, for a consumer that does nothing; a
plain download of the same files has its turn too. Both print medians over the rounds and the ratios within each round.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import zarr

from benchmarks.network.netns import FRAMING, Host, Network, network
from daskcnn.arrays import Device, cpu_count, device_profile, keep_freed_memory, single_threaded_blas
from daskcnn.job.resolve import resolve
from daskcnn.store import BatchPlan, Dataset, Scattered, batches, loader, open_dataset
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.foreign.in_place import Arrays, look, outline
from daskcnn.store.making.prepare import chunk_for
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from daskcnn.training.replica import Replica

SHAPE, BATCH, VALIDATION = (64, 64, 12), 64, 64
BANDWIDTHS = {"100 Mb/s": 1.25e7, "1 Gb/s": 1.25e8}
PORT = 8088


def made(folder: Path, samples: int) -> tuple[str, Source]:
    """A prepared data set of random tiles, and its samples in memory."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 10_000, (samples, *SHAPE), dtype=np.uint16)
    labels = rng.permutation(np.arange(samples) % 10).astype(np.uint8)
    test = images[:BATCH], np.arange(BATCH).astype(np.uint8) % 10
    source = Source("tiles", tuple("0123456789"), (images, labels), test, {})
    manifest = describe(source, chunk=chunk_for(samples, images[0].nbytes), order="stored", seed=0)
    write(source, manifest, str(folder / "tiles.zarr"), lambda part: None)
    return str(folder / "tiles.zarr"), source


# --- from a local store, from memory ---


@dataclass(frozen=True)
class InMemory:
    """The training part as a `store.Split` that has everything in memory."""

    images: Any
    labels: Any
    cuts: int
    source: None = None

    def __len__(self) -> int:
        return len(self.labels)

    def scattered(self, indices: Any, near: object) -> tuple[Scattered, Any]:
        return Scattered.of(self.images[indices]), self.labels[indices].astype(np.int64)

    def weights(self, indices: Any) -> None:
        return None


def in_place(folder: Path, source: Source, chunk: int) -> Dataset:
    """The same samples in a compressed zarr array, as others write them."""
    images, labels = source.train
    group = zarr.open_group(str(folder / "foreign.zarr"), mode="w")
    group.create_array("x", shape=images.shape, chunks=(chunk, *SHAPE), dtype=images.dtype)[...] = images
    group.create_array("y", shape=labels.shape, chunks=labels.shape, dtype=labels.dtype)[...] = labels
    place = str(folder / "foreign.zarr")
    found = outline(Arrays(f"{place}/x", f"{place}/y", test=0.01, validation=VALIDATION))
    return found.dataset(found.index([seen for piece in found.pieces() for seen in look(piece)]))


def trained(data: Dataset, samples: int) -> float:
    """Images a second of one pass of training over the first samples, from an empty cache."""
    train = {"batch_size": BATCH, "strategy": "bsp", "partition": "udpa", "lr": 1e-4}
    job = resolve({"data": {"path": "x", "validation": VALIDATION}, "model": {"name": "lenet5"}, "train": train})
    replica = Replica(job, data, Device(), clock=time.perf_counter)
    CACHE.clear()
    begun = time.perf_counter()
    replica.train(((0, samples),), samples, presentation=0, progress=(0.0, 0.1))
    return samples / (time.perf_counter() - begun)


def local(given: argparse.Namespace) -> dict[str, Any]:
    """Rates of each source of samples, and what part they are of that from memory."""
    keep_freed_memory()  # as a worker does
    with tempfile.TemporaryDirectory() as folder, single_threaded_blas():
        path, source = made(Path(folder), given.samples)
        stored = open_dataset(path)
        memory = replace(stored, train=InMemory(*source.train, stored.manifest.chunk))  # type: ignore[arg-type] # has what a replica uses
        sources = {"memory": memory, "store": stored, "in_place": in_place(Path(folder), source, stored.manifest.chunk)}
        samples = len(sources["in_place"].train) - VALIDATION
        rounds = in_turns({name: functools.partial(trained, data, samples) for name, data in sources.items()}, given)
    ratios = {f"{name}_of_memory": median(r[name] / r["memory"] for r in rounds) for name in ("store", "in_place")}
    return {"samples": samples, **_medians(rounds, "images_per_second"), **ratios, "rounds": rounds}


def in_turns(ways: dict[str, Callable[[], float]], given: argparse.Namespace) -> list[dict[str, float]]:
    """Each way once a round, the first one another each time; one round before, which does not count."""
    names, rounds = list(ways), list[dict[str, float]]()
    for number in range(given.rounds + 1):
        turned = names[number % len(names) :] + names[: number % len(names)]
        rounds.append({name: ways[name]() for name in turned})
        print(f"round {number}: {rounds[-1]}", file=sys.stderr)
    return rounds[1:]


def _medians(rounds: list[dict[str, float]], what: str) -> dict[str, Any]:
    return {what: {name: round(median(r[name] for r in rounds), 1) for name in sorted(rounds[0])}}


# --- over a link ---


def served(net: Network, host: Host, folder: Path) -> str:
    """Serve a folder from a host; the name of what does it."""
    if nginx := shutil.which("nginx"):
        conf = folder.parent / "nginx.conf"
        conf.write_text(
            f"daemon off; user root; worker_processes 1; pid {folder.parent}/nginx.pid; error_log stderr;\n"
            "events {}\n"
            f"http {{ access_log off; sendfile on; server {{ listen {host.address}:{PORT}; root {folder}; }} }}\n"
        )
        net.start(host, nginx, "-c", str(conf), "-p", str(folder.parent))
        return "nginx"
    net.start(host, sys.executable, "-m", "http.server", str(PORT), "--bind", host.address, "--directory", str(folder))
    return "http.server"


def inside(url: str) -> None:
    """On the reader's host: measure whatever a line asks for; a line with bytes a second each time."""
    keep_freed_memory()  # as a worker does
    data = _patiently(lambda: open_dataset(f"{url}/tiles.zarr"))
    ways = {"loader": lambda: read(data), "one_by_one": lambda: one_by_one(data), "download": lambda: download(data)}
    for line in sys.stdin:
        CACHE.clear()
        print(json.dumps(ways[line.strip()]()), flush=True)


def _patiently(opened: Callable[[], Dataset]) -> Dataset:
    deadline = time.monotonic() + 20
    while True:
        try:
            return opened()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)  # the server is starting: it refuses connections until then


def read(data: Dataset) -> float:
    """Bytes of images a second that batches bring to a consumer that does nothing."""
    plan = BatchPlan(((0, len(data.train)),), BATCH, seed=0)
    begun = time.perf_counter()
    with batches(data, data.train, plan) as stream:
        seen = sum(len(batch.labels) for batch in stream)
    return seen * data.sample_bytes / (time.perf_counter() - begun)


def one_by_one(data: Dataset) -> float:
    """The same with one chunk read at a time."""
    usual, loader.THREADS = loader.THREADS, 1
    try:
        return read(data)
    finally:
        loader.THREADS = usual


def download(data: Dataset) -> float:
    """Bytes a second of a plain download of the same files, four at a time."""
    url = urlsplit(data.path)
    source: Any = data.train.source
    names = [f"{url.path}/train/images/c/{i}/0/0/0" for i in range(-(-len(data.train) // source.chunk))]

    def fetched(name: str) -> int:
        connection = http.client.HTTPConnection(url.netloc)
        connection.request("GET", name)
        size = len(connection.getresponse().read())
        connection.close()
        return size

    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(fetched, names)) / (time.perf_counter() - begun)


def link(given: argparse.Namespace) -> dict[str, Any]:
    """Rates over the link, and what part of it they are."""
    bandwidth = BANDWIDTHS[given.bandwidth]
    with tempfile.TemporaryDirectory() as scratch, network() as net:
        os.chmod(scratch, 0o755)
        folder = Path(scratch, "www")
        folder.mkdir()
        made(folder, given.samples)
        server, reader = net.host(bandwidth), net.host(bandwidth)
        by = served(net, server, folder)
        process = net.talk(
            reader, sys.executable, "-m", "benchmarks.loader_turns", "--inside", f"http://{server.address}:{PORT}"
        )

        def asked(way: str) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(way + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the reader ended; the hosts said:\n{net.logs()}")
            return float(json.loads(line))

        rounds = in_turns({way: functools.partial(asked, way) for way in ("loader", "one_by_one", "download")}, given)
    most = bandwidth * FRAMING
    return {
        "samples": given.samples,
        "server": by,
        "link": given.bandwidth,
        **_medians(rounds, "bytes_per_second"),
        "of_link": {way: round(median(r[way] for r in rounds) / bandwidth, 3) for way in rounds[0]},
        "of_payload": {way: round(median(r[way] for r in rounds) / most, 3) for way in rounds[0]},
        "rounds": rounds,
    }


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["local", "link"])
    parser.add_argument("--samples", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--bandwidth", choices=list(BANDWIDTHS), default="1 Gb/s")
    parser.add_argument("--json", help="file whose entry of this name is replaced by the figures")
    given = parser.parse_args()
    given.samples = given.samples or (3000 if given.what == "local" else 16_000)
    given.rounds = given.rounds or (7 if given.what == "local" else 3)
    machine = {"processor": device_profile("cpu", cpu_count()).name, "cores": cpu_count()}
    load = round(os.getloadavg()[0], 2)
    found = {**machine, "load_before": load, **(local if given.what == "local" else link)(given)}
    print(json.dumps(found, indent=1))
    if given.json:
        file = Path(given.json)
        kept = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(kept | {given.what: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
