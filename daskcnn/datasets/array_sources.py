"""Arrays that people have, in files or of NumPy, Dask, Zarr or xarray, as blocks of images that a task can read."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import zarr
from dask.base import is_dask_collection
from zarr.storage import FsspecStore, LocalStore

from daskcnn.datasets.given_arrays import as_array, is_dask_array, meant, read_stored, unwrapped
from daskcnn.errors import DataError
from daskcnn.files import check_regular
from daskcnn.store.foreign.array import Layout
from daskcnn.store.manifest import MAX_CHUNK_BYTES, Dtype, widened
from daskcnn.store.masks import filled
from daskcnn.temporary import OwnFolder

_REMEDY = "give a .npy or .npz file, as NumPy's save writes it"


@contextmanager
def opened(path: str) -> Iterator[npt.NDArray[Any]]:
    """Open the array of a `.npy` file, or of a `.npz` file as `FILE.npz:NAME`, mapped into memory.

    The name may be left out where the file holds one array. A packed array is unpacked to a temporary folder first.
    Raises DataError for anything else, for objects, and for a file that is shorter than its header says.
    """
    file, _, name = path.rpartition(":") if ".npz:" in path else (path, "", "")
    with ExitStack() as stack:
        if file.endswith(".npz"):
            file = str(_unpacked(file, name, Path(stack.enter_context(OwnFolder()))))
        yield _mapped(file, path)


def _mapped(file: str, told: str) -> npt.NDArray[Any]:
    try:
        check_regular(file)
        found = np.load(file, mmap_mode="r", allow_pickle=False, max_header_size=10_000)
    except OSError as error:
        raise DataError(told, error.strerror or error, _REMEDY) from error
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, OverflowError, EOFError) as error:
        raise DataError(told, f"not an array file that can be read ({error!s:.120})", _REMEDY) from error
    if not isinstance(found, np.ndarray):
        raise DataError(told, "not an array file", _REMEDY)
    return found


def _unpacked(file: str, name: str, folder: Path) -> Path:
    """The array of this name, as a file in the folder, no longer than its entry says."""
    try:
        check_regular(file)
        with zipfile.ZipFile(file) as archive:
            entry = _entry(archive, name, file)
            free = shutil.disk_usage(folder).free
            if entry.file_size > free:
                reason = f"{entry.filename!r:.80} has {entry.file_size:,} bytes, {free:,} are free in {folder.parent}"
                raise DataError(file, reason, "set TMPDIR to a folder with more room, or give a .npy file")
            out = folder / "array.npy"
            with archive.open(entry) as source, out.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            return out
    except OSError as error:
        raise DataError(file, error.strerror or error, _REMEDY) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise DataError(file, f"not an archive of arrays that can be read ({error!s:.120})", _REMEDY) from error


def _entry(archive: zipfile.ZipFile, name: str, file: str) -> zipfile.ZipInfo:
    entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if name and name in entries:
        return entries[name]
    if not name and len(entries) == 1:
        return next(iter(entries.values()))
    names = ", ".join(map(repr, list(entries)[:20]))
    raise DataError(file, f"holds {len(entries)} arrays ({names})", f"choose one, as {file}:NAME")


_USUAL = {1, 3, 4}
"""Channels of grey images, of coloured ones, and of these with transparency."""
BLOCK_BYTES = 64 << 20
"""Bytes of a block, if the samples of one chunk of the source are not more."""
_KEPT = get_args(Dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SampleBlock:
    """Samples lo…hi of a source, in its own layout and type. `data` holds just them if `sliced`, else all samples."""

    lo: int
    hi: int
    data: Any
    sliced: bool

    def read(self, source: ImageSource) -> npt.NDArray[Any]:
        """Return the block's images (hi - lo, H, W, C) in the type that they are kept in."""
        if self.sliced:
            return self.at_rest(source, self.data)
        at = slice(self.lo, self.hi)
        return self.at_rest(source, read_stored(self.data, at) if isinstance(self.data, zarr.Array) else self.data[at])

    def at_rest(self, source: ImageSource, data: Any) -> npt.NDArray[Any]:
        """Return what was read of the block in the same way. Raises DataError where the source has said otherwise."""
        with np.errstate(over="ignore"):  # Dask gives masked parts a fill value that float16 has no room for
            found = as_array("images", data.compute() if is_dask_collection(data) else data)
        images = source.at_rest(found)
        if images.shape != (self.hi - self.lo, *source.shape[1:]) or not np.can_cast(found.dtype, source.dtype):
            said = f"{source.dtype} {(self.hi - self.lo, *source.shape[1:])}"
            reason = f"samples {self.lo} to {self.hi - 1} are {found.dtype} {images.shape}, the array says {said}"
            raise DataError("images", reason, "correct what makes the array, or its dtype and chunks")
        return images


