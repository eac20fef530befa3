"""Arrays into a data set: `daskcnn.prepare` and `daskcnn data prepare arrays`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import dask
import numpy as np
import numpy.typing as npt
from distributed import Client, Future, futures_of

from daskcnn.cluster.link.calls import Check, no_check
from daskcnn.cluster.link.client import bound_to, given_or_default
from daskcnn.cluster.run.admission import check_sight
from daskcnn.cluster.spread.spread import spread, submit_part
from daskcnn.datasets.array_samples import Arrangement, ArraySamples, arranged, samples_of
from daskcnn.datasets.array_sources import ImageSource, SampleBlock, channels_elsewhere
from daskcnn.datasets.given_arrays import is_dask_array
from daskcnn.datasets.names import check_name, name_of
from daskcnn.errors import ClusterError, DataError
from daskcnn.show.renderers import terminal
from daskcnn.store.chunk_facts import ChunkFacts, check_finite, chunk_facts, missing_pixels
from daskcnn.store.dataset import Dataset, open_dataset
from daskcnn.store.foreign.array import Layout
from daskcnn.store.making import writer
from daskcnn.store.making.prepare import refuse_occupied, taken
from daskcnn.store.making.writer import Draft
from daskcnn.store.manifest import PARTS, Labelling, Order, Progress, Warn, assemble, silent
from daskcnn.store.split import check_seed

BUCKET_BYTES = 64 << 20


def prepare(
    images: Any,
    labels: Any,
    store: str | Path,
    *,
    classes: Sequence[str] | None = None,
    test: float | int | tuple[Any, Any] = 0.2,
    layout: Layout = "NHWC",
    order: Order = "shuffled",
    seed: int = 0,
    weights: Any = None,
    nodata: float | None = None,
    labelling: Labelling | None = None,
    name: str | None = None,
    chunk: int | None = None,
    client: Client | None = None,
    progress: Progress = silent,
    warn: Warn = terminal.warn,
    check: Check = no_check,
) -> Dataset:
    """Write images and labels as a data set that a job can train on, and return it.

    Images that a worker can read, of Dask or of Zarr, are written by the workers, block by block, without being whole
    anywhere. The shuffle is exact: it goes through files beside the store, which take as much room as the store.

    Parameters
    ----------
    images : NumPy, Dask, Zarr or xarray array, (N, H, W, C), (N, C, H, W) or (N, H, W), of at most 64-bit numbers.
        What is masked is no data.
    labels : (N,) integers or strings, or (N, L) of 0 and 1 for several labels a sample. Where images and labels of
        xarray or pandas have coordinates of the samples, labels are taken in the order of the images.
    store : path or URL of the data set; nothing may be there yet
    classes : names of the classes, or of the several labels. Default: the values that there are, sorted
    test : part of the samples that is kept for testing, drawn for each class: a fraction below 1 or a number of
        samples; or images and labels that are for testing
    layout : order of the axes of images with four
    order, seed : the samples are shuffled by this seed, or kept in the order that they have
    weights : (N,), how much each sample counts in training. They are divided by their mean.
    nodata : value that stands for no data, as NaN then does too: such pixels count as the channel's mean. Default: the
        fill value of a masked array
    labelling : meaning of label rows: "classes" if the one 1 of each row is its class, "several" if columns are labels
        of their own. Default: "several"; rows that all have exactly one 1 are refused then
    name : of the data set. Default: the store's name
    chunk : samples of a chunk, the unit that is read. Default: by the number of samples and their size
    client : of a cluster. Default: the present one, if there is one
    progress, check : called with stage, done and total; and now and then
    warn : called with a warning. Default: a line on stderr

    Raises
    ------
    DataError : for images and labels that are not fit to train on, with value, reason and remedy; nothing is written
    ClusterError : where a worker does not see the images, or the folder of the store

    Examples
    --------
    >>> import numpy as np, daskcnn
    >>> images = np.random.default_rng(0).integers(0, 4096, (100, 8, 8, 12), dtype=np.uint16)
    >>> dataset = daskcnn.prepare(images, np.arange(100) % 2, "tiles.zarr", classes=["field", "forest"])
    >>> dataset.shape, dataset.classes, len(dataset.train)
    ((8, 8, 12), ('field', 'forest'), 80)
    """
    out = str(store)
    if suspected := channels_elsewhere(images, layout):
        warn(suspected)
    _check_options(order=order, seed=seed, nodata=nodata, labelling=labelling, name=name, chunk=chunk)
    seed, chunk = int(seed), None if chunk is None else int(chunk)  # they may be numbers of NumPy
    refuse_occupied(out)
    client = given_or_default(client)
    # Dask's settings may name a cluster that is gone
    scheduler: AbstractContextManager[object] = bound_to(client) if client else dask.config.set(scheduler="threads")
    try:
        with scheduler:
            samples = samples_of(images, labels, classes, test, layout, seed, weights, nodata, labelling)
            plan = arranged(samples, name or name_of(out), order, seed, chunk)
            with writer.drafted(out, plan.draft) as draft:
                own = _ArrayWriter(samples, plan, draft, progress, check, warn)
                in_memory = all(part.images.in_memory for part in samples.given)
                facts = own.directly() if in_memory else own.through_buckets(out, client)
                draft.finish(assemble(plan.common, facts, warn=warn))
    except writer.Occupied:
        raise taken(out) from None
    return open_dataset(out)


def _check_options(*, order: Any, seed: Any, nodata: Any, labelling: Any, name: Any, chunk: Any) -> None:
    """Raise DataError for an option that cannot be, before any image is read."""
    if order not in get_args(Order):
        raise DataError(f"order={order!r}", "unknown", f"use one of {', '.join(get_args(Order))}")
    if labelling is not None and labelling not in get_args(Labelling):
        raise DataError(f"labelling={labelling!r}", "unknown", f"use one of {', '.join(get_args(Labelling))}")
    check_seed(seed)
    if nodata is not None and not (isinstance(nodata, int | float | np.number) and np.isfinite(nodata)):
        remedy = "give one such as -9999; NaN stands for no data too as soon as one is given"
        raise DataError(f"nodata={nodata!r}", "a finite number is needed", remedy)
    if chunk is not None and (not isinstance(chunk, int | np.integer) or chunk < 1):
        raise DataError(f"chunk={chunk!r}", "a whole number of 1 or more is needed", "give one, or leave it out")
    if name is not None:
        check_name(name)


@dataclass(frozen=True, slots=True, eq=False)
class _BlockWork:
    """Pass 1 of a block: what it is called, where it comes from, and where its samples go."""

    number: int
    block: SampleBlock
    source: ImageSource
    places: writer.Places
    folder: str
    nodata: float | None

    def __str__(self) -> str:
        return f"images {self.block.lo} to {self.block.hi - 1}"


def _write_block(work: _BlockWork, data: Any = None) -> None:
    block = work.block
    images = block.at_rest(work.source, data) if data is not None else block.read(work.source)
    missing = missing_pixels(images, work.nodata)
    check_finite(images, missing, where="images", first=block.lo)
    writer.write_block(work.folder, work.number, images, work.places)


def _unreadable(work: _BlockWork, error: Exception) -> None:
    """Raise DataError for an error of the images' storage; that of the blocks has told of its own."""
    if isinstance(error, OSError):
        block, remedy = work.block, "see to it that every process that reads them can, or correct what makes the array"
        reason = f"samples {block.lo} to {block.hi - 1} cannot be read ({str(error) or type(error).__name__})"
        raise DataError("images", reason, remedy) from error


