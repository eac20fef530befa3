"""Somebody else's zarr array, opened to be read in place: images in runs of whole chunks, or labels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import Images, mark_of, missing_pixels
from daskcnn.store.files import Files
from daskcnn.store.foreign.conventions import Coding
from daskcnn.store.foreign.metadata import ForeignMetadata, array_names, foreign_metadata, not_an_array
from daskcnn.store.foreign.sized_store import SizedStore, chunk_number
from daskcnn.store.manifest import ATTRIBUTE, Dtype, widened

Layout = Literal["NHWC", "NCHW"]
CHUNK_BYTES = 4 << 20
"""Smaller chunks are taken several at a time: each run of them has a checksum."""
_LEAST_CHUNKS = 64
_MOST_LABEL_BYTES = 1 << 30
_MOST_LETTERS = 200
_MOST_KEYS = 100_000
_MOST_RUNS = 5
WRITE_ALL = (
    "write them; where the fill value is right, zarr has left them out to save room, and this writes them: "
    "zarr.config.set({'array.write_empty_chunks': True}); a = zarr.open_array(PATH); a[:] = a[:]"
)


@dataclass(frozen=True)
class ImageArray:
    """Images of shape (H, W, C) in a zarr array (N, H, W, C), (N, C, H, W) or (N, H, W).

    `chunk` samples are read, and checked, as a whole: one stored chunk or several. `digest` is that of the metadata.
    `coding` leads from the stored numbers to the images; `nodata` is the images' value for no data, if there is one.
    """

    path: str
    layout: Layout
    samples: int
    shape: tuple[int, int, int]
    chunk: int
    digest: str
    coding: Coding
    nodata: float | None
    about: ForeignMetadata
    stored: zarr.Array[Any]
    files: Files

    @property
    def dtype(self) -> np.dtype[Any]:
        """Number type of the images."""
        return widened(self.coding.decoded_dtype)

    @property
    def chunks(self) -> int:
        """Chunks that there are."""
        return -(-self.samples // self.chunk)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def read(self, index: int) -> npt.NDArray[Any]:
        """Return a chunk as it is stored, contiguous. Raises DataError where it cannot be read, or is not all there."""
        lo = index * self.chunk
        hi = min(lo + self.chunk, self.samples)
        with self.files.reading(f"samples {lo} to {hi - 1}"):
            data = np.ascontiguousarray(self.stored[lo:hi], self.coding.dtype)
        for begin, end in absent_runs(self.about, self.stored, lo, hi):
            if not self._without_data(data[begin - lo : end - lo]):
                raise self._not_there(f"samples {begin} to {end - 1} are not stored")
        return data

    def _without_data(self, data: npt.NDArray[Any]) -> bool:
        missing = missing_pixels(self.as_images(data), self.nodata)
        return missing is not None and bool(missing.all())

    def _not_there(self, reason: str) -> DataError:
        fill = self.stored.fill_value
        remedy = f"set data.nodata = {fill} if they stand for no data, or {WRITE_ALL}"
        return DataError(self.path, f"{reason}, and would be read as the array's fill value {fill}", remedy)

    def absent(self) -> str | None:
        """Return a sentence on chunks that are not stored, by one listing; None where there are none, or none is known.

        Raises DataError where they would count as data.
        """
        keys = self.files.keys(_MOST_KEYS)
        if keys is None or not {"zarr.json", ".zarray"} & set(keys):  # such as plain HTTP, which lists nothing
            return None
        several = self.about.stored[0]
        there = {number for key in keys if (number := chunk_number(key)) is not None}
        count = -(-self.samples // several)
        gone = [number for number in range(count) if number not in there]
        if not gone:
            return None
        told = _runs_told([(number * several, min((number + 1) * several, self.samples)) for number in gone])
        reason = f"{len(gone):,} of {count:,} chunks are not stored ({told})"
        first = gone[0] * several
        with self.files.reading(f"sample {first}"):
            example = np.asarray(self.stored[first : first + 1], self.coding.dtype)
        if not self._without_data(example):
            raise self._not_there(reason)
        return f"{self.path}: {reason} and count as pixels without data"

    def as_images(self, data: npt.NDArray[Any]) -> Images:
        """Return what `read` has returned as images (n, H, W, C), decoded."""
        data = self.coding.decoded(data).astype(self.dtype, copy=False)
        if self.layout == "NCHW" and data.ndim == 4:
            data = data.transpose(0, 2, 3, 1)
        return np.ascontiguousarray(data).reshape(len(data), *self.shape)


def open_images(path: str, layout: Layout, nodata: float | None = None) -> ImageArray:
    """Open the images by their metadata. Raises DataError for types and chunks that cannot be used.

    nodata : a stored number that stands for no data, beside those that the array's attributes name.
    """
    files = Files.at(path)
    about = foreign_metadata(files)
    if about.dtype is None or widened(about.dtype).name not in get_args(Dtype):
        found = "text" if about.dtype is None else about.dtype.name
        raise DataError(path, f"images of type {found}", f"convert them to one of {', '.join(get_args(Dtype))}")
    if len(about.shape) not in (3, 4):
        raise DataError(path, f"shape {about.shape} is not that of images", "give an array (N, H, W, C) or (N, H, W)")
    if min(about.shape) < 1:
        raise DataError(path, f"shape {about.shape}: there is no image", "give an array with images")
    if any(chunk < whole for chunk, whole in zip(about.chunks[1:], about.shape[1:], strict=True)):
        reason = f"its chunks {about.chunks} cut images of shape {about.shape[1:]}, so every image is in several chunks"
        raise DataError(path, reason, "write it anew with daskcnn.prepare, or in chunks along the first axis only")
    h, w, c = about.shape[1:] if len(about.shape) == 4 else (*about.shape[1:], 1)
    shape = (w, c, h) if len(about.shape) == 4 and layout == "NCHW" else (h, w, c)
    many, stored = _run_of_chunks(about), _opened(files, about)
    assert about.coding is not None, "of numbers"
    coding = about.coding.marking(nodata)
    mark = coding.nodata
    if nodata is not None and mark in (None, mark_of(nodata, coding.decoded_dtype)):
        mark = nodata
    return ImageArray(path, layout, about.shape[0], shape, many, about.digest, coding, mark, about, stored, files)


def array_at(path: str) -> ImageArray | None:
    """Return the images where this is the path of an array; None for a data set, and for what is neither.

    Raises DataError as `open_images`, and for another group with arrays in it.
    """
    files = Files.at(path)
    found = files.json("zarr.json")
    if (found or {}).get("node_type") == "array" or (found is None and files.size(".zarray") is not None):
        return open_images(path, "NHWC")
    old = found is None and files.size(".zgroup") is not None
    if (old or (found and ATTRIBUTE not in (found.get("attributes") or {}))) and array_names(files):
        raise not_an_array(files, group=True)
    return None


def _run_of_chunks(about: ForeignMetadata) -> int:
    """Samples of the stored chunks that are read as one: a few megabytes, and enough runs for workers to share."""
    assert about.dtype is not None
    samples, stored = about.shape[0], min(about.chunks[0], about.shape[0])
    nbytes = stored * int(np.prod(about.shape[1:])) * about.dtype.itemsize
    several = min(CHUNK_BYTES // nbytes, samples // (stored * _LEAST_CHUNKS))
    return about.chunks[0] * max(1, several)


def _opened(files: Files, about: ForeignMetadata) -> zarr.Array[Any]:
    """Open the array by zarr. Whatever it refuses is refused here; what it warns of is about writing."""
    store = SizedStore(files.store, files.path, about.packing)
    try:
        with files.reading(""), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return zarr.open_array(store, mode="r", zarr_format=about.zarr_format)
    except FileNotFoundError as error:
        raise DataError(files.path, f"went while it was opened ({error})", "check the path") from error


def read_labels(path: str) -> npt.NDArray[Any]:
    """Return labels, numbers or text (N,), or numbers (N, L). Raises DataError for others, and for too large ones."""
    files = Files.at(path)
    about = foreign_metadata(files)
    itemsize = 16 if about.dtype is None else about.dtype.itemsize
    if (size := int(np.prod(about.shape, dtype=object)) * itemsize) > _MOST_LABEL_BYTES:
        raise DataError(path, f"labels of {size:,} bytes, more than the {_MOST_LABEL_BYTES:,} allowed", "give fewer")
    if len(about.shape) not in (1, 2) or (about.dtype is None and len(about.shape) == 2):
        reason = f"shape {about.shape} is not that of labels"
        raise DataError(path, reason, "give one class for each sample, (N,), or rows of 0 and 1, (N, L)")
    if about.dtype is not None and about.dtype.kind not in "biuf":
        raise DataError(path, f"labels of type {about.dtype.name}", "give integers, text, or rows of 0 and 1")
    stored = _opened(files, about)
    with files.reading(""):
        found = np.asarray(stored[:])
    if runs := absent_runs(about, stored, 0, len(found)):
        reason = f"labels that are not stored ({_runs_told(runs)}) would be read as its fill value {stored.fill_value}"
        raise DataError(path, reason, WRITE_ALL)
    if about.coding is None:
        return _text(path, found)
    check_labels(path, found, about.coding)
    return found


def check_labels(path: str, labels: npt.NDArray[Any], coding: Coding) -> None:
    """Raise DataError for labels that have to be decoded, and for those that stand for no data."""
    if coding.packed:
        raise DataError(path, f"labels that its attributes change ({coding})", "write the labels as they are meant")
    if count := int((gone := coding.marked(labels)).sum()):
        sample = int(np.argwhere(gone)[0][0])
        reason = f"{count:,} labels stand for no data by its attributes ({coding}), the first one of sample {sample}"
        raise DataError(path, reason, "leave their images out, or label them")


def absent_runs(about: ForeignMetadata, stored: zarr.Array[Any], lo: int, hi: int) -> list[tuple[int, int]]:
    """Return the runs of samples between lo and hi that were read and are not stored, in order."""
    store = stored.store
    assert isinstance(store, SizedStore)
    outer, inner = about.stored[0], about.chunks[0]
    beside = max(1, about.packing.in_shard // (outer // inner))  # chunks of a shard beside each other hold no sample
    runs = list[tuple[int, int]]()
    for number in range(lo // outer, -(-hi // outer)):
        begin, gone = number * outer, store.absent.get(number, ())
        first, last = max(lo, begin), min(hi, begin + outer)
        if None in gone:
            runs.append((first, last))
            continue
        for row in range((first - begin) // inner, -(-(last - begin) // inner)):
            if row * beside in gone:
                runs.append((max(lo, begin + row * inner), min(hi, begin + (row + 1) * inner)))
    return runs


def _runs_told(runs: Sequence[tuple[int, int]]) -> str:
    told = ", ".join(f"{begin} to {end - 1}" for begin, end in runs[:_MOST_RUNS])
    return f"samples {told}{', …' if len(runs) > _MOST_RUNS else ''}"


def _text(path: str, found: npt.NDArray[Any]) -> npt.NDArray[np.str_]:
    """Labels as text of a fixed length, which the longest one decides."""
    words = [str(each) for each in found.tolist()]
    longest = max(map(len, words), default=0)
    if longest > _MOST_LETTERS or longest * 4 * len(words) > _MOST_LABEL_BYTES:
        raise DataError(path, f"a label of {longest:,} letters", f"give names of at most {_MOST_LETTERS}, or numbers")
    return np.array(words, np.str_)
