"""Batches for training, read, normalised and augmented on a thread ahead of it (Theano-MPI, Alg. 1).

Other threads read the chunks that come next into the cache, several at a time.

A presentation is one pass over a worker's samples. The worker's ranges are cut at the edges of chunks. These
pieces are shuffled and grouped into windows that fit the chunk cache, and the samples of a window are shuffled.
Order and keys depend on (seed, presentation, sample) alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from daskcnn import compiled
from daskcnn.arrays import derive
from daskcnn.store.augmentation import NAMED, Augment, first_move, steps_of, with_chances
from daskcnn.store.augmentation.step import Array, Keys, Mixture, Moves, Pictures, ShownSamples, moved
from daskcnn.store.chunk_facts import Images, missing_pixels
from daskcnn.store.chunk_source import CACHE, ChunkSource, Indices
from daskcnn.store.dataset import Dataset, Described, Labels, Near, Scattered, Split

WINDOW_BYTES = 512 << 20
IN_PLACE_WINDOW_BYTES = 384 << 20
"""A quarter of the cache is for scattered samples there: two windows fit the rest."""
DEPTH = 2
_SLAB_BYTES = 256 << 10
THREADS = 4
"""Chunks that are read at a time: a request to a remote storage mostly waits."""


@contextmanager
def reading_ahead(source: ChunkSource | None, order: Indices, ahead: int) -> Iterator[Callable[[int], None]]:
    """Read the chunks of samples in this order ahead, on threads that end with the context.

    Yields a function to be called with how many samples of the order are asked for, before they are taken. At most
    `ahead` bytes of images are read before that, and half of what the cache holds. A source of None is in memory.
    """
    if source is None or not len(order):
        yield lambda samples: None
        return
    chunks, _ = source.places(order)
    different, first = np.unique(chunks, return_index=True)
    by_first_use = np.argsort(first, kind="stable")
    coming, first = different[by_first_use].tolist(), first[by_first_use]
    further, begun = max(1, min(ahead, CACHE.limit // 2) // max(1, source.chunk_bytes)), 0
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="daskcnn-loader-ahead")

    def read(index: int) -> None:
        with suppress(Exception):  # who needs the chunk asks again, and is told
            for array in source.arrays:
                source.held(array, index)

    def reached(samples: int) -> None:
        nonlocal begun
        until = min(len(coming), int(np.searchsorted(first, samples)) + further)
        for index in coming[begun:until]:
            pool.submit(read, index)
        begun = max(begun, until)

    try:
        yield reached
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class BatchPlan:
    """The samples to load, and the seed of their order and augmentation.

    Attributes
    ----------
    ranges : samples (lo, hi)
    presentation : number of the pass; each pass has its own order
    limit : the most samples of this presentation; None for all
    shuffle : false to keep the order of the ranges
    steps : cut the presentation into this many batches, equal within one sample, whatever the batch size
    edges : yields where batches begin and end, given how many samples there are; asked for each one as it is prepared
    """

    ranges: tuple[tuple[int, int], ...]
    batch_size: int
    seed: int
    presentation: int = 0
    limit: int | None = None
    augment: Augment = "none"
    shuffle: bool = True
    steps: int | None = None
    edges: Callable[[int], Iterator[tuple[int, int]]] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: at least 1 is needed; set train.batch_size")
        if isinstance(self.augment, str) and self.augment not in NAMED:
            raise ValueError(f"augment={self.augment!r}: use one of {', '.join(NAMED)}, or steps; set data.augment")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit={self.limit}: a presentation shows 0 samples or more")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps={self.steps}: a presentation has at least one")
        if bad := [r for r in self.ranges if not 0 <= r[0] <= r[1]]:
            raise ValueError(f"range {bad[0]}: ranges are (lo, hi) with 0 <= lo <= hi")


@dataclass(frozen=True)
class Batch:
    """One minibatch on the host: normalised images (H, W, N, C), labels, keys (N,) for other draws of each sample.

    `weights` (N,) are factors on each sample's loss; None where every sample counts the same.
    """

    x: Array
    labels: Labels
    keys: Keys
    weights: npt.NDArray[np.float32] | None = None
    mixture: Mixture | None = None


def sample_keys(plan: BatchPlan, indices: Indices) -> Keys:
    """Return the key of each sample in this presentation, a function of seed, presentation and the sample's index."""
    return derive(np, derive(np, indices.astype(np.uint64), plan.seed), plan.presentation)


