"""A folder of image files with a sub-folder for each class: which files are samples, and of which class.

Nothing is opened: a file is taken for an image by the end of its name. What is no image is left out; what claims to be
one and cannot be read is found out when it is decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError, escaped
from daskcnn.files import local_path
from daskcnn.store.files import is_url

SUFFIXES = (
    ".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff",
)  # fmt: skip
"""Ends of the names of image files; capital letters are taken for small ones."""
TRAIN, TEST = "train", "test"
_NAMES_OF_PARTS = {TRAIN, TEST, "training", "testing", "val", "valid", "validation", "dev"}
_LEFT_BY_SYSTEMS = {"thumbs.db", "ehthumbs.db", "desktop.ini"}
_NAMED = 5
_REMEDY = "give a folder with a sub-folder of images for each class"


@dataclass(frozen=True)
class Listing:
    """The images of a folder, by class and then by name: path and class of each.

    `test` is a mask (N,) of those in the test part, None where the folder does not say so; `notes` are sentences on
    files that are left out, and on classes that are renamed.
    """

    root: Path
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    test: npt.NDArray[np.bool_] | None
    notes: tuple[str, ...] = ()

    def without(self, bad: Sequence[int]) -> Listing:
        """The same without these images. Raises DataError where a class has no image left."""
        keep = np.ones(len(self.files), bool)
        keep[list(bad)] = False
        counts = np.bincount(self.labels[keep], minlength=len(self.classes))
        for label in np.flatnonzero(counts == 0):
            reason = f"class {self.classes[label]!r}: none of its images can be read"
            raise DataError(self.root, reason, "mend them, or remove its folder")
        files = tuple(file for file, stays in zip(self.files, keep, strict=True) if stays)
        test = None if self.test is None else self.test[keep]
        left = replace(self, files=files, labels=self.labels[keep], test=test)
        _check_classes(left)
        return left


@dataclass
class _Notes:
    """The files that are left out."""

    others: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def told(self) -> tuple[str, ...]:
        kinds = {"not the name of an image": self.others, "in no folder of a class": self.beside}
        kinds["a link to a folder that its class lies in"] = self.above
        return (*self.sentences, *(f"left out, {what}: {_few(names)}" for what, names in kinds.items() if names))


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(escaped(name) for name in sorted(names)[:_NAMED])
    return f"{len(names):,} file{'s' * (len(names) > 1)} ({shown}{', …' if len(names) > _NAMED else ''})"


def list_folder(path: str | Path) -> Listing:
    """Return the images of a folder: `CLASS/…` or `train/CLASS/…` and `test/CLASS/…`.

    Images in folders within a class are of that class. Hidden files and folders are passed over. Links are followed;
    a folder is looked into once, so links that lead in circles end. Raises DataError for a folder that is missing,
    cannot be read or holds no images, for one class only, and for a class of the test part alone.
    """
    if is_url(str(path)):
        raise DataError(path, "image files are read from a file system", "copy them to one that every worker reaches")
    root, notes = local_path(path).absolute(), _Notes()
    parts = _parts(root, notes)
    found = [(name, bool(part == TEST), file) for part in parts for name, file in _images(root, part, notes)]
    if not found:
        raise _without_images(root, notes)
    names = _class_names([name for name, _, _ in found], root, notes)
    found = sorted(
        ((names[name], test, file) for name, test, file in found), key=lambda each: (*each[:2], os.fsencode(each[2]))
    )
    classes = tuple(name for name, _ in groupby(map(itemgetter(0), found)))
    number = {name: index for index, name in enumerate(classes)}
    labels = np.array([number[name] for name, _, _ in found], np.int64)
    test = np.array([test for _, test, _ in found]) if len(parts) == 2 else None
    listing = Listing(root, classes, tuple(file for _, _, file in found), labels, test, notes.told())
    _check_classes(listing)
    return listing


def _without_images(root: Path, notes: _Notes) -> DataError:
    """The error for a folder that has no images where they are looked for. It names what is there in their place."""
    if notes.beside:
        reason = f"images lie in it beside each other, {_few(notes.beside)}, and none in a folder of its class"
        return DataError(root, reason, "move them into a sub-folder for each class")
    reason = f"no images in it (names that end in {', '.join(SUFFIXES)})"
    if notes.others:
        return DataError(root, f"{reason}, but {_few(notes.others)}", "convert them, to JPEG for example")
    return DataError(root, reason, _REMEDY)


def _parts(root: Path, notes: _Notes) -> tuple[str, ...]:
    """The folders of the parts, or the folder itself where the classes lie in it.

    A folder `train` that has folders itself is no class. Raises DataError where there is no such `test` beside it.
    """
    folders, files = _entries(root, "")
    if TRAIN not in folders or not _entries(root, TRAIN)[0]:
        return ("",)
    if TEST not in folders or not _entries(root, TEST)[0]:
        reason = f"{TRAIN}/ has folders of its own, and there is no {TEST}/ with folders of the same classes"
        raise DataError(root, reason, f"add one, or give {root / TRAIN}, and a part of it is kept for testing")
    notes.beside += [file for file in files if _is_image(file)]
    if others := sorted(set(folders) - {TRAIN, TEST}):
        shown = ", ".join(escaped(name) for name in others[:_NAMED])
        notes.sentences.append(f"only {TRAIN}/ and {TEST}/ are used, not {shown}{' …' * (len(others) > _NAMED)}")
    return TRAIN, TEST


def _images(root: Path, part: str, notes: _Notes) -> Iterator[tuple[str, str]]:
    """Folder of the class, and path, of every image of a part."""
    classes, files = _entries(root, part)
    notes.beside += [file for file in files if _is_image(file)]
    for name in classes:
        count = 0
        for file in files_below(root, os.path.join(part, name), notes.above):
            if _is_image(file):
                count += 1
                yield name, file
            elif os.path.basename(file).lower() not in _LEFT_BY_SYSTEMS:
                notes.others.append(file)
        if not count:
            notes.sentences.append(f"{escaped(os.path.join(part, name))}/ has no images and is left out")


def files_below(root: Path, folder: str = "", led_up: list[str] | None = None) -> Iterator[str]:
    """Yield the files in a folder of the root and in all folders below, by their paths from the root.

    Hidden ones are passed over. Links are followed; a folder is looked into once, and those that the given one lies in
    never: links that lead to them are added to `led_up`. Raises DataError for a folder that cannot be read.
    """
    above = {_identity(root / parent) for parent in Path(folder).parents}
    waiting, seen = [folder], set[tuple[int, int]]()
    while waiting:
        folder = waiting.pop()
        identity = _identity(root / folder)
        if identity in above and led_up is not None:
            led_up.append(folder)
        if identity in seen | above:
            continue
        seen.add(identity)
        folders, files = _entries(root, folder)
        yield from (os.path.join(folder, file) for file in files)
        waiting += [os.path.join(folder, name) for name in folders]


def _identity(folder: Path) -> tuple[int, int]:
    with _listing(folder):
        status = os.stat(folder)
    return status.st_dev, status.st_ino


def _entries(root: Path, folder: str) -> tuple[list[str], list[str]]:
    """Names of the folders, and of all else, in a folder; without hidden ones."""
    folders, files = list[str](), list[str]()
    with _listing(root / folder), os.scandir(root / folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                (folders if _is_folder(entry) else files).append(entry.name)
    return folders, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link that leads to itself: an image by its name, which cannot be read
        return False


@contextmanager
def _listing(folder: Path) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError as error:
        raise DataError(folder, "is a file, not a folder", f"unpack it, if it is an archive, and {_REMEDY}") from error
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        raise DataError(folder, reason, "check the path and its permissions") from error


def _is_image(file: str) -> bool:
    return file.lower().endswith(SUFFIXES)


def _class_names(folders: Iterable[str], root: Path, notes: _Notes) -> dict[str, str]:
    """The name of each folder's class: its own, with escapes for bytes that are no UTF-8 and control characters."""
    names = {folder: escaped(folder) for folder in folders}
    taken = dict[str, str]()
    for folder, name in names.items():
        if (other := taken.setdefault(name, folder)) != folder:
            reason = f"the folders {os.fsencode(other)!r} and {os.fsencode(folder)!r} are both class {name!r}"
            raise DataError(root, reason, "rename one of them")
        if name != folder:
            renamed = f"the folder {os.fsencode(folder)!r} becomes class {name!r}"
            notes.sentences.append(f"{renamed}; rename it for another name")
    return names


def _check_classes(listing: Listing) -> None:
    if listing.test is not None:
        trained = set(listing.labels[~listing.test].tolist())
        for label in listing.labels[listing.test]:
            if label not in trained:
                reason = f"class {listing.classes[label]!r} has no images in {TRAIN}/"
                raise DataError(listing.root / TEST, reason, f"add some to {TRAIN}/, or remove it")
    elif {name.lower() for name in listing.classes} <= _NAMES_OF_PARTS and all(
        os.sep in os.path.dirname(file) for file in listing.files
    ):
        reason = f"its folders {', '.join(listing.classes)} are parts, not classes"
        remedy = f"name them {TRAIN} and {TEST}, and put a folder of images for each class into both"
        raise DataError(listing.root, reason, remedy)
    if len(listing.classes) < 2:
        inside, *nested = os.path.dirname(listing.files[0]).split(os.sep)
        remedy = f"{_REMEDY}; {listing.root / inside} may be one" if nested and listing.test is None else _REMEDY
        raise DataError(listing.root, f"one class only ({listing.classes[0]!r})", remedy)
