"""Samples to predict: of a prepared data set, a zarr array, or image files. Each worker reads its own parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.files import local_path
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.array_index import storage_version
from daskcnn.store.chunk_facts import mark_of, missing_pixels
from daskcnn.store.files import is_url
from daskcnn.store.foreign.array import ImageArray, array_at, open_images
from daskcnn.store.foreign.axes import axes_of, check_axes
from daskcnn.store.foreign.conventions import Coding
from daskcnn.store.image_facts import Facts
from daskcnn.store.making.folder import SUFFIXES as IMAGE_SUFFIXES
from daskcnn.store.making.folder import files_below
from daskcnn.store.manifest import PARTS, is_like
from daskcnn.trained.predict import pixels, together

PartChoice = Literal["train", "test", "all"]
SUFFIXES = frozenset((*IMAGE_SUFFIXES, ".npy"))
"""Files of a folder that are predicted: images and arrays. Others are passed over."""
FILES = 128
"""The most files of a part."""
_OF_ZARR = ("zarr.json", ".zarray", ".zgroup")
"""A folder with one of these is a data set, an array or a group."""
_LEAST_BYTES = 4 << 20
"""Small chunks are joined up to this size."""


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of one task.

    Attributes
    ----------
    index : the number by which the part is kept.
    split : "train" or "test", empty for files.
    lo, hi : the range of samples in the split, or of files among all.
    labels : classes, where they are known before the samples are read.
    """

    index: int
    split: str
    lo: int
    hi: int
    files: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"{self.split or ('files' if self.files else 'samples')} {self.lo} to {self.hi - 1}"

    def sample(self, place: int) -> str:
        """Return the name of one of its samples."""
        return self.files[place] if self.files else f"{self.split or 'sample'} {self.lo + place}"


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a part, as a worker has read them.

    Attributes
    ----------
    images : (n, H, W, C).
    labels : (n,), (n, L), or None where none are known.
    bad : (place, reason) of images that could not be read.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[Any] | None = None
    bad: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class PredictedSource:
    """Samples to predict, cut into parts.

    Attributes
    ----------
    place : the path or the number of files, for messages.
    read : a function that travels to the worker, and reads a part's samples there. Raises DataError.
    parts : in order; they are the same whatever the cluster.
    key : the column that names a sample.
    label_names : None where no labels are known.
    splits : the parts of the data set, in order; one without a name for arrays and files.
    nodata : the value that stands for no data in what is read: a data set's own, elsewhere the network's.
    """

    place: str
    read: Callable[[Part], Samples]
    parts: tuple[Part, ...]
    fingerprint: str
    key: Literal["sample", "file"] = "sample"
    label_names: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("",)
    nodata: float | None = None


def source_of(data: Sequence[str], choice: PartChoice | None, facts: Facts, *, skip_bad: bool) -> PredictedSource:
    """Return the samples at these paths: a prepared data set, a zarr array, a folder of images, or image files.

    choice : the part of a data set, the test samples by default. Raises DataError where nothing fits the network.
    """
    if len(data) == 1 and (is_url(data[0]) or any(os.path.exists(os.path.join(data[0], name)) for name in _OF_ZARR)):
        path = data[0] if is_url(data[0]) else str(local_path(data[0]).absolute())
        if (array := array_at(path)) is None:
            dataset = open_dataset(path)
            _check_images(path, dataset, facts, like := "give a data set like the one that it was trained on")
            ranges = dataset.value_range, facts.value_range
            if None not in ranges and ranges[0] != ranges[1]:
                raise DataError(path, "black and white at {}, the network was trained on {}".format(*ranges), like)
            if dataset.labels != facts.labels:
                raise DataError(path, "other labels than the network's: one a sample, or several", "give others")
            return of_store(path, choice or "test", dataset)
        _no_part(choice, "an array has no parts")
        return _of_array(path, array, facts)
    _no_part(choice, "files have no parts")
    files = tuple(str(Path(file).absolute()) for path in data for file in _files_at(path))
    return _of_files(data[0] if len(data) == 1 else f"{len(files):,} files", files, facts, skip_bad=skip_bad)


def _cut(total: int, size: int, split: str = "", first: int = 0) -> Iterator[Part]:
    """Yield parts of this size, numbered from `first`."""
    for i, lo in enumerate(range(0, total, size), first):
        yield Part(i, split, lo, min(lo + size, total))


