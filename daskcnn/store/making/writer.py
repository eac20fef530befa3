"""Writes a data set so that a path holds all of it or nothing, and shuffles more samples than memory holds.

The shuffle is exact and takes two passes through files. Pass 1 takes blocks of samples as they come, sorts each by the
places of its samples in the data set, and writes it as one file. Pass 2 takes the places bucket by bucket: a block's
samples of the bucket lie side by side in its file. So every sample is written twice and read twice, and neither pass
holds more than a block or a bucket.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import zarr
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync as sync_store

from daskcnn.errors import DataError
from daskcnn.files import local_path, sync, sync_tree
from daskcnn.store.dataset import arrays_of
from daskcnn.store.files import EMPTY_CHUNKS_TOO, Files, create_array, is_url
from daskcnn.store.manifest import ATTRIBUTE, PARTS, Manifest, Source, chunks
from daskcnn.temporary import hidden_beside, let_go, remove_folder

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Places lo…hi, and the rows of pass 1 that hold their samples.

    `segments` has (block, first row, rows) of each block that has some; `places` are those of these rows in turn.
    """

    lo: int
    hi: int
    segments: tuple[tuple[int, int, int], ...]
    places: Places


def buckets(places: Sequence[Places], edges: Sequence[tuple[int, int]]) -> Iterator[Bucket]:
    """Yield the buckets of these ranges of places, by the places of each block's samples."""
    ordered = [np.sort(block) for block in places]
    for lo, hi in edges:
        segments, found = list[tuple[int, int, int]](), list[Places]()
        for number, block in enumerate(ordered):
            first, end = np.searchsorted(block, (lo, hi)).tolist()
            if first < end:
                segments.append((number, first, end - first))
                found.append(block[first:end])
        yield Bucket(lo, hi, tuple(segments), np.concatenate([np.empty(0, np.int64), *found]))


@contextmanager
def between_passes(out: str) -> Iterator[str]:
    """Make the folder of the blocks beside a path or URL, and remove it when the context ends."""
    if not is_url(out):
        with hidden_beside(_target(out), "buckets") as folder:
            yield str(folder)
        return
    url = f"{out.rstrip('/')}.{uuid.uuid4().hex}.tmp"
    try:
        yield url
    finally:
        remove(url)


def _target(out: str) -> Path:
    """The folder that a path names. A link's own is found: a folder cannot take the place of a link."""
    return Path(os.path.realpath(local_path(out)))


def write_block(folder: str, block: int, samples: npt.NDArray[Any], places: Places) -> None:
    """Write a block's samples (n, …) in the order of their places (n,).

    A local folder has to be there: a task that ends after a failure must not make it again. Raises DataError, which
    Dask logs without a traceback, where it is not, and where the block cannot be written.
    """
    rows = np.ascontiguousarray(samples[np.argsort(places, kind="stable")])
    try:
        with fsspec.open(_file(folder, block), "wb", auto_mkdir=is_url(folder)) as file:
            file.write(rows.reshape(-1).view(np.uint8).data)
    except FileNotFoundError:
        remedy = "the data set is no longer prepared, or this worker does not see the folder: give one that all see"
        raise DataError(folder, "this folder for blocks is not there", remedy) from None
    except OSError as error:
        reason = f"a block cannot be written ({error.strerror or error})"
        raise DataError(folder, reason, "choose another place (--out)") from error


