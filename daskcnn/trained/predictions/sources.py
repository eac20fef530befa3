"""What is predicted: a prepared data set, a zarr array, or image files. Each part is read by the worker that has it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.files import local_path
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.array_index import storage_version
from daskcnn.store.files import is_url
from daskcnn.store.foreign.array import ImageArray, array_at, open_images
from daskcnn.store.image_facts import Facts
from daskcnn.store.making.folder import SUFFIXES as IMAGE_SUFFIXES
from daskcnn.store.manifest import PARTS
from daskcnn.trained.predict import pixels

PartChoice = Literal["train", "test", "all"]
Key = Literal["sample", "file"]
SUFFIXES = frozenset((*IMAGE_SUFFIXES, ".npy"))
"""Files of a folder that are predicted: those that a data set is made of, and arrays. Others are passed over."""
FILES = 128
"""Files of a part."""
_OF_ZARR = ("zarr.json", ".zarray")
"""A folder with one of these is a data set or an array."""
_LEAST_BYTES = 4 << 20
"""Small chunks are joined up to this size."""


@dataclass(frozen=True, slots=True)
class Part:
    """A task's part of the samples.

    Attributes
    ----------
    index : its number, by which it is kept
    split : "train" or "test", empty for files
    lo, hi : its samples in the split, or its files among all
    files : their paths
    labels : their classes, where they are known before they are read
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
        """Return what one of its samples is called."""
        return self.files[place] if self.files else f"{self.split or 'sample'} {self.lo + place}"


@dataclass(frozen=True, slots=True)
class Samples:
    """A part as a worker has read it.

    Attributes
    ----------
    images : (n, H, W, C)
    labels : (n,), (n, L), or None where none are known
    bad : which of the images could not be read, and why, by their place
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[Any] | None = None
    bad: tuple[tuple[int, str], ...] = ()


class PredictedSource(Protocol):
    """What is predicted. It travels to the workers; a part of it is read there."""

    @property
    def key(self) -> Key:
        """The column that names a sample."""
        ...

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        ...

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the labels, None where no labels are known."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The parts of a data set that it has, in order; one without a name for files."""
        ...

    def parts(self) -> tuple[Part, ...]:
        """Return the parts, in order. They are the same whatever the cluster."""
        ...

    def fingerprint(self) -> str:
        """Return what tells these samples from others."""
        ...

    def read(self, part: Part) -> Samples:
        """Return a part's samples. Raises DataError."""
        ...


