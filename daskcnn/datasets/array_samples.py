"""Images and labels that were given as arrays, and where each sample goes in the data set that is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.datasets.array_sources import ImageSource
from daskcnn.datasets.given_arrays import labels_of
from daskcnn.errors import DataError
from daskcnn.store import manifest
from daskcnn.store.chunk_facts import class_counts
from daskcnn.store.foreign.array import Layout
from daskcnn.store.foreign.labels import Labelled, as_told, numbered, plain
from daskcnn.store.making.prepare import chunk_for
from daskcnn.store.making.writer import Places
from daskcnn.store.masks import own_nodata
from daskcnn.store.split import shuffled_order, stratified


@dataclass(frozen=True, slots=True, eq=False)
class GivenSamples:
    """Images of one array, which go into one part or both, and a mask (N,) of those that are for testing."""

    images: ImageSource
    labels: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ArraySamples:
    """All samples: one array that is split, or one for training and one for testing."""

    given: tuple[GivenSamples, ...]
    classes: tuple[str, ...]
    weights: npt.NDArray[np.float32] | None

    @property
    def nodata(self) -> float | None:
        """The number that stands for no data."""
        return self.given[0].images.nodata

    def count(self, name: str) -> int:
        """Samples of a part."""
        tests = sum(int(part.mask.sum()) for part in self.given)
        return tests if name == "test" else sum(len(part.images) for part in self.given) - tests

    def class_counts(self, name: str) -> tuple[int, ...]:
        """Samples of a part by class, or by label."""
        labels = np.concatenate([part.labels[part.mask == (name == "test")] for part in self.given])
        return class_counts(labels, len(self.classes))


def samples_of(
    images: Any,
    labels: Any,
    classes: Sequence[str] | None,
    test: float | int | tuple[Any, Any],
    layout: Layout,
    seed: int,
    weights: Any,
    nodata: float | None,
    labelling: manifest.Labelling | None,
) -> ArraySamples:
    """Return what was given to `prepare` as samples. Raises DataError for what does not belong together.

    Where nothing stands for no data, a masked array's own number does.
    """
    source = ImageSource.of(images, layout, nodata)
    found = numbered(labels_of(labels, images=images), classes, labelling)
    _check_lengths("labels", len(found.values), source)
    if isinstance(test, tuple | list):
        if len(test) != 2:
            raise DataError("test", f"{len(test)} things", "give a fraction, a number, or the pair (images, labels)")
        other, told = ImageSource.of(test[0], layout, nodata), labels_of(test[1], images=test[0])
        answers = _for_testing(as_told(told, found.kind if told.ndim == 2 else None), classes, found.classes)
        _check_lengths("labels of the test part", len(answers.values), other)
        if (other.shape[1:], other.dtype, answers.values.ndim) != (source.shape[1:], source.dtype, found.values.ndim):
            kinds = [f"{s.dtype} {s.shape[1:]}" for s in (other, source)]
            reason = f"images of {kinds[0]}, those for training are {kinds[1]}"
            raise DataError("test", reason, "give images of one kind")
        if other.nodata != source.nodata:
            reason = f"{other.nodata:g} stands for no data once it is decoded, {source.nodata:g} in those for training"
            raise DataError("test", reason, "give images of one coding")
        train = GivenSamples(source, found.values, np.zeros(len(source), bool))
        given: tuple[GivenSamples, ...] = (train, GivenSamples(other, answers.values, np.ones(len(other), bool)))
    else:
        given = (GivenSamples(source, found.values, stratified(found.values, _test_count(test, len(source)), seed)),)
        if not given[0].mask.any():
            raise DataError("images", f"{len(source)} samples, none can be spared for testing", "give more samples")
    own = [own_nodata(part.images.what, part.images.dtype) for part in given]
    known = source.nodata if nodata is not None else next((each for each in own if each is not None), None)
    given = tuple(replace(part, images=replace(part.images, nodata=known, own=nodata is None)) for part in given)
    return ArraySamples(given, found.classes, _weights(weights, given[0], images))


def _for_testing(labels: npt.NDArray[Any], given: Sequence[str] | None, classes: tuple[str, ...]) -> Labelled:
    """The labels of the test part, by the classes of the training part. Integers are places in the given classes.

    Without given classes they are values, and those of the training part need not be 0, 1, 2 and so on.
    """
    labels = plain(labels) if labels.ndim == 1 else labels
    if given is None and labels.ndim == 1 and labels.dtype.kind in "iubf":
        whole = labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels))
        labels = (labels.astype(np.int64) if whole else labels).astype(np.str_)
    try:
        return numbered(labels, classes, "several" if labels.ndim == 2 else None)
    except DataError as error:
        reason = f"{error.reason} (those of the training part)"
        raise DataError("labels of the test part", reason, "train on images of every class") from error


def _check_lengths(what: str, found: int, source: ImageSource) -> None:
    if found != len(source):
        raise DataError(what, f"{found:,} for {len(source):,} images", "give one for each image")


def _test_count(test: Any, samples: int) -> int:
    share, number = isinstance(test, float | np.floating), isinstance(test, int | np.integer)
    if not (share and 0 < test < 1) and not (number and not isinstance(test, bool) and 0 < test < samples):
        remedy = "give a fraction between 0 and 1, a whole number of samples, or the pair (images, labels)"
        raise DataError(f"test={test!s:.40}", "no part of the samples", remedy)
    return max(1, round(test * samples) if share else int(test))


def _weights(weights: Any, part: GivenSamples, images: Any) -> npt.NDArray[np.float32] | None:
    """The weights of all samples, divided by the mean over the training samples."""
    if weights is None:
        return None
    found = labels_of(weights, "weights", images)
    if found.dtype.kind not in "buif" or found.ndim > 1:
        raise DataError("weights", f"{found.dtype} of shape {found.shape}", "give one number for each image")
    _check_lengths("weights", found.size, part.images)
    found = found.astype(np.float64)
    if wrong := np.flatnonzero(~(np.isfinite(found) & (found >= 0))).tolist():
        raise DataError("weights", f"sample {wrong[0]} has {found[wrong[0]]}", "give finite weights of 0 or more")
    mean = found[~part.mask].mean()
    if not mean > 0:
        raise DataError("weights", "all are 0", "give some samples a weight above 0")
    return (found / mean).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The places of the samples of each array: 0 and up in the training part, then on through the test part.

    `common` has what the manifest says besides what its chunks say; `draft` is the manifest to be.
    """

    common: dict[str, Any]
    draft: manifest.Manifest
    places: tuple[Places, ...]
    chunk: int
    nodata: float | None

    def ranges(self, name: str) -> Iterator[tuple[int, int]]:
        """The places (lo, hi) of the part's chunks, in order."""
        begin = 0 if name == "train" else self.draft.train.samples
        for lo, hi in manifest.chunks(self.draft.part(name).samples, self.chunk):
            yield begin + lo, begin + hi