def sample_order(plan: BatchPlan, chunk: int | Indices, window: int) -> Indices:
    """Return the indices of the samples in the order they are shown; `chunk` and `window` are in samples.

    Where chunks differ, `chunk` holds the samples with which another one begins.
    """
    if not plan.shuffle:
        return _concatenate([np.arange(lo, hi) for lo, hi in plan.ranges])[: plan.limit]
    pieces = [piece for lo, hi in plan.ranges for piece in _pieces(lo, hi, chunk)]
    starts = np.array([lo for lo, _ in pieces], np.int64)
    shuffled = [pieces[i] for i in np.argsort(derive(np, sample_keys(plan, starts), 1), kind="stable")]
    groups = (_concatenate([np.arange(lo, hi) for lo, hi in group]) for group in _windows(shuffled, window))
    mixed = [own[np.argsort(derive(np, sample_keys(plan, own), 2), kind="stable")] for own in groups]
    return _concatenate(mixed)[: plan.limit]


def _pieces(lo: int, hi: int, chunk: int | Indices) -> Iterator[tuple[int, int]]:
    """Cut the range at the edges of chunks."""
    if isinstance(chunk, int):
        between = list(range((lo // chunk + 1) * chunk, hi, chunk))
    else:
        between = chunk[(chunk > lo) & (chunk < hi)].tolist()
    return pairwise([lo, *between, hi]) if lo < hi else iter(())


def _windows(pieces: Iterable[tuple[int, int]], window: int) -> Iterator[list[tuple[int, int]]]:
    """Yield groups of pieces of at most `window` samples, or of one piece if that is larger."""
    group: list[tuple[int, int]] = []
    size = 0
    for lo, hi in pieces:
        if group and size + hi - lo > window:
            yield group
            group, size = [], 0
        group.append((lo, hi))
        size += hi - lo
    if group:
        yield group


def _concatenate(parts: list[Indices]) -> Indices:
    return np.concatenate([np.empty(0, np.int64), *parts])


def normalise(dataset: Described, images: Images, dtype: npt.DTypeLike = np.float32) -> Array:
    """Turn images (N, H, W, C) into x (H, W, N, C), standardised by channel. Pixels without data become 0, the mean."""
    return placed(dataset, Scattered.of(images), dtype, Moves())


def placed(dataset: Described, images: Scattered, dtype: npt.DTypeLike, move: Moves) -> Array:
    """Return images normalised and moved: of bytes in one compiled pass, of others by array expressions."""
    if images.dtype != np.uint8 or dataset.nodata is not None:
        x = _normalised(dataset, images.copied(), dtype)
        return x if move.still else moved(x, move)
    (h, w, c), n = images.shape, len(images.addresses)
    x, rows = np.empty((h, w, n, c), dtype), np.empty((n, compiled.minibatch.ROWS, w * c), dtype)
    mean, factor = (np.tile(a.astype(dtype), w) for a in (dataset.mean, 1 / dataset.deviation))
    loop = compiled.minibatch.normalise_reflected if move.border == "reflect" else compiled.minibatch.normalise
    loop(images.addresses, mean, factor, move.places(n), rows, x)  # `images` holds what it reads
    return x


def _augmented(
    dataset: Described, images: Scattered, dtype: npt.DTypeLike, augment: Augment, samples: ShownSamples
) -> Pictures:
    """Return images after the steps of augmentation, of which the loader makes the first moves as it reads."""
    h, w, _ = images.shape
    move, steps = first_move(with_chances(steps_of(augment), samples), (h, w))
    pictures = Pictures(placed(dataset, images, dtype, move), dataset)
    for step, chance in steps:
        pictures = step.apply(pictures, chance)
    return pictures


@np.errstate(over="ignore")  # a mark for no data may be larger than float32 has room for
def _normalised(dataset: Described, images: Images, dtype: npt.DTypeLike) -> Array:
    n, h, w, c = images.shape
    x = np.empty((h, w, n, c), dtype)
    if not n:
        return x
    # pixels of float64 that lie close together far from 0 are one number in float32: the mean is taken off before
    wide = np.result_type(images.dtype, dtype) if images.dtype.kind == "f" else x.dtype
    mean = np.tile(dataset.mean, n).astype(wide)  # one long inner loop instead of one of C per pixel
    factor = np.tile((1 / dataset.deviation).astype(wide), n)
    several = max(1, _SLAB_BYTES // (w * n * c * wide.itemsize)) if x.size else 1
    for lo in range(0, h, several):  # rows of pixels that stay in the processor's cache
        made = x[lo : lo + several]
        rows = (made if wide == x.dtype else np.empty(made.shape, wide)).reshape(-1, n * c)
        rows.reshape(made.shape)[...] = images[:, lo : lo + several].transpose(1, 2, 0, 3)
        rows -= mean
        rows *= factor
        if wide != x.dtype:
            made[...] = rows.reshape(made.shape)
    if (missing := missing_pixels(images, dataset.nodata)) is not None:
        x[missing.transpose(1, 2, 0, 3)] = 0
    return x


def load_batch(
    dataset: Dataset, split: Split, plan: BatchPlan, dtype: npt.DTypeLike, indices: Indices, near: Near | None = None
) -> Batch:
    """Return the batch of these samples, in this order. Raises DataError if a chunk is damaged.

    `near` is an empty dictionary for the first of several batches; it holds the chunks of the last one.
    """
    images, labels = split.scattered(indices, near)
    keys = sample_keys(plan, indices)
    samples = ShownSamples(keys, indices, plan.seed, plan.presentation)
    pictures = _augmented(dataset, images, dtype, plan.augment, samples)
    return Batch(pictures.x, labels, keys, split.weights(indices), pictures.mixture)


def presentation_order(dataset: Dataset, split: Split, plan: BatchPlan) -> Indices:
    """Return the indices of the samples in the order in which `batches` shows them."""
    return sample_order(plan, split.cuts, max(1, _window_bytes(split) // dataset.sample_bytes))


def _window_bytes(split: Split) -> int:
    return WINDOW_BYTES if isinstance(split.cuts, int) else IN_PLACE_WINDOW_BYTES


@contextmanager
def batches(
    dataset: Dataset, split: Split, plan: BatchPlan, dtype: npt.DTypeLike = np.float32, order: Indices | None = None
) -> Iterator[Iterator[Batch]]:
    """Yield the batches of a presentation; two are prepared ahead on a thread that ends with the context.

    The chunks that come next are read meanwhile on threads of their own. An error while loading is raised where its
    batch is asked for. The last batch may be smaller. order: the samples in the order to show them in, if it is not the
    plan's.
    """
    order = presentation_order(dataset, split, plan) if order is None else order
    pool = ThreadPoolExecutor(1, thread_name_prefix="daskcnn-loader")
    with reading_ahead(split.source, order, _window_bytes(split)) as reached:
        near: Near = {}

        def load(lo: int, hi: int) -> Batch:
            reached(hi)
            return load_batch(dataset, split, plan, dtype, order[lo:hi], near)

        try:
            yield _ahead(pool.submit(load, lo, hi) for lo, hi in batch_edges(plan, len(order)))
        finally:
            pool.shutdown(cancel_futures=True)


def batch_edges(plan: BatchPlan, samples: int) -> Iterator[tuple[int, int]]:
    """Return where the batches of a presentation begin and end; none is empty."""
    if plan.edges is not None:
        return plan.edges(samples)
    if plan.steps is None or not samples:
        return ((lo, min(lo + plan.batch_size, samples)) for lo in range(0, samples, plan.batch_size))
    steps = min(plan.steps, samples)
    return pairwise(samples * i // steps for i in range(steps + 1))


def _ahead(futures: Iterator[Future[Batch]]) -> Iterator[Batch]:
    """Yield results in order, with `DEPTH` more submitted than were taken."""
    pending: deque[Future[Batch]] = deque()
    for future in futures:
        pending.append(future)
        if len(pending) > DEPTH:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
