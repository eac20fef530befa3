"""Hegde and Usmani's Algorithm 2, a shuffle by samples, bins and all-to-all, beside the exact shuffle of `prepare`.

    python -m benchmarks.studies.shuffle_bins [--machines 8] [--samples 50000] [--rounds 3] [--json FILE]

Images are sorted by label. Each of --machines has an equal part; here they are tasks of two Dask workers. Each machine
sends a sample of its labels; the driver merges the sorted samples (a k-way merge) and cuts them into bins of as many
images. The algorithm leaves open what a machine does with its bins:

- `a bin to each machine` is what "decide the destination machine for each image based on the bins" says. It sorts.
- `bins dealt out` gives every machine an equal part of every bin, which is what the shuffle is for: "so that each
  machine has a representative subset".

Then all machines send to all, as Dask tasks. `prepare` writes a data set in an exact random order instead; each machine
takes a range of it. Reported: classes on a machine, the largest difference of a class's share on a machine from
its share in all, samples of the least and the largest machine, bytes that change machines, seconds. Every image is
checked to be there once. The three take turns, and medians count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import daskcnn
from benchmarks.runs import load, machine, markdown

RESULTS = Path(__file__).parent / "results" / "shuffle_bins.json"
SHAPE, CLASSES = (32, 32, 3), 10
SAMPLED = 200
"""Labels that each machine sends: d of the paper."""
BINS = 20
"""Bins for each machine where bins are dealt out, so that a bin has few labels."""
TO_EACH, DEALT, EXACT = "a bin to each machine", "bins dealt out", "prepare"


@dataclass(frozen=True)
class Held:
    """A machine's images (n, H, W, C), labels (n,), and their indices in the whole data set."""

    images: Any
    labels: Any
    indices: Any

    def at(self, where: Any) -> Held:
        """Some of it."""
        return Held(self.images[where], self.labels[where], self.indices[where])


