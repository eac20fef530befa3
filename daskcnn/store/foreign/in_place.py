"""Zarr arrays of somebody else as a data set, in place: no copy is made.

Test and validation samples are drawn from the labels, stratified by class. The rest of the training part are the
chunks in an order of their own, so that any range of samples is made of chunks from everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import derive
from daskcnn.errors import DataError
from daskcnn.store.array_index import ArrayChanged, ArrayIndex, storage_version
from daskcnn.store.chunk_facts import Moments, check_finite, missing_pixels
from daskcnn.store.chunk_source import CACHE, Block, Indices
from daskcnn.store.dataset import Dataset, Split
from daskcnn.store.foreign.array import ImageArray, Layout, open_images
from daskcnn.store.foreign.axes import axes_of, check_axes
from daskcnn.store.foreign.labels import Labelled, array_labels
from daskcnn.store.manifest import (
    Labelling,
    Manifest,
    PartManifest,
    plain_colour,
    sha256,
    strangers,
    unlearnable,
    unseen_classes,
)
from daskcnn.store.split import held_out, representative, stratified

_GATHERED_BYTES = 16 << 20
_RUN_BYTES = 32 << 20
"""Chunks of about this size together are one piece of work."""
_CHECKED = 2
"""Number of the checks that an index has passed: with others arrays are read anew."""


@dataclass(frozen=True)
class InPlaceChunks:
    """The samples of a part: in whole chunks first, scattered over all chunks from some place on.

    Scattered samples are gathered in blocks, which the cache spares: a chunk is read once for what it has of them, and
    not again with every evaluation.

    `order` has stored samples, as they are numbered here, from `scattered` on the scattered ones; `codes` the labels of
    all stored samples; `checksums` the SHA-256 of each stored chunk, where they are known.
    """

    array: ImageArray
    codes: npt.NDArray[Any]
    checksums: tuple[str, ...] | None
    order: Indices
    scattered: int
    name: str
    fingerprint: str
    arrays: ClassVar[Sequence[str]] = ("images", "labels")

    @cached_property
    def cuts(self) -> Indices:
        """The samples with which another chunk or block begins."""
        chunks, _ = self.places(np.arange(len(self.order)))
        return np.flatnonzero(np.diff(chunks, prepend=chunks[:1])).astype(np.int64)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the images of a chunk."""
        return self.array.chunk * self.array.sample_bytes

    def like(self, array: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and number type of one sample of this array."""
        if array == "images":
            return self.array.shape, self.array.dtype
        return self.codes.shape[1:], self.codes.dtype

    def places(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the chunk of each of these samples, and its place in it. Blocks have numbers below zero."""
        stored = self.order[indices]
        chunks, places = stored // self.array.chunk, stored % self.array.chunk
        beyond = indices - self.scattered
        blocks, within = -1 - beyond // self._block, beyond % self._block
        return np.where(beyond >= 0, blocks, chunks), np.where(beyond >= 0, within, places)

    def held(self, array: str, index: int) -> Block:
        """Return a chunk or block, from the cache if it is there. Raises ArrayChanged where the array has changed."""
        if array == "labels":
            lo = index * self.array.chunk
            return self.codes[self._in_block(index)] if index < 0 else self.codes[lo : lo + self.array.chunk]
        key = (self.array.path, self.fingerprint, self.name, index)
        if index < 0:
            return CACHE.get(key, lambda: self._gathered(index), spare=True)
        key = (self.array.path, self.fingerprint, "stored", index)
        return CACHE.get(key, lambda: self.load(index))

    def load(self, index: int) -> Block:
        """Return a chunk of images, not from the cache. Raises ArrayChanged where it is not what its index says."""
        data = self.array.read(index)
        if self.checksums is not None and sha256(data) != self.checksums[index]:
            lo = index * self.array.chunk
            what = f"samples {lo} to {lo + len(data) - 1} (chunk {index})"
            reason = f"{what} have changed since the array was read for its index"
            remedy = "restore the array and resume the run, or start a new run, which reads it again"
            raise ArrayChanged(self.array.path, reason, remedy)
        return self.array.as_images(data)

    def _in_block(self, index: int) -> Indices:
        return self.order[self.scattered + (-1 - index) * self._block :][: self._block]

    def _gathered(self, index: int) -> Block:
        stored = self._in_block(index)
        images = np.empty((len(stored), *self.array.shape), self.array.dtype)
        chunks = stored // self.array.chunk
        for chunk in np.unique(chunks).tolist():
            here = chunks == chunk
            images[here] = self.held("images", chunk)[stored[here] - chunk * self.array.chunk]
        return images

    @property
    def _block(self) -> int:
        return max(1, _GATHERED_BYTES // self.array.sample_bytes)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays that make up a data set, by their paths or URLs.

    Attributes
    ----------
    test : part of the samples that are for testing; None where there are arrays of their own
    seed : of the test and validation samples, and of the order of the chunks
    validation : samples at the end of the training part; None: as many as usual
    limit : the most samples of each part
    """

    images: str
    labels: str
    test: float | None = 0.2
    test_images: str | None = None
    test_labels: str | None = None
    layout: Layout = "NHWC"
    nodata: float | None = None
    labelling: Labelling | None = None
    seed: int = 0
    validation: int | None = None
    limit: int | None = None

    @property
    def name(self) -> str:
        """The end of the path, as a name of the data set."""
        return "/".join(self.images.rstrip("/").split("://")[-1].split("/")[-2:]) or self.images


@dataclass(frozen=True)
class IndexWork:
    """Chunks of an array that are looked at together, and which samples of each count in the statistics; None: all.

    The part is "train" for the array that the training samples are in, "test" for one of its own.
    """

    array: ImageArray
    part: str
    chunks: tuple[int, ...]
    counted: tuple[npt.NDArray[np.bool_] | None, ...]

    def __str__(self) -> str:
        return f"chunks {self.chunks[0]} to {self.chunks[-1]} of {self.array.path}"


@dataclass(frozen=True, slots=True)
class ChunkSeen:
    """The SHA-256 of a chunk's samples, the sums that the statistics are made of, and the pixels without data."""

    part: str
    chunk: int
    digest: str
    moments: Moments
    missing: int = 0


def look(piece: IndexWork) -> list[ChunkSeen]:
    """Read chunks. Raises DataError naming sample and channel of what is not finite."""
    return [_seen(piece, chunk, counted) for chunk, counted in zip(piece.chunks, piece.counted, strict=True)]


def _seen(piece: IndexWork, chunk: int, counted: npt.NDArray[np.bool_] | None) -> ChunkSeen:
    data = piece.array.read(chunk)
    images = piece.array.as_images(data)
    missing = missing_pixels(images, piece.array.nodata)
    check_finite(images, missing, where=piece.array.path, first=chunk * piece.array.chunk, option="data.nodata")
    moments = Moments()
    if piece.part == "train":
        keep = slice(None) if counted is None else counted
        moments = Moments.of(images[keep], None if missing is None else missing[keep])
    return ChunkSeen(piece.part, chunk, sha256(data), moments, 0 if missing is None else int(missing.sum()))


@dataclass(frozen=True)
class Outline:
    """Arrays as far as they are known without their images: metadata, labels, and which sample is for what.

    `order` has the samples of the training part, as they are numbered in training; `scattered` of them come before the
    validation samples. With a limit they are of every class.
    """

    arrays: Arrays
    images: ImageArray
    labels: Labelled
    test_images: ImageArray
    test_labels: Labelled
    order: Indices
    scattered: int
    test: Indices

    @property
    def apart(self) -> bool:
        """True if the test samples have an array of their own."""
        return self.arrays.test_images is not None

    @property
    def opened(self) -> Sequence[ImageArray]:
        """The arrays of images."""
        return (self.images, self.test_images) if self.apart else (self.images,)

    @cached_property
    def identity(self) -> str:
        """SHA-256 of everything but the images, without where they lie."""
        parts = [(self.images, self.labels), *([(self.test_images, self.test_labels)] if self.apart else [])]
        a = self.arrays
        about = [
            [[images.digest, images.chunk, labels.digest] for images, labels in parts],
            [a.test, a.layout, a.nodata, a.seed if a.test is not None else None],
        ]
        return sha256(json.dumps(about).encode())

    @cached_property
    def cache_key(self) -> str:
        """SHA-256 of identity, path, and what the storage says of the version of the images. An index has this key."""
        about = [_CHECKED, self.identity, *([images.path, storage_version(images.files)] for images in self.opened)]
        return sha256(json.dumps(about).encode())

    def notes(self, *, listed: bool) -> Iterator[str]:
        """Yield sentences on attributes that are followed and, if `listed`, on chunks that are not stored.

        Raises DataError where these would count as data.
        """
        for images in self.opened:
            if told := str(images.about.coding):
                yield f"{images.path}: its attributes are followed: {told}"
            if listed and (absent := images.absent()):
                yield absent

    def pieces(self) -> Iterator[IndexWork]:
        """Yield the work that an index takes, for `look`."""
        trained = np.ones(self.images.samples, bool)
        if not self.apart:
            trained[_test_samples(self.arrays, self.labels, self.arrays.images)] = False
        for part, array in (("train", self.images), *([("test", self.test_images)] if self.apart else [])):
            several = max(1, _RUN_BYTES // (array.chunk * array.sample_bytes))
            for first in range(0, array.chunks, several):
                chunks = tuple(range(first, min(first + several, array.chunks)))
                masks = [trained[c * array.chunk : (c + 1) * array.chunk] for c in chunks]
                counted = tuple(None if part == "test" or mask.all() else mask for mask in masks)
                yield IndexWork(array, part, chunks, counted)

    def index(self, seen: Sequence[ChunkSeen]) -> ArrayIndex:
        """Return the index that all of the work has come to. Raises DataError where nothing could be learnt."""
        by_place = {(each.part, each.chunk): each for each in seen}
        train = [by_place["train", chunk] for chunk in range(self.images.chunks)]
        test = [by_place["test", chunk] for chunk in range(self.test_images.chunks)] if self.apart else []
        moments = sum((each.moments for each in train), Moments())
        mean, deviation = moments.mean, moments.deviation
        if not any(deviation):
            raise plain_colour(self.arrays.images)
        digests, others = (tuple(each.digest for each in part) for part in (train, test))
        return ArrayIndex(identity=self.identity, images=digests, test_images=others, mean=mean, deviation=deviation)

    def dataset(self, index: ArrayIndex | None) -> Dataset:
        """Return the data set; without an index unchecked and without statistics. Raises DataError for a wrong one."""
        if index is not None:
            C, of_tests = self.images.shape[2], self.test_images.chunks if self.apart else 0
            counts = [len(each) for each in (index.images, index.test_images, index.mean, index.deviation)]
            if index.identity != self.identity or counts != [self.images.chunks, of_tests, C, C]:
                reason = "is another array than its index was made of (other shape, type, labels or split)"
                raise DataError(self.arrays.images, reason, "give the array as it was, or start a new run")
        manifest = self._manifest(index)
        about = [self.identity, index and index.fingerprint(), self.arrays.validation, self.arrays.limit]
        about += [] if self.arrays.limit is None else ["representative"]  # it was the first samples once
        fingerprint = sha256(json.dumps([*about, self.arrays.seed]).encode())
        sums = (None, None) if index is None else (index.images, index.test_images if self.apart else index.images)
        samples = self.order, self.scattered if self._whole else 0, "train"
        train = InPlaceChunks(self.images, self.labels.values, sums[0], *samples, fingerprint)
        whole = len(self.test) if len(self.test) == self.test_images.samples else 0
        test = InPlaceChunks(self.test_images, self.test_labels.values, sums[1], self.test, whole, "test", fingerprint)
        parts = Split("train", len(self.order), train), Split("test", len(self.test), test)
        return Dataset(self.arrays.images, manifest, *parts, index=index)

    def check_classes(self) -> None:
        """Raise DataError where the samples to train on have too few classes, or not all of the test samples'."""
        arrays, trained = self.arrays, self.order[: self.scattered or None]  # none at all is told with the job
        manifest = self._manifest(None).model_copy(update={"train": _part(self.labels, trained)})
        for problem in unlearnable(manifest):
            raise DataError(arrays.labels, problem, "give labels of two classes or more, or raise data.limit")
        if unseen := unseen_classes(manifest):
            raise strangers(arrays.test_labels or arrays.labels, unseen, None if self._whole else "raise data.limit")

    @property
    def _whole(self) -> bool:
        """False if only a part of the samples are trained on."""
        return self.arrays.limit != len(self.order)

    def _manifest(self, index: ArrayIndex | None) -> Manifest:
        images, C = self.images, self.images.shape[2]
        return Manifest(
            name=self.arrays.name,
            classes=self.labels.classes,
            shape=images.shape,
            chunk=images.chunk,
            dtype=images.dtype.name,  # type: ignore[arg-type] # a name; the model checks it
            labels=self.labels.kind,
            nodata=self.images.nodata,
            mean=(0.0,) * C if index is None else index.mean,
            deviation=(1.0,) * C if index is None else index.deviation,
            order="stored",
            seed=self.arrays.seed,
            sources={},
            train=_part(self.labels, self.order),
            test=_part(self.test_labels, self.test),
        )


def _part(labels: Labelled, samples: Indices) -> PartManifest:
    return PartManifest(samples=len(samples), class_counts=labels.counts(samples), images=(), labels=())


def outline(arrays: Arrays) -> Outline:
    """Read metadata and labels. Raises DataError naming what makes the arrays unfit to train on."""
    images = open_images(arrays.images, arrays.layout, arrays.nodata)
    labels = array_labels(arrays.labels, None, arrays.labelling)
    _check_lengths(arrays.images, images, arrays.labels, labels)
    test_images, test_labels = images, labels
    if arrays.test_images is not None:
        assert arrays.test_labels is not None, "checked with the job"
        test_images = open_images(arrays.test_images, arrays.layout, arrays.nodata)
        test_labels = array_labels(arrays.test_labels, labels)
        _check_lengths(arrays.test_images, test_images, arrays.test_labels, test_labels)
        if (test_images.shape, test_images.dtype) != (images.shape, images.dtype):
            told = [f"{each.dtype} {each.shape}" for each in (test_images, images)]
            reason = f"images of {told[0]}, those to train on are {told[1]}"
            raise DataError(arrays.test_images, reason, "give test images like the others")
        if test_images.nodata not in (None, images.nodata):
            reason = f"{test_images.nodata:g} stands for no data, {_told(images.nodata)} in those to train on"
            raise DataError(arrays.test_images, reason, "write it with the same attributes")
        test, rest = np.arange(test_images.samples), np.arange(images.samples)
    else:
        test = _test_samples(arrays, labels, arrays.images)
        rest = np.setdiff1d(np.arange(images.samples), test, assume_unique=True)
    if arrays.limit is not None and arrays.limit < len(test):
        test = test[representative(test_labels.values[test], arrays.limit, arrays.seed)]
    if arrays.validation is None:
        arrays = replace(arrays, validation=held_out(min(len(rest), arrays.limit or len(rest))))
    order, scattered = _training_order(arrays, labels, rest, images.chunk)
    found = Outline(arrays, images, labels, test_images, test_labels, order, scattered, test)
    for each in (images, test_images):
        check_axes(axes_of(each.stored), arrays.layout, option="data.layout = ", what=each.path)
    found.check_classes()
    return found


def _told(nodata: float | None) -> str:
    return "nothing" if nodata is None else f"{nodata:g}"


def _check_lengths(path: str, images: ImageArray, where: str, labels: Labelled) -> None:
    if images.samples != len(labels.values):
        reason = f"{images.samples:,} images, and {len(labels.values):,} labels in {where}"
        raise DataError(path, reason, "give one label for each image")


def _test_samples(arrays: Arrays, labels: Labelled, path: str) -> Indices:
    assert arrays.test is not None, "resolved"
    samples = max(1, round(arrays.test * len(labels.values)))
    found = np.flatnonzero(stratified(labels.values, samples, arrays.seed))
    if not len(found):
        reason = f"data.test = {arrays.test:g} of {len(labels.values):,} samples leaves none for testing"
        raise DataError(path, reason, "every class needs two samples or more; raise data.test, or give test_images")
    return found


def _training_order(arrays: Arrays, labels: Labelled, rest: Indices, chunk: int) -> tuple[Indices, int]:
    """Samples chunk by chunk, the chunks in an order of their own, then those for validation; and where these begin."""
    assert arrays.validation is not None, "known by now"
    limit = len(rest) if arrays.limit is None else min(arrays.limit, len(rest))
    mask = stratified(labels.values[rest], min(arrays.validation, limit), arrays.seed)
    scattered, plain = rest[mask], rest[~mask]
    plain = plain[representative(labels.values[plain], limit - len(scattered), arrays.seed)]
    ranks = derive(np, derive(np, (plain // chunk).astype(np.uint64), arrays.seed), 1)
    plain = plain[np.lexsort((plain, ranks))]
    return np.concatenate([plain, scattered]), len(plain)