@dataclass(frozen=True, slots=True, eq=False)
class ImageSource:
    """Images of shape (N, H, W, C), wherever they are, as they were given, and the number type that they are kept in.

    The layout is that of what was given; (N, H, W) has one channel. What is masked becomes `nodata`, which is the
    mask's own number if `own` is true.
    """

    what: Any
    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    layout: Layout
    nodata: float | None = None
    own: bool = False

    @classmethod
    def of(cls, images: Any, layout: Layout, nodata: float | None = None) -> ImageSource:
        """Return the images as a source. Raises DataError for what cannot be images. nodata: as for `unwrapped`."""
        if isinstance(images, str | Path):
            remedy = "open it first, such as zarr.open_array(path, mode='r')"
            raise DataError(f"images: {str(images)!r:.80}", "a path in place of an array", remedy)
        if layout not in get_args(Layout):
            raise DataError(f"layout={layout!r}", "unknown", "use NHWC or NCHW")
        what = unwrapped(images, layout, nodata=nodata)
        if not hasattr(what, "shape") or not isinstance(getattr(what, "dtype", None), np.dtype):
            what = as_array("images", what)
        shape = tuple(map(int, what.shape))
        if len(shape) == 3:
            shape = (*shape, 1)
        elif len(shape) != 4:
            raise DataError("images", f"an array of shape {shape}", "give (N, H, W, C), (N, C, H, W) or (N, H, W)")
        elif layout == "NCHW":
            shape = (shape[0], shape[2], shape[3], shape[1])
        dtype = _kept(np.dtype(what.dtype))
        if min(shape) < 1 or int(np.prod(shape[1:])) * dtype.itemsize > MAX_CHUNK_BYTES:
            raise DataError("images", f"an array of shape {shape}", f"an image has 1 to {MAX_CHUNK_BYTES:,} bytes")
        return cls(what, shape, dtype, layout, meant(images, nodata))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def sample_bytes(self) -> int:
        """Bytes of an image at rest."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    @property
    def in_memory(self) -> bool:
        """True if this process holds the images."""
        return isinstance(self.what, np.ndarray) and not isinstance(self.what, np.memmap)

    @property
    def on_workers(self) -> bool:
        """True if a worker can read the images itself."""
        stored = isinstance(self.what, zarr.Array) and isinstance(self.what.store, LocalStore | FsspecStore)
        return stored or is_dask_array(self.what)

    @property
    def folder(self) -> Path | None:
        """The folder of a Zarr array on a disk."""
        stored = isinstance(self.what, zarr.Array) and isinstance(self.what.store, LocalStore)
        return self.what.store.root / self.what.path if stored else None

    def at_rest(self, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return images of the source's layout and type as (n, H, W, C) in the type that they are kept in."""
        if images.ndim == 3:
            images = images[..., None]
        elif self.layout == "NCHW":
            images = np.moveaxis(images, 1, -1)
        return filled(images.astype(self.dtype, copy=False), self.nodata, own=self.own)

    def blocks(self) -> Iterator[SampleBlock]:
        """Yield the blocks, which follow the source's chunks where it has some."""
        rows = max(1, BLOCK_BYTES // self.sample_bytes)
        if is_dask_array(self.what):
            yield from _dask_blocks(self.what, rows)
            return
        if isinstance(self.what, zarr.Array):  # whole chunks, so that none is read twice
            chunk = int(self.what.chunks[0])
            rows = max(chunk, rows // chunk * chunk)
        for lo in range(0, len(self), rows):
            yield SampleBlock(lo, min(lo + rows, len(self)), self.what, sliced=False)


def _dask_blocks(array: Any, rows: int) -> Iterator[SampleBlock]:
    whole = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))
    if max(whole.chunks[0]) > rows:
        whole = whole.rechunk({0: rows})
    lo = 0
    for number, size in enumerate(whole.chunks[0]):
        if size:
            yield SampleBlock(lo, lo + size, whole.blocks[number], sliced=True)
        lo += size


def channels_elsewhere(images: Any, layout: Layout, remedy: str = "layout='NCHW'") -> str | None:
    """Return a warning where the shape of an array without names looks as if its channels were the second axis."""
    shape = tuple(getattr(images, "shape", ()))
    if layout != "NHWC" or len(shape) != 4 or hasattr(images, "dims"):
        return None
    if shape[1] in _USUAL and shape[3] not in _USUAL and shape[2] == shape[3]:
        return f"images of shape {shape}: taken as {shape[1]} rows of {shape[3]} channels; if not, give {remedy}"
    return None


def _kept(dtype: np.dtype[Any]) -> np.dtype[Any]:
    kept = widened(dtype)
    if dtype.kind not in "buif" or kept.name not in _KEPT:
        raise DataError("images", f"of type {dtype}", f"convert them to one of {', '.join(_KEPT)}")
    return kept
