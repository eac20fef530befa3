"""Somebody else's zarr array, opened to be read in place: images in runs of whole chunks, or labels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import Images
from daskcnn.store.files import Files
from daskcnn.store.foreign.metadata import ForeignMetadata, foreign_metadata
from daskcnn.store.foreign.sized_store import SizedStore
from daskcnn.store.manifest import Dtype

Layout = Literal["NHWC", "NCHW"]
CHUNK_BYTES = 4 << 20
"""Smaller chunks are taken several at a time: each run of them has a checksum."""
_LEAST_CHUNKS = 64
_MOST_LABEL_BYTES = 1 << 30
_MOST_LETTERS = 200


@dataclass(frozen=True)
class ImageArray:
    """Images of shape (H, W, C) in a zarr array (N, H, W, C), (N, C, H, W) or (N, H, W).

    `chunk` samples are read, and checked, as a whole: one stored chunk or several. `digest` is that of the metadata.
    """

    path: str
    layout: Layout
    samples: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    chunk: int
    digest: str
    stored: zarr.Array[Any]
    files: Files

    @property
    def chunks(self) -> int:
        """Chunks that there are."""
        return -(-self.samples // self.chunk)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def read(self, index: int) -> npt.NDArray[Any]:
        """Return a chunk as it is stored, contiguous. Raises DataError where it cannot be read."""
        lo = index * self.chunk
        with self.files.reading(f"samples {lo} to {min(lo + self.chunk, self.samples) - 1}"):
            return np.ascontiguousarray(self.stored[lo : lo + self.chunk], self.dtype)

    def as_images(self, data: npt.NDArray[Any]) -> Images:
        """Return what `read` has returned as images (n, H, W, C)."""
        if self.layout == "NCHW":
            data = data.transpose(0, 2, 3, 1)
        return np.ascontiguousarray(data).reshape(len(data), *self.shape)


def open_images(path: str, layout: Layout) -> ImageArray:
    """Open the images by their metadata. Raises DataError for types and chunks that cannot be used."""
    files = Files.at(path)
    about = foreign_metadata(files)
    if about.dtype is None or about.dtype.name not in get_args(Dtype):
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
    return ImageArray(path, layout, about.shape[0], shape, about.dtype, many, about.digest, stored, files)


def array_at(path: str) -> ImageArray | None:
    """Return the images where this is the path of an array and not of a group. Raises DataError as `open_images`."""
    files = Files.at(path)
    found = files.json("zarr.json")
    if (found or {}).get("node_type") == "array" or (found is None and files.size(".zarray") is not None):
        return open_images(path, "NHWC")
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
    return _text(path, found) if about.dtype is None else found


def _text(path: str, found: npt.NDArray[Any]) -> npt.NDArray[np.str_]:
    """Labels as text of a fixed length, which the longest one decides."""
    words = [str(each) for each in found.tolist()]
    longest = max(map(len, words), default=0)
    if longest > _MOST_LETTERS or longest * 4 * len(words) > _MOST_LABEL_BYTES:
        raise DataError(path, f"a label of {longest:,} letters", f"give names of at most {_MOST_LETTERS}, or numbers")
    return np.array(words, np.str_)
