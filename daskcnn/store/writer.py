"""Writes a data set so that a path holds all of it or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import zarr

from daskcnn.errors import DataError
from daskcnn.files import sync
from daskcnn.store.files import Files, create_array, is_url
from daskcnn.store.manifest import PARTS, Manifest, Source


class Occupied(Exception):
    """Something else was written to the path meanwhile."""


def write(source: Source, manifest: Manifest, out: str, on_part: Callable[[str], None]) -> None:
    """Write a source, in its final order, to a path or URL. Raises Occupied, or DataError if it cannot be written.

    A local store is a temporary sibling folder, flushed to disk, then renamed. At a URL nothing can be renamed, so the
    manifest is written last: without it a store is not a data set.
    """
    if is_url(out):
        store = Files.at(out, read_only=False).store
        with _storing(out):
            root = zarr.open_group(store, mode="a", zarr_format=3)
        _fill(root, source, manifest, on_part, lambda: _storing(out))
        return
    target = Path(out).expanduser()
    try:
        with _temporary_sibling(target) as folder:
            _fill(zarr.open_group(folder, mode="w-", zarr_format=3), source, manifest, on_part)
            _flush(folder)
            _take_place(folder, target)
    except OSError as error:
        raise DataError(out, f"cannot be written ({error.strerror or error})", "choose another --out") from error


def _fill(
    root: zarr.Group,
    source: Source,
    manifest: Manifest,
    on_part: Callable[[str], None],
    storing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    for name in PARTS:
        on_part(name)
        images, labels = source.train if name == "train" else source.test
        with storing():
            group = root.create_group(name, overwrite=True)
            create_array(group, "images", images, manifest.chunk)
            create_array(group, "labels", labels, manifest.chunk)
    with storing():
        root.update_attributes(manifest.attributes())


@contextmanager
def _storing(out: str) -> Iterator[None]:
    """Turn what a storage fails with into a DataError: every file system of fsspec has errors of its own."""
    try:
        yield
    except Exception as error:
        reason = f"cannot be written ({str(error) or type(error).__name__})"
        raise DataError(out, reason, "choose another --out") from error


@contextmanager
def _temporary_sibling(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def _take_place(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)  # atomic; an empty folder at the target is replaced, anything else refused
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise Occupied from error
        raise
    sync(target.parent)