@dataclass(frozen=True, slots=True, eq=False)
class _BucketWork:
    """Pass 2 of a bucket: its chunks, with their labels and weights."""

    part: str
    bucket: writer.Bucket
    ranges: tuple[tuple[int, int, int], ...]
    labels: npt.NDArray[Any]
    weights: npt.NDArray[np.float32] | None

    def __str__(self) -> str:
        return f"{self.part} samples from {self.bucket.lo} to {self.bucket.hi - 1} of all"


def _write_bucket(work: _BucketWork, *, folder: str, draft: Draft) -> list[tuple[int, ChunkFacts]]:
    manifest, lo = draft.manifest, work.bucket.lo
    images = writer.read_bucket(folder, work.bucket, manifest.shape, np.dtype(manifest.dtype))
    found = []
    for index, begin, end in work.ranges:
        cut = slice(begin - lo, end - lo)
        weights = None if work.weights is None else work.weights[cut]
        found.append((index, _write_chunk(draft, work.part, index, images[cut], work.labels[cut], weights)))
    return found


def _write_chunk(
    draft: Draft,
    part: str,
    index: int,
    images: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    weights: npt.NDArray[np.float32] | None,
) -> ChunkFacts:
    manifest = draft.manifest
    kept = {"images": images, "labels": labels.astype(manifest.label_dtype, copy=False)}
    if weights is not None:
        kept["weights"] = weights
    draft.write_chunk(part, index, kept)
    return chunk_facts(*kept.values(), classes=len(manifest.classes), nodata=manifest.nodata, where=part)