@dataclass(frozen=True)
class StoreSource:
    """Parts of a prepared data set, each of whole chunks."""

    path: str
    which: PartChoice
    expected: str
    """The data set's fingerprint: a worker that sees another one is refused."""

    key: ClassVar[Key] = "sample"

    @classmethod
    def at(cls, path: str, which: PartChoice) -> StoreSource:
        """Return the data set at a path or URL. Raises DataError."""
        path = path if is_url(path) else str(local_path(path).absolute())
        return cls(path, which, open_dataset(path).fingerprint)

    @property
    def place(self) -> str:
        """Path and part."""
        return f"{self.path} ({self.which})"

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, opened once in a process. Raises DataError where it is another one."""
        found = open_dataset(self.path)
        if found.fingerprint != self.expected:
            raise DataError(self.path, "another data set than the driver sees", "give all machines the same")
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone."""
        return {name: self.__dict__[name] for name in ("path", "which", "expected")}

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """The classes."""
        return self.dataset.classes

    @property
    def splits(self) -> tuple[str, ...]:
        """The data set's parts."""
        return PARTS if self.which == "all" else (self.which,)

    def parts(self) -> tuple[Part, ...]:
        """Return parts of one chunk, or of several small ones."""
        manifest = self.dataset.manifest
        size = manifest.chunk * max(1, _LEAST_BYTES // (manifest.chunk * manifest.sample_bytes))
        found: list[Part] = []
        for name in self.splits:
            total = len(self._split(name))
            found += (
                Part(len(found) + i, name, lo, min(lo + size, total)) for i, lo in enumerate(range(0, total, size))
            )
        return tuple(found)

    def fingerprint(self) -> str:
        """Return the data set's, and the part's name."""
        return f"{self.expected} {self.which}"

    def read(self, part: Part) -> Samples:
        """Return images and labels. Raises DataError if a chunk is damaged."""
        return Samples(*self._split(part.split).read(part.lo, part.hi))

    def _split(self, name: str) -> Any:
        return self.dataset.train if name == "train" else self.dataset.test


@dataclass(frozen=True)
class FileSource:
    """Image files, and arrays as `.npy` files.

    Attributes
    ----------
    files : their paths, absolute
    labels : the class of each file by its folder's name; None where the folders are not named after classes
    facts : of the images that the network takes
    skip_bad : whether files that cannot be read are passed over
    """

    place: str
    files: tuple[str, ...]
    labels: tuple[int, ...] | None
    label_names: tuple[str, ...] | None
    facts: Facts
    skip_bad: bool

    key: ClassVar[Key] = "file"
    splits: ClassVar[tuple[str, ...]] = ("",)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the files and their labels: each part has its own."""
        return self.__dict__ | {"files": (), "labels": None}

    def parts(self) -> tuple[Part, ...]:
        """Return parts of `FILES` files."""
        labels = self.labels
        return tuple(
            Part(
                i,
                "",
                lo,
                min(lo + FILES, len(self.files)),
                self.files[lo : lo + FILES],
                labels and labels[lo : lo + FILES],
            )
            for i, lo in enumerate(range(0, len(self.files), FILES))
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 of the files' names, sizes and times of change."""
        digest = hashlib.sha256()
        for path in self.files:
            found = os.stat(path)
            digest.update(os.fsencode(path) + f"\0{found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def read(self, part: Part) -> Samples:
        """Return the images, resized to the network's size; a file that is passed over is black."""
        images, bad = [], []
        for place, path in enumerate(part.files):
            try:
                images.append(pixels(path, self.facts, lambda _: None))
            except DataError as error:
                if not self.skip_bad:
                    raise DataError(
                        error.value, error.reason, f"{error.remedy}, or pass over it: skip_bad=True, --skip-bad"
                    ) from error
                images.append(np.zeros(self.facts.shape, self.facts.dtype))
                bad.append((place, str(error)))
        labels = None if part.labels is None else np.array(part.labels, np.int64)
        return Samples(np.stack(images), labels, tuple(bad))


@dataclass(frozen=True)
class ArraySource:
    """A zarr array of somebody else, in parts of whole chunks.

    Attributes
    ----------
    images : the array, in the order of axes in which it has the network's images
    seen : what is known of its files, as the driver sees them
    """

    images: ImageArray
    seen: str

    key: ClassVar[Key] = "sample"
    label_names: ClassVar[None] = None
    splits: ClassVar[tuple[str, ...]] = ("",)

    @classmethod
    def at(cls, path: str, facts: Facts) -> ArraySource | None:
        """Return the array at a path or URL; None where there is something else.

        Raises DataError where its images are not such as the network takes.
        """
        path = path if is_url(path) else str(local_path(path).absolute())
        if (found := array_at(path)) is None:
            return None
        if found.shape != facts.shape and (other := open_images(path, "NCHW")).shape == facts.shape:
            found = other
        _check_images(path, found, facts, "give an array (N, H, W, C) or (N, C, H, W) like those of training")
        return cls(found, storage_version(found.files))

    @property
    def place(self) -> str:
        """Where it lies."""
        return self.images.path

    def parts(self) -> tuple[Part, ...]:
        """Return parts of a few chunks."""
        size, total = self.images.chunk, self.images.samples
        return tuple(Part(i, "", lo, min(lo + size, total)) for i, lo in enumerate(range(0, total, size)))

    def fingerprint(self) -> str:
        """Return what its metadata and its storage say."""
        return f"{self.images.path} {self.images.digest} {self.images.layout} {self.seen}"

    def read(self, part: Part) -> Samples:
        """Return the images. Raises DataError if a chunk cannot be read."""
        return Samples(self.images.as_images(self.images.read(part.index)))


def source_of(data: Sequence[str], which: PartChoice | None, facts: Facts, *, skip_bad: bool) -> PredictedSource:
    """Return what these paths name: a prepared data set, a zarr array, a folder of images, or image files.

    `which` is the part of a data set, the test samples by default. Raises DataError where nothing fits the network.
    """
    if len(data) == 1 and (is_url(data[0]) or any((Path(data[0]) / name).exists() for name in _OF_ZARR)):
        if (array := ArraySource.at(data[0], facts)) is not None:
            _no_part(which, "an array has no parts")
            return array
        store = StoreSource.at(data[0], which or "test")
        _check_images(store.path, store.dataset, facts, "give a data set like the one that it was trained on")
        if store.dataset.labels != facts.labels:
            raise DataError(store.path, "other labels than the network's: one a sample, or several", "give others")
        return store
    _no_part(which, "files have no parts")
    files = tuple(str(Path(file).absolute()) for path in data for file in _files_at(path))
    labels = _labels(files, facts.classes) if facts.labels == "classes" else None
    names = None if labels is None else facts.classes
    place = data[0] if len(data) == 1 else f"{len(files):,} files"
    return FileSource(place, files, labels, names, facts, skip_bad)


def _check_images(path: str, images: Dataset | ImageArray, facts: Facts, remedy: str) -> None:
    """Raise DataError where the network takes other images."""
    found, wanted = ((each.dtype, each.shape) for each in (images, facts))
    if found != wanted:
        raise DataError(path, f"images {found[0]} {found[1]}, the network takes {wanted[0]} {wanted[1]}", remedy)


def _no_part(which: PartChoice | None, reason: str) -> None:
    if which is not None:
        raise DataError(f"--part {which}", reason, "leave it out, or give a prepared data set")


def _files_at(path: str) -> Iterable[str]:
    """The file itself, or the images in a folder and all folders below, by name."""
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise DataError(path, "there is no such file", "correct the path")
        return [path]
    found = sorted(_below(path, lambda name: os.path.splitext(name)[1].lower() in SUFFIXES))
    if not found:
        raise DataError(path, "a folder without images", f"give files that end in {', '.join(sorted(SUFFIXES))}")
    return found


def _below(folder: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise DataError(error.filename, error.strerror or error, "make it readable") from error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in names if wanted(name) and not name.startswith("."))


def _labels(files: Sequence[str], classes: tuple[str, ...]) -> tuple[int, ...] | None:
    """The class that each file's folder is named after; None unless all are."""
    numbers = {name: number for number, name in enumerate(classes)}
    found = [numbers.get(os.path.basename(os.path.dirname(path))) for path in files]
    return None if None in found else tuple(number for number in found if number is not None)