def of_store(path: str, choice: PartChoice, dataset: Dataset) -> PredictedSource:
    """Return a data set's samples, in parts of one chunk, or of several small ones."""
    manifest = dataset.manifest
    size = manifest.chunk * max(1, _LEAST_BYTES // (manifest.chunk * manifest.sample_bytes))
    splits, parts = PARTS if choice == "all" else (choice,), list[Part]()
    for name in splits:
        parts += _cut(len(_split(dataset, name)), size, name, first=len(parts))
    read, fingerprint = StoreReader(path, dataset.fingerprint), f"{dataset.fingerprint} {choice}"
    mark = None if dataset.nodata is None else mark_of(dataset.nodata, dataset.dtype)  # as its images have it
    known: dict[str, Any] = {"label_names": dataset.classes, "nodata": dataset.nodata if mark is None else mark}
    return PredictedSource(f"{path} ({choice})", read, tuple(parts), fingerprint, splits=splits, **known)


@dataclass(frozen=True)
class StoreReader:
    """Reads parts of a data set. A worker that sees another one than the driver's, by its fingerprint, is refused."""

    path: str
    expected: str

    def __call__(self, part: Part) -> Samples:
        """Return images and labels. Raises DataError if a chunk is damaged."""
        return Samples(*_split(self._dataset, part.split).read(part.lo, part.hi))

    @cached_property
    def _dataset(self) -> Dataset:
        """The data set, opened once in a process."""
        found = open_dataset(self.path)
        if found.fingerprint != self.expected:
            raise DataError(self.path, "another data set than the driver sees", "give all machines the same")
        return found


def _split(dataset: Dataset, name: str) -> Any:
    return dataset.train if name == "train" else dataset.test


def _of_array(path: str, found: ImageArray, facts: Facts) -> PredictedSource:
    """Return a zarr array's images, in the order of axes that the network takes, in parts of a few chunks."""
    nodata = None if found.coding.packed else facts.nodata
    found = open_images(path, "NHWC", nodata)
    if found.shape != facts.shape and (other := open_images(path, "NCHW", nodata)).shape == facts.shape:
        found = other
    if found.coding.packed and found.nodata is None:  # the network's own is a number that is meant
        found = replace(found, nodata=facts.nodata)
    _check_images(path, found, facts, "give an array (N, H, W, C) or (N, C, H, W) like those of training")
    check_axes(axes_of(found.stored), found.layout, option=None, what=path)
    fingerprint = f"{found.path} {found.digest} {found.layout} {storage_version(found.files)}"
    read, parts = partial(_read_array, found, facts), tuple(_cut(found.samples, found.chunk))
    return PredictedSource(found.path, read, parts, fingerprint, nodata=facts.nodata)


def _read_array(found: ImageArray, facts: Facts, part: Part) -> Samples:
    """Return images in which the network's own value stands for no data, if the array has another one."""
    images = found.as_images(found.read(part.index))
    nodata = Coding(facts.dtype).marking(facts.nodata).nodata  # none where its type has no room for it
    missing = missing_pixels(images, found.nodata) if found.nodata != nodata or images.dtype != facts.dtype else None
    with np.errstate(over="ignore"):
        images = images.astype(facts.dtype, copy=False)
    if missing is not None and nodata is None:
        reason = f"{int(missing.sum()):,} numbers of {part} are no data by its attributes ({found.coding})"
        raise DataError(found.path, reason, "the network was trained without data.nodata: leave these images out")
    if missing is not None:
        images = np.where(missing, images.dtype.type(nodata), images)
    return Samples(images)


def _of_files(place: str, files: tuple[str, ...], facts: Facts, *, skip_bad: bool) -> PredictedSource:
    """Return images of files, with labels where each file's folder has the name of a class."""
    numbers = {name: number for number, name in enumerate(facts.classes)}
    found = [numbers.get(os.path.basename(os.path.dirname(path))) for path in files]
    labels = None if facts.labels == "several" or None in found else tuple(n for n in found if n is not None)
    cut = _cut(len(files), min(FILES, together(facts)))
    parts = tuple(replace(p, files=files[p.lo : p.hi], labels=labels and labels[p.lo : p.hi]) for p in cut)
    digest = hashlib.sha256()
    for path in files:
        digest.update(os.fsencode(path) + f"\0{_version(path)}\n".encode())
    names, read = None if labels is None else facts.classes, partial(_read_files, facts, skip_bad)
    known: dict[str, Any] = {"label_names": names, "nodata": facts.nodata}
    return PredictedSource(place, read, parts, digest.hexdigest(), key="file", **known)


def _version(path: str) -> str:
    """Size and time of a file; no words for one that is not there, which its reading will name."""
    with suppress(OSError):
        found = os.stat(path)
        return f"{found.st_size} {found.st_mtime_ns}"
    return ""


def _read_files(facts: Facts, skip_bad: bool, part: Part) -> Samples:
    """Return the images, resized to the network's size; a file that is passed over is black."""
    images, bad = np.zeros((len(part), *facts.shape), facts.dtype), list[tuple[int, str]]()
    for place, path in enumerate(part.files):
        try:
            images[place] = pixels(path, facts, lambda _: None)
        except DataError as error:
            if not skip_bad:
                remedy = f"{error.remedy}, or pass over it: skip_bad=True, --skip-bad"
                raise DataError(error.value, error.reason, remedy) from error
            bad.append((place, str(error)))
    labels = None if part.labels is None else np.array(part.labels, np.int64)
    return Samples(images, labels, tuple(bad))


def _check_images(path: str, images: Dataset | ImageArray, facts: Facts, remedy: str) -> None:
    """Raise DataError where the network takes other images."""
    found, wanted = ((each.dtype, each.shape) for each in (images, facts))
    if not (is_like(found[0], wanted[0]) and found[1] == wanted[1]):
        raise DataError(path, f"images {found[0]} {found[1]}, the network takes {wanted[0]} {wanted[1]}", remedy)


def _no_part(choice: PartChoice | None, reason: str) -> None:
    if choice is not None:
        raise DataError(f"--part {choice}", reason, "leave it out, or give a prepared data set")


def _files_at(path: str) -> Iterable[str]:
    """Return the file itself, or the images in a folder and all folders below, by name."""
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise DataError(path, "there is no such file", "correct the path")
        return [path]
    inside = (file for file in files_below(Path(path)) if os.path.splitext(file)[1].lower() in SUFFIXES)
    found = sorted(os.path.join(path, file) for file in inside)
    if not found:
        raise DataError(path, "a folder without images", f"give files that end in {', '.join(sorted(SUFFIXES))}")
    return found