class _ArrayWriter:
    """Writes the samples to a draft, and gives the facts of the chunks of each part in their order."""

    def __init__(
        self, samples: ArraySamples, plan: Arrangement, draft: Draft, progress: Progress, check: Check, warn: Warn
    ) -> None:
        self._samples, self._plan, self._draft = samples, plan, draft
        self._progress, self._check, self._warn = progress, check, warn
        self._inverse = np.argsort(np.concatenate(plan.places), kind="stable")
        self._labels = np.concatenate([part.labels for part in samples.given])[self._inverse]
        first = samples.weights
        self._weights = None if first is None else first[self._inverse[: plan.draft.train.samples]]

    def directly(self) -> dict[str, list[ChunkFacts]]:
        """Take every chunk's images from memory."""
        for part in self._samples.given:
            for block in part.images.blocks():
                self._check()
                images = block.read(part.images)
                check_finite(images, missing_pixels(images, self._plan.nodata), where="images", first=block.lo)
        facts: dict[str, list[ChunkFacts]] = {name: [] for name in PARTS}
        for name in PARTS:
            ranges = list(self._plan.ranges(name))
            for index, (lo, hi) in enumerate(ranges):
                self._check()
                self._progress(f"write {name}", index, len(ranges))
                arrays = self._gathered(self._inverse[lo:hi]), self._labels[lo:hi], self._weights_of(name, lo, hi)
                facts[name].append(_write_chunk(self._draft, name, index, *arrays))
        return facts

    def _gathered(self, at: writer.Places) -> npt.NDArray[Any]:
        """Images of these samples, which are numbered through all arrays."""
        begin, found = 0, np.empty((len(at), *self._plan.draft.shape), self._plan.draft.dtype)
        for part in self._samples.given:
            mine = (at >= begin) & (at < begin + len(part.images))
            found[mine] = part.images.at_rest(part.images.what[at[mine] - begin])
            begin += len(part.images)
        return found

    def _weights_of(self, name: str, lo: int, hi: int) -> npt.NDArray[np.float32] | None:
        return self._weights[lo:hi] if self._weights is not None and name == "train" else None

    def through_buckets(self, out: str, client: Client | None) -> dict[str, list[ChunkFacts]]:
        """Shuffle in two passes through files, on the workers if they can read the images."""
        for part in self._samples.given:
            _check_persisted(part.images.what, client)
        there = client if all(part.images.on_workers for part in self._samples.given) else None
        if there is not None:
            folders = [found for part in self._samples.given if (found := part.images.folder) is not None]
            check_sight(there, folders, self._draft.path, self._check)
        with writer.between_passes(out) as folder:
            return self._buckets(folder, self._blocks(folder, there), there)

    def _blocks(self, folder: str, client: Client | None) -> list[writer.Places]:
        works, total = [], 0
        for part, places in zip(self._samples.given, self._plan.places, strict=True):
            for block in part.images.blocks():
                mine = places[block.lo : block.hi]
                works.append(_BlockWork(total, block, part.images, mine, folder, self._plan.nodata))
                total += 1
        told: dict[str, Any] = {"check": self._check, "warn": self._warn, "failed": _unreadable}
        results = spread(client, _write_block, works, submit=_submit_block, **told)
        for done, _ in enumerate(results):
            self._progress("read images", done + 1, total)
        return [work.places for work in works]

    def _buckets(self, folder: str, places: list[writer.Places], client: Client | None) -> dict[str, list[ChunkFacts]]:
        works = list(self._bucket_works(places))
        write = partial(_write_bucket, folder=folder, draft=self._draft)
        found: dict[str, dict[int, ChunkFacts]] = {name: {} for name in PARTS}
        results = spread(client, write, works, check=self._check, warn=self._warn)
        for done, (work, facts) in enumerate(results):
            found[work.part].update(facts)
            self._progress("write chunks", done + 1, len(works))
        return {name: [chunk for _, chunk in sorted(facts.items())] for name, facts in found.items()}

    def _bucket_works(self, places: list[writer.Places]) -> Iterator[_BucketWork]:
        each = max(1, BUCKET_BYTES // (self._plan.chunk * self._samples.given[0].images.sample_bytes))
        for name in PARTS:
            ranges = [(index, lo, hi) for index, (lo, hi) in enumerate(self._plan.ranges(name))]
            groups = [tuple(ranges[i : i + each]) for i in range(0, len(ranges), each)]
            edges = [(group[0][1], group[-1][2]) for group in groups]
            for group, bucket in zip(groups, writer.buckets(places, edges), strict=True):
                weights = self._weights_of(name, bucket.lo, bucket.hi)
                yield _BucketWork(name, bucket, group, self._labels[bucket.lo : bucket.hi], weights)


def _check_persisted(images: Any, client: Client | None) -> None:
    """Raise ClusterError where blocks of a Dask array are in the memory of another cluster than the client's."""
    if not is_dask_array(images):
        return
    held = futures_of([dict(layer) for layer in images.dask.layers.values() if layer.is_materialized()])
    if any(future.cancelled() or _scheduler_of(future.client) != _scheduler_of(client) for future in held):
        reason = "they were persisted on another cluster than the one that is to read them, or on one that is gone"
        remedy = "give client=, a client of the cluster that has them, or the array as it was before persist()"
        raise ClusterError("images", reason, remedy)


def _scheduler_of(client: Client | None) -> object:
    """The scheduler's own name: clients may know it by several addresses."""
    return client and client._scheduler_identity.get("id")


def _submit_block(client: Client, function: Future, work: _BlockWork, key: str, worker: str) -> Future:
    """Send a block to be written; of a Dask array its part of the graph goes along, and nothing else of the array.

    Blocks may have tasks in common. Those may go elsewhere once the worker that they were first meant for is lost.
    """
    block = work.block
    if not block.sliced:
        return submit_part(client, function, work, key, worker)
    without = replace(work, block=replace(block, data=None), source=replace(work.source, what=None))
    written = dask.delayed(partial(_write_block, without), pure=False)(block.data, dask_key_name=key)
    return client.compute(written, workers=[worker], allow_other_workers=True)
