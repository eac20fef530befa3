"""Data sets at rest: open them, read samples by range or index, check them from end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from daskcnn import compiled
from daskcnn.arrays import cpu_count
from daskcnn.compiled.given import address
from daskcnn.errors import DataError, UserError
from daskcnn.markup import as_table
from daskcnn.store.array_index import ArrayIndex
from daskcnn.store.chunk_facts import Images, class_counts
from daskcnn.store.chunk_source import Block, ChunkSource, Indices, StoredChunks
from daskcnn.store.files import Files
from daskcnn.store.manifest import MAX_CHUNK_BYTES, PARTS, Fit, Labelling, Manifest, ValueRange, parse

Labels = npt.NDArray[Any]
"""One class of each sample, (N,) int64, or rows of 0 and 1, (N, L) uint8, one column for each of several labels."""
_NONE_HERE = "check the path, or make a data set with `daskcnn data prepare` or `daskcnn.prepare`"
_AN_ARRAY = "use it in place by data.images and data.labels, or make a data set of it with daskcnn.prepare"
_CLASSES_SHOWN = 20  # of a data set in a notebook
SMALLEST_DEVIATION = 1e-30
"""A channel that varies less counts as the same everywhere: float32 has no room for what is divided by less."""


@dataclass(frozen=True, slots=True)
class Scattered:
    """The addresses (n,) of samples of this shape and type, and the arrays that hold them."""

    addresses: npt.NDArray[np.uint64]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    held: Sequence[npt.NDArray[Any]]

    @classmethod
    def of(cls, samples: npt.NDArray[Any]) -> Scattered:
        """Return the samples of an array, (n, …)."""
        samples = np.ascontiguousarray(samples)
        count, shape = len(samples), samples.shape[1:]
        apart = np.arange(count, dtype=np.uint64) * np.uint64(prod(shape) * samples.itemsize)
        return cls(np.uint64(address(samples)) + apart, shape, samples.dtype, [samples])

    def copied(self) -> npt.NDArray[Any]:
        """Return the samples in an array of their own, (n, …)."""
        samples = np.empty((len(self.addresses), *self.shape), self.dtype)
        compiled.minibatch.gather(self.addresses, samples.reshape(len(samples), prod(self.shape)).view(np.uint8))
        return samples


Near: TypeAlias = dict[str, dict[int, tuple[Block, int]]]
"""Chunks at hand: by array and number, with their addresses."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Samples by the chunks that they lie in: those of chunk i have `places` and `order` from edge i to edge i + 1.

    `places` are in the chunk; `order` has the numbers among the samples that were asked for.
    """

    chunks: list[int]
    edges: list[int]
    places: Indices
    order: Indices


@dataclass(frozen=True)
class Split:
    """The training or the test part: the first `samples` samples of a source. Chunks are checked when they are read."""

    name: str
    samples: int
    source: ChunkSource

    def __len__(self) -> int:
        return self.samples

    @property
    def stored(self) -> StoredChunks:
        """The chunks of a prepared data set. Raises TypeError for arrays that are used in place."""
        if not isinstance(self.source, StoredChunks):
            raise TypeError(f"{self.name}: arrays that are used in place have no stored chunks")
        return self.source

    @property
    def cuts(self) -> int | Indices:
        """Samples of each chunk; or the samples with which another chunk begins, where chunks differ."""
        return self.source.cuts

    def read(self, lo: int, hi: int) -> tuple[Images, Labels]:
        """Return images (hi-lo, H, W, C) and the labels of samples lo…hi. Raises DataError if a chunk is damaged."""
        return self.gather(np.arange(lo, hi))

    def gather(self, indices: Indices) -> tuple[Images, Labels]:
        """Return images (n, H, W, C) and labels of these samples, in this order. Held chunks cost only a copy."""
        parts = self._by_chunk(indices)
        return self._taken("images", parts), _as_labels(self._taken("labels", parts))

    def scattered(self, indices: Indices, near: Near | None = None) -> tuple[Scattered, Labels]:
        """Return where images of these samples lie, and their labels, in this order.

        `near` has the chunks of the last batch, and gets those of this one: looking for a chunk takes as long as
        reading its samples.
        """
        parts, near = self._by_chunk(indices), {} if near is None else near
        return self._lying("images", parts, near), _as_labels(self._lying("labels", parts, near).copied())

    def _lying(self, array: str, parts: _Parts, near: Near) -> Scattered:
        last = near.get(array, {})
        chunks = near[array] = {chunk: last.get(chunk) or self._located(array, chunk) for chunk in parts.chunks}
        shape, dtype = self.source.like(array)
        samples = np.diff(parts.edges)
        begins = np.repeat([begin for _, begin in chunks.values()], samples)
        assert (parts.places < np.repeat([len(block) for block, _ in chunks.values()], samples)).all()
        lying = np.empty(len(begins), np.uint64)
        lying[parts.order] = begins + parts.places * (prod(shape) * dtype.itemsize)
        return Scattered(lying, shape, dtype, [block for block, _ in chunks.values()])

    def _located(self, array: str, chunk: int) -> tuple[Block, int]:
        shape, dtype = self.source.like(array)
        block = np.ascontiguousarray(self.source.held(array, chunk), dtype)
        assert block.shape[1:] == shape, "what reads samples at their addresses relies on it"
        return block, address(block)

    def weights(self, indices: Indices) -> npt.NDArray[np.float32] | None:
        """Return the weights of these samples, (n,), in this order; None where the samples have none."""
        return self._taken("weights", self._by_chunk(indices)) if "weights" in self.source.arrays else None

    def labels(self) -> Labels:
        """Return the labels of all samples."""
        return _as_labels(self._taken("labels", self._by_chunk(np.arange(self.samples))))

    def _by_chunk(self, indices: Indices) -> _Parts:
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.samples):
            bad = int(indices.min()) if indices.min() < 0 else int(indices.max())
            raise IndexError(f"sample {bad}: {self.name} has samples 0 to {self.samples - 1}")
        chunks, places = self.source.places(indices)
        order = np.argsort(chunks, kind="stable")
        chunks = chunks[order]
        begins = np.flatnonzero(np.diff(chunks, prepend=chunks[:1] - 1))
        return _Parts(chunks[begins].tolist(), [*begins.tolist(), len(order)], places[order], order)

    def _taken(self, array: str, parts: _Parts) -> npt.NDArray[Any]:
        shape, dtype = self.source.like(array)
        taken = np.empty((len(parts.order), *shape), dtype)
        for chunk, (a, b) in zip(parts.chunks, pairwise(parts.edges), strict=True):
            taken[parts.order[a:b]] = self.source.held(array, chunk).take(parts.places[a:b], axis=0)
        return taken


def _as_labels(stored: npt.NDArray[Any]) -> Labels:
    return stored.astype(np.int64) if stored.ndim == 1 else stored


class Described(Protocol):
    """The facts that a network needs of its images, as in `Dataset`. A checkpoint keeps them too."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of an image."""

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of every channel, (C,)."""

    @property
    def deviation(self) -> npt.NDArray[np.float64]:
        """Divisor of every channel after its mean is subtracted, (C,); nowhere zero."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number type of the images at rest."""

    @property
    def labels(self) -> Labelling:
        """The kind of the labels: one class of each sample, or several labels."""

    @property
    def nodata(self) -> float | None:
        """The value that stands for no data, as NaN then does too; None where every pixel has data."""

    @property
    def fit(self) -> Fit | None:
        """The way in which image files became images of this size; None where they are no image files."""

    @property
    def value_range(self) -> ValueRange | None:
        """The numbers of image files of more than 8 bits that are black and white; None where none is stated."""