def read_bucket(folder: str, bucket: Bucket, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the bucket's samples (hi - lo, *shape) in the order of their places."""
    samples = np.empty((bucket.hi - bucket.lo, *shape), dtype)
    row, begun = int(np.prod(shape)) * dtype.itemsize, 0
    for block, first, rows in bucket.segments:
        with fsspec.open(_file(folder, block), "rb", block_size=1 << 20) as file:
            file.seek(first * row)
            found = np.frombuffer(file.read(rows * row), dtype).reshape(rows, *shape)
        samples[bucket.places[begun : begun + rows] - bucket.lo] = found
        begun += rows
    return samples


def remove(folder: str) -> None:
    """Remove a folder or what is at a URL as far as that is possible, if it is there."""
    if not is_url(folder):
        remove_folder(local_path(folder))
        return
    with suppress(Exception):  # what went wrong first is what is told
        system, path = fsspec.core.url_to_fs(folder)
        if system.exists(path):
            system.rm(path, recursive=True)


def _file(folder: str, block: int) -> str:
    return f"{folder}/{block:08d}.rows"


class Occupied(Exception):
    """Something else was written to the path meanwhile."""


@dataclass(frozen=True)
class Draft:
    """A data set that is being written: its arrays are there, its manifest is not.

    Its chunks may be written in any order, by any process that reaches the path, a local folder or URL. The manifest to
    be has shapes, types and chunks; the rest is not known yet.
    """

    path: str
    manifest: Manifest

    def make_arrays(self, name: str) -> None:
        """Make the empty arrays of a part."""
        root = zarr.open_group(Files.at(self.path, read_only=False).store, mode="a", zarr_format=3)
        group = root.create_group(name, overwrite=True)
        for array, shape, dtype in arrays_of(self.manifest, name):
            create_array(group, array, shape, self.manifest.chunk, dtype)

    def write_chunk(self, name: str, index: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a chunk of each array of a part: `images`, `labels` and, where there are any, `weights`."""
        lo = index * self.manifest.chunk
        store = Files.at(self.path, read_only=False).store
        for array, data in arrays.items():
            stored = zarr.open_array(store, path=f"{name}/{array}", mode="r+", zarr_format=3)
            stored.with_config(EMPTY_CHUNKS_TOO)[lo : lo + len(data)] = data

    @property
    def finished(self) -> bool:
        """True if the manifest is written."""
        found = Files.at(self.path).json("zarr.json")
        return found is not None and ATTRIBUTE in (found.get("attributes") or {})

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest: from now on the store is a data set."""
        root = zarr.open_group(Files.at(self.path, read_only=False).store, mode="r+", zarr_format=3)
        root.update_attributes(manifest.attributes())


@contextmanager
def drafted(
    out: str, manifest: Manifest, on_part: Callable[[str], None] = lambda part: None, *, claimed: bool = False
) -> Iterator[Draft]:
    """Yield a draft of the data set that a path or URL will hold when the context ends.

    Nothing stays if it fails, or of a local draft that was not finished. A local store is a temporary sibling folder,
    flushed to disk, then renamed. At a URL nothing can be renamed, so the manifest, which `Draft.finish` writes, comes
    last: without it a store is not a data set. Raises Occupied if something else was written to the path meanwhile,
    DataError if it cannot be written.

    claimed : whether a URL is the caller's by a draft that is there
    """
    if is_url(out):
        draft = Draft(out, manifest)
        with nullcontext() if claimed else _claimed(out):
            for name in PARTS:
                on_part(name)
                with storing(out):
                    draft.make_arrays(name)
            yield draft
        return
    target = _target(out)
    try:
        with hidden_beside(target, "tmp") as folder:
            draft = Draft(str(folder), manifest)
            for name in PARTS:
                on_part(name)
                draft.make_arrays(name)
            yield draft
            if draft.finished:
                sync_tree(folder)
                let_go(folder)
                sync(folder)
                _take_place(folder, target)
    except OSError as error:
        raise DataError(
            out, f"cannot be written ({error.strerror or error})", "choose another place (--out)"
        ) from error


def write(source: Source, manifest: Manifest, out: str, on_part: Callable[[str], None]) -> None:
    """Write a source, in its final order, to a path or URL. Raises Occupied, or DataError if it cannot be written."""
    with drafted(out, manifest, on_part) as draft, storing(out) if is_url(out) else nullcontext():
        for name in PARTS:
            arrays = dict(zip(("images", "labels"), source.train if name == "train" else source.test, strict=True))
            if name == "train" and source.weights is not None:
                arrays["weights"] = source.weights
            for index, (lo, hi) in enumerate(chunks(len(arrays["labels"]), manifest.chunk)):
                draft.write_chunk(name, index, {array: data[lo:hi] for array, data in arrays.items()})
        draft.finish(manifest)


@contextmanager
def storing(out: str) -> Iterator[None]:
    """Turn a storage's errors into DataError: every file system of fsspec has errors of its own."""
    try:
        yield
    except Exception as error:
        reason = f"cannot be written ({str(error) or type(error).__name__})"
        raise DataError(out, reason, "choose another place (--out)") from error


@contextmanager
def _claimed(out: str) -> Iterator[None]:
    """Have a URL for oneself, and clear it if the context fails. Raises Occupied where anything else is there.

    Each process first writes a key of its own, then looks: of two at once one at least sees the other, and withdraws
    before it has touched anything else.
    """
    own = f".daskcnn-{uuid.uuid4().hex}"
    with storing(out):
        files = Files.at(out, read_only=False)
        sync_store(files.store.set(own, default_buffer_prototype().buffer.from_bytes(b"a data set is being written")))
    try:
        with storing(out):
            alone = files.names(2) == [own]
        if not alone:
            raise Occupied
        try:
            yield
        except BaseException:
            _clear(out)
            raise
    finally:
        with suppress(Exception):
            sync_store(files.store.delete(own))


def _clear(out: str) -> None:
    """Remove what a draft has written at a URL, as far as the storage allows."""
    store = Files.at(out, read_only=False).store
    for removal in (*map(store.delete_dir, PARTS), store.delete("zarr.json")):
        with suppress(Exception):  # what went wrong first is what is told
            sync_store(removal)


def _take_place(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)  # atomic; an empty folder at the target is replaced, anything else refused
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise Occupied from error
        raise
    sync(target.parent)