def sorted_part(number: int, machines: int, samples: int) -> Held:
    """A machine's part of images that are sorted by label, with each image's index in its first pixels."""
    indices = np.arange(number * samples // machines, (number + 1) * samples // machines)
    images = np.random.default_rng(number).integers(0, 256, (len(indices), *SHAPE), dtype=np.uint8)
    images.reshape(len(indices), -1)[:, :4] = indices.astype("<u4").view(np.uint8).reshape(-1, 4)
    return Held(images, indices * CLASSES // samples, indices)


# --- Algorithm 2 ---


def sample(part: Held, number: int) -> list[tuple[int, int, int]]:
    """Label, index and machine of a uniform sample, sorted."""
    drawn = np.random.default_rng(number).choice(len(part.labels), SAMPLED, replace=False)
    return sorted((int(part.labels[i]), int(part.indices[i]), number) for i in drawn)


def cuts(samples: Sequence[Sequence[tuple[int, int, int]]], bins: int) -> Any:
    """The indices of the images at which bins end; labels and indices have one order, as the data is sorted."""
    merged = [index for _, index, _ in merge(*samples)]
    return np.array([merged[len(merged) * i // bins] for i in range(1, bins)])


def pieces(part: Held, ends: Any, machines: int, number: int, *, dealt: bool) -> list[Held]:
    """The images that a machine sends to each."""
    bins = np.searchsorted(ends, part.indices, side="right")
    to = bins
    if dealt:  # shuffled within the bin, then in turn
        rng = np.random.default_rng([1, number])
        order = np.lexsort((rng.random(len(bins)), bins))
        to = np.empty_like(bins)
        to[order] = (np.arange(len(bins)) + number) % machines
    return [part.at(to == each) for each in range(machines)]


def received(of_all: Sequence[Held], number: int) -> Held:
    """The images that a machine has then, in an order of its own."""
    order = np.random.default_rng([2, number]).permutation(sum(len(each.labels) for each in of_all))
    names = ("images", "labels", "indices")
    return Held(*(np.concatenate([getattr(each, name) for each in of_all])[order] for name in names))


def by_bins(client: Client, parts: Sequence[Any], *, dealt: bool) -> list[Any]:
    """The machines' parts after the algorithm, as futures."""
    k = len(parts)
    samples = client.gather([client.submit(sample, part, i, pure=False) for i, part in enumerate(parts)])
    ends = cuts(samples, k * BINS if dealt else k)
    cut = [client.submit(pieces, part, ends, k, i, dealt=dealt, pure=False) for i, part in enumerate(parts)]
    to = [[client.submit(list.__getitem__, own, i, pure=False) for own in cut] for i in range(k)]
    after = [client.submit(received, own, i, pure=False) for i, own in enumerate(to)]
    wait(after)
    return after


# --- ours ---


def by_prepare(parts: Sequence[Any], path: Path, labels: Any) -> Any:
    """The data set that `prepare` has written on the workers."""
    counts = np.bincount(np.arange(len(labels)) * len(parts) // len(labels))
    blocks = [
        da.from_delayed(dask.delayed(_images)(part), (count, *SHAPE), np.uint8)
        for part, count in zip(parts, counts, strict=True)
    ]
    test = np.zeros((CLASSES, *SHAPE), np.uint8), np.arange(CLASSES)
    return daskcnn.prepare(da.concatenate(blocks), labels, path, test=test, progress=lambda *_: None)


def ranges_of(dataset: Any, machines: int) -> list[Held]:
    """Equal ranges of its training samples."""
    edges = [len(dataset.train) * i // machines for i in range(machines + 1)]
    read = (dataset.train.read(lo, hi) for lo, hi in pairwise(edges))
    return [Held(images, labels, _indices(images)) for images, labels in read]


def _images(part: Held) -> Any:
    return part.images


def _indices(images: Any) -> Any:
    return np.ascontiguousarray(images.reshape(len(images), -1)[:, :4]).view("<u4")[:, 0].astype(np.int64)


# --- figures ---


def spread_of(held: Sequence[Held], samples: int) -> dict[str, Any]:
    """How alike the machines are. Raises RuntimeError where an image is missing or there twice."""
    found = np.sort(np.concatenate([_indices(each.images) for each in held]))
    if not np.array_equal(found, np.arange(samples)):
        raise RuntimeError("the shuffle lost images, or has some twice")
    counts = np.array([np.bincount(each.labels, minlength=CLASSES) for each in held])
    shares = counts / counts.sum(1, keepdims=True)
    machines = len(held)
    homes = np.repeat(np.arange(machines), counts.sum(1))
    begun = np.concatenate([each.indices for each in held]) * machines // samples
    return {
        "classes": [int((counts > 0).sum(1).min()), int((counts > 0).sum(1).max())],
        "largest_difference": float(np.abs(shares - counts.sum(0) / samples).max()),
        "samples": [int(counts.sum(1).min()), int(counts.sum(1).max())],
        "bytes_moved": int((homes != begun).sum()) * int(np.prod(SHAPE)),
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Each shuffle's figures, with the median of its seconds."""
    labels = np.arange(options.samples) * CLASSES // options.samples
    found: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        parts = [
            client.submit(sorted_part, i, options.machines, options.samples, pure=False)
            for i in range(options.machines)
        ]
        wait(parts)
        for turn in range(options.rounds):
            ways: dict[str, Callable[[], Any]] = {
                TO_EACH: lambda: by_bins(client, parts, dealt=False),
                DEALT: lambda: by_bins(client, parts, dealt=True),
                EXACT: lambda turn=turn: by_prepare(parts, Path(folder, f"{turn}.zarr"), labels),  # type: ignore[misc]
            }
            for name, way in ways.items():
                begun = time.perf_counter()
                after = way()
                seconds.setdefault(name, []).append(time.perf_counter() - begun)
                held = ranges_of(after, len(parts)) if name == EXACT else client.gather(after)
                found[name] = spread_of(held, options.samples)
    return {name: {**figures, "seconds": median(seconds[name])} for name, figures in found.items()}


def table(found: Mapping[str, Any]) -> str:
    """A row for each shuffle, in Markdown."""
    difference = "largest difference of a class's share"
    head = ["shuffle", "classes of a machine", difference, "samples of a machine", "MB moved", "seconds"]
    return markdown(head, _rows(found), left=[0])


def tables() -> Iterator[str]:
    """Yield that of the kept results."""
    yield table(load(RESULTS)["shuffles"])


def _rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, own in found.items():
        yield [
            name,
            _between(own["classes"]),
            f"{100 * own['largest_difference']:.1f} points",
            _between(own["samples"]),
            f"{own['bytes_moved'] / 1e6:.0f}",
            f"{own['seconds']:.1f}",
        ]


def _between(edges: Sequence[int]) -> str:
    return " to ".join(f"{each:,}" for each in dict.fromkeys(edges))


def main() -> None:
    """Measure and print; keep the figures where asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--machines", type=int, default=8)
    options.add_argument("--samples", type=int, default=50_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    found = measured(given)
    print(table(found))
    if given.json:
        of = {"machine": machine(), "machines": given.machines, "samples": given.samples, "rounds": given.rounds}
        given.json.write_text(json.dumps({**of, "shuffles": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