@dataclass(frozen=True)
class Dataset:
    """An open data set: its manifest and its two parts.

    `scale` has a mean and a deviation of every channel to be used in place of the data set's own. `index` is that of
    arrays that are used in place, where it is known.
    """

    path: str
    manifest: Manifest
    train: Split
    test: Split
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    index: ArrayIndex | None = None

    def __repr__(self) -> str:
        H, W, C = self.shape
        images = f"{len(self.train):,} training and {len(self.test):,} test images of {H}x{W}x{C} {self.dtype}"
        return f"<Dataset {self.name!r} at {self.path}: {images}, {len(self.classes):,} classes>"

    def _repr_html_(self) -> str:
        H, W, C = self.shape
        classes = ", ".join(self.classes[:_CLASSES_SHOWN]) + (" …" if len(self.classes) > _CLASSES_SHOWN else "")
        rows = [("path", self.path), ("images", f"{H}×{W}×{C} {self.dtype}")]
        rows += [("training images", f"{len(self.train):,}"), ("test images", f"{len(self.test):,}")]
        return as_table(f"Data set {self.name}", [*rows, (f"{len(self.classes):,} classes", classes)])

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.manifest.name

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.manifest.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of an image."""
        return self.manifest.shape

    @cached_property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of every channel over the training pixels, (C,)."""
        return np.asarray(self.manifest.mean if self.scale is None else self.scale[0], np.float64)

    @cached_property
    def deviation(self) -> npt.NDArray[np.float64]:
        """Standard deviation of every channel over the training pixels, (C,); 1 for a channel that is the same.

        A data set of format 1 has one deviation, of all pixels after the channel means are subtracted.
        """
        own = self.manifest.deviation if self.scale is None else self.scale[1]
        found = np.broadcast_to(np.asarray(own, np.float64), (self.shape[2],))
        return np.where(found < SMALLEST_DEVIATION, 1.0, found)

    def scaled(self, mean: Sequence[float], deviation: Sequence[float]) -> Dataset:
        """Return the same with another mean and deviation. Raises DataError where they are not one a channel."""
        for name, numbers in (("mean", mean), ("deviation", deviation)):
            if len(numbers) != self.shape[2]:
                reason = f"{len(numbers)} numbers for {self.shape[2]} channels of {self.path}"
                raise DataError(f"data.scale.{name}", reason, "give one for each channel")
        return replace(self, scale=(tuple(mean), tuple(deviation)))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number type of the images at rest."""
        return np.dtype(self.manifest.dtype)

    @property
    def labels(self) -> Labelling:
        """The kind of the labels: one class of each sample, or several labels."""
        return self.manifest.labels

    @property
    def nodata(self) -> float | None:
        """The value that stands for no data, as NaN then does too; None where every pixel has data."""
        return self.manifest.nodata

    @property
    def fit(self) -> Fit | None:
        """The way in which image files became images of this size; None where they are no image files."""
        return self.manifest.fit

    @property
    def value_range(self) -> ValueRange | None:
        """The numbers of image files of more than 8 bits that are black and white; None where none is stated."""
        return self.manifest.value_range

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image at rest."""
        return self.manifest.sample_bytes

    @property
    def order(self) -> str:
        """Order of the samples: "shuffled" or "stored"."""
        return self.manifest.order

    @property
    def seed(self) -> int:
        """Seed of the shuffle."""
        return self.manifest.seed

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest, equal on every worker that sees the same data."""
        return self.train.source.fingerprint


def open_dataset(path: str, *, limit: int | None = None) -> Dataset:
    """Open a prepared data set; `limit` keeps the first samples of each part. Only metadata are read.

    Raises DataError if the store is missing, has another format, is empty or inconsistent, or holds one class only.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit}", "at least one sample is needed", "set data.limit to 1 or more")
    files = Files.at(path)
    root = files.json("zarr.json")
    if root is None:
        if files.size(".zgroup") is not None:
            raise DataError(path, "a zarr store of format 2, format 3 is needed", _NONE_HERE)
        found = "no data set here" if files.is_empty() else "something else than a zarr group"
        raise DataError(path, found, _NONE_HERE)
    if root.get("node_type") == "array":
        raise DataError(path, "a zarr array, not a data set", _AN_ARRAY)
    manifest = parse(root.pop("attributes", None), path)
    fingerprint = manifest.fingerprint()
    train, test = (_open_split(files, manifest, fingerprint, name, limit) for name in PARTS)
    if limit is not None and len(np.unique(train.labels(), axis=0)) < 2:
        raise DataError(path, f"limit={limit} leaves training samples of one class only", "raise data.limit")
    return Dataset(path, manifest, train, test)