def arranged(samples: ArraySamples, name: str, order: manifest.Order, seed: int, chunk: int | None) -> Arrangement:
    """Return where every sample goes, in chunks of this size or of the usual one.

    Raises DataError where nothing could be learnt from the labels, and for chunks that are too large.
    """
    source = samples.given[0].images
    counts = {part: samples.count(part) for part in manifest.PARTS}
    chunk = chunk or chunk_for(counts["train"], source.sample_bytes)
    if chunk * source.sample_bytes > manifest.MAX_CHUNK_BYTES:
        reason = f"a chunk has at most {manifest.MAX_CHUNK_BYTES:,} bytes"
        raise DataError(f"chunk={chunk}", reason, "give fewer samples")
    common: dict[str, Any] = {
        "name": name,
        "classes": samples.classes,
        "shape": source.shape[1:],
        "chunk": chunk,
        "dtype": source.dtype.name,
        "labels": "several" if samples.given[0].labels.ndim == 2 else "classes",
        "nodata": samples.nodata,
        "order": order,
        "seed": seed,
        "sources": {"labels": manifest.sha256(np.concatenate([part.labels for part in samples.given]))},
    }
    parts = {}
    for part, count in counts.items():
        known: dict[str, Any] = {"samples": count, "class_counts": samples.class_counts(part)}
        weights = ("",) if part == "train" and samples.weights is not None else ()
        parts[part] = manifest.PartManifest.model_construct(**known, images=(), labels=(), weights=weights)
    draft = manifest.draft_of(common, parts)
    for problem in manifest.unlearnable(draft):  # before any image is read
        raise DataError("labels", problem, "give training samples of two classes or more")
    if unseen := manifest.unseen_classes(draft):
        raise manifest.strangers(name, unseen)
    return Arrangement(common, draft, _places(samples, counts, order, seed), chunk, samples.nodata)


def _places(samples: ArraySamples, counts: dict[str, int], order: manifest.Order, seed: int) -> tuple[Places, ...]:
    """The place of each sample of each array, in the order of its part."""
    parts = {}
    for salt, part in enumerate(manifest.PARTS):
        places = np.arange(counts[part])
        if order == "shuffled":
            places[shuffled_order(counts[part], seed, salt)] = np.arange(counts[part])
        parts[part] = places
    found, taken = [], dict.fromkeys(manifest.PARTS, 0)
    for given in samples.given:
        places = np.empty(len(given.mask), np.int64)
        for part, mine, begin in (("train", ~given.mask, 0), ("test", given.mask, counts["train"])):
            n = int(mine.sum())
            places[mine] = begin + parts[part][taken[part] : taken[part] + n]
            taken[part] += n
        found.append(places)
    return tuple(found)