def _open_split(files: Files, manifest: Manifest, fingerprint: str, name: str, limit: int | None) -> Split:
    part = manifest.part(name)
    of_part = arrays_of(manifest, name)
    arrays = {
        array: files.plain_array(f"{name}/{array}", shape, manifest.chunk, kind) for array, shape, kind in of_part
    }
    samples = part.samples if limit is None else min(limit, part.samples)
    return Split(name, samples, StoredChunks(name, manifest.chunk, files, part, fingerprint, arrays))


def arrays_of(manifest: Manifest, name: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and number type of each array of a part."""
    samples = manifest.part(name).samples
    several = (len(manifest.classes),) if manifest.labels == "several" else ()
    yield "images", (samples, *manifest.shape), manifest.dtype
    yield "labels", (samples, *several), manifest.label_dtype
    if name == "train" and manifest.weighted:
        yield "weights", (samples,), "float32"


def verify(dataset: Dataset, between: Callable[[], None] = lambda: None) -> None:
    """Read every chunk that the data set's samples lie in: all are present and whole, every label is a class.

    The class counts of a part that no limit shortens are checked too. `between` is called after every chunk. If it
    raises, the reading ends and no thread continues. Raises DataError naming store, array, chunk and samples, or the
    label and its sample. Arrays that are used in place are left out: they are checked as they are read.
    """
    parts = dataset.train, dataset.test
    stored = [(len(part), part.source) for part in parts if isinstance(part.source, StoredChunks)]
    jobs = [
        (source, array, index)
        for samples, source in stored
        for array in sorted(source.arrays, reverse=True)
        for index in range(-(-samples // source.chunk))
    ]
    counts = {source.name: np.zeros(len(dataset.classes), np.int64) for _, source in stored}
    chunk_bytes = dataset.manifest.chunk * dataset.manifest.sample_bytes
    threads = max(1, min(4, cpu_count(), MAX_CHUNK_BYTES // chunk_bytes))
    with ThreadPoolExecutor(threads, thread_name_prefix="daskcnn-verify") as pool:
        try:
            for job, counted in zip(jobs, pool.map(lambda job: _verified(dataset, *job), jobs), strict=True):
                counts[job[0].name] += counted
                between()
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise
    for samples, source in stored:
        found, said = counts[source.name].tolist(), list(source.part.class_counts)
        if samples == source.part.samples and found != said:
            reason = f"{source.name} has class counts {found}, its manifest says {said}"
            raise DataError(dataset.path, reason, "make the data set again")


def _verified(dataset: Dataset, source: StoredChunks, array: str, index: int) -> npt.NDArray[np.int64] | int:
    """Check a chunk. Returns the samples of each class of a chunk of labels, 0 for another one."""
    data = source.load(array, index)
    if array == "weights" and (wrong := ~(np.isfinite(data) & (data >= 0))).any():
        sample = index * source.chunk + int(np.flatnonzero(wrong)[0])
        reason = f"{source.name}/weights, sample {sample} has weight {data[wrong][0]}"
        raise DataError(dataset.path, reason, "make the data set again with weights of 0 or more")
    if array != "labels":
        return 0
    last = 1 if data.ndim == 2 else len(dataset.classes) - 1
    if (bad := np.argwhere(data > last)).size:
        sample = index * source.chunk + int(bad[0][0])
        kinds = f"{'classes' if data.ndim == 1 else 'labels'} are 0 to {last}"
        reason = f"{source.name}/labels, sample {sample} has label {data[tuple(bad[0])]}, {kinds}"
        raise DataError(dataset.path, reason, "make the data set again")
    return np.array(class_counts(data, len(dataset.classes)))
