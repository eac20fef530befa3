"""The way in for images, labels and weights as people have them: of NumPy, Dask, Zarr, xarray, pandas and others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from dask.base import is_dask_collection, tokenize
from distributed import get_worker
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from daskcnn.cluster.link.members import given_name
from daskcnn.errors import DataError
from daskcnn.store.foreign.array import WRITE_ALL, Layout, check_labels
from daskcnn.store.foreign.axes import axes_of, check_axes
from daskcnn.store.foreign.conventions import Coding, coding_of
from daskcnn.store.foreign.shards import absent_in_shards


@dataclass(frozen=True)
class Lazy:
    """A DataArray whose data are on disk."""

    array: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    coding: Coding

    def __getitem__(self, at: slice) -> npt.NDArray[Any]:
        return self.coding.masked(np.asarray(self.array[at].values))

    @property
    def _meta(self) -> npt.NDArray[Any]:
        """An array without numbers of the kind that is read, as Dask's arrays have it."""
        return self.coding.masked(np.empty((0,) * len(self.shape), self.dtype))


def array_of(images: Any, nodata: float | None = None, *, decoded: bool = False) -> Any:
    """Return the images (N, H, W, C) as an array of NumPy or, where they are lazy or on disk, of Dask.

    Other lists than those of masked arrays, and tables, are returned as they are. nodata, decoded, and errors: as for
    `unwrapped`.
    """
    if _listed_masks(images):
        return as_array("images", images)
    found = unwrapped(images, "NHWC", option=None, nodata=nodata, decoded=decoded)
    if isinstance(found, zarr.Array):
        found = _by_chunks(found)
    if isinstance(found, Lazy):
        found = found[:]
    if (isinstance(found, np.ndarray) or is_dask_array(found)) and not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    return found


def unwrapped(
    images: Any,
    layout: Layout,
    *,
    option: str | None = "layout=",
    nodata: float | None = None,
    decoded: bool = False,
) -> Any:
    """Return the array inside; what is on disk stays there. A lazy DataArray reads itself slice by slice.

    CF attributes are followed: numbers that stand for no data by them are masked, and those of a Zarr array decoded.

    Parameters
    ----------
    option : as for `check_axes`
    nodata : a number that stands for no data beside those of the attributes, as stored or, if `decoded`, as meant

    Raises
    ------
    DataError
        For a Dataset of xarray and a Zarr group, which hold several arrays. For names of axes, of xarray or Zarr, that
        say that the channels are elsewhere than the layout has them. For a DataArray whose attributes say that its
        numbers are still to be decoded, and a Zarr array with chunks that are not stored and would count as data.
    """
    if isinstance(images, zarr.Group) or hasattr(images, "data_vars"):
        names = [str(name) for name in getattr(images, "data_vars", images)]
        remedy = f"give one of them, such as images[{names[0]!r}]" if names else "give an array"
        raise DataError("images", f"several arrays ({', '.join(names[:10])})", remedy)
    check_axes(_axes(images), layout, option=option, methods=_of_xarray(images))
    if isinstance(images, zarr.Array):
        return _stored(_by_absolute_path(images), nodata, decoded)
    if _of_xarray(images):
        coding, known = _undecoded(images), images.chunks is not None or images._in_memory
        images = _masked(images.data, coding) if known else Lazy(images, images.shape, images.dtype, coding)
    if is_dask_collection(images) and hasattr(images, "to_dask_array"):
        return images.to_dask_array(lengths=True)
    if is_dask_collection(images) and np.isnan(images.shape).any():
        return images.copy().compute_chunk_sizes()  # it changes the array
    return images


def meant(images: Any, nodata: float | None) -> float | None:
    """Return the number that stands for no data once the images are decoded. nodata: as stored, for `unwrapped`."""
    if nodata is None or not isinstance(images, zarr.Array) or np.dtype(images.dtype).kind not in "biuf":
        return nodata
    coding = _coding(images)
    found = coding.marking(nodata).nodata if coding.packed else None
    return nodata if found is None else found


def _stored(images: zarr.Array[Any], nodata: float | None, decoded: bool) -> Any:
    """A Zarr array as it is where its attributes change nothing. Raises DataError where chunks are not stored."""
    if np.dtype(images.dtype).kind not in "biuf":
        return images
    coding = _coding(images)
    fill, own = np.asarray(images.fill_value or 0, images.dtype), coding if decoded else coding.marking(nodata)
    known = nodata is not None and (np.isnan(fill) if fill.dtype.kind == "f" else False)
    known = known or own.marked(fill) or (decoded and own.decoded(fill) == nodata)
    if not known and (gone := _not_stored(images)):
        remedy = f"set nodata to {fill}, in training too, if they stand for no data, or {WRITE_ALL}"
        raise DataError("images", f"{gone}, and would be read as the array's fill value {fill}", remedy)
    if coding.packed:
        coding = own
    if isinstance(images.store, MemoryStore) and str(coding):
        return coding.masked(np.asarray(images[...]))
    return _masked(_by_chunks(images), coding) if str(coding) else images


def _by_chunks(array: zarr.Array[Any]) -> Any:
    """A Zarr array as one of Dask."""
    import dask.array

    seen, name = _SeenArray(array), f"from-zarr-{tokenize(array)}"
    meta = np.empty((0,) * array.ndim, array.dtype)
    return dask.array.from_array(seen, array.chunks, name=name, meta=meta)


@dataclass(frozen=True)
class _SeenArray:
    """A Zarr array that Dask reads by `read_stored`."""

    array: zarr.Array[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def __getitem__(self, at: Any) -> Any:
        return read_stored(self.array, at)


def read_stored(array: zarr.Array[Any], at: Any) -> Any:
    """Return a part of a Zarr array. Raises DataError where this process does not see the array.

    Zarr reads what is not there as the array's fill value.
    """
    metadata = ".zarray" if array.metadata.zarr_format == 2 else "zarr.json"
    if not sync((array.store_path / metadata).exists()):
        remedy = "give an array on storage that every worker reaches, under the same path"
        raise DataError(_place_of(array), f"no array there, as {_this_process()} sees it", remedy)
    return array[at]


def _by_absolute_path(array: zarr.Array[Any]) -> zarr.Array[Any]:
    """The same array, found from any folder: a worker may run in another one."""
    store = array.store
    if not isinstance(store, LocalStore) or store.root.is_absolute():
        return array
    there = LocalStore(store.root.absolute(), read_only=True)
    try:
        found = zarr.open_array(there, path=array.path, mode="r", zarr_format=array.metadata.zarr_format)
    except FileNotFoundError as error:
        remedy = "give the absolute path of the array"
        raise DataError(_place_of(array), f"no array there, seen from {Path.cwd()}", remedy) from error
    assert isinstance(found, zarr.Array), "mode r opens nothing else"
    return found


def _place_of(array: zarr.Array[Any]) -> str:
    """The path or URL of a Zarr array, as far as its store says it."""
    root = getattr(array.store, "root", None) or getattr(array.store, "path", None) or array.store
    return f"{root}/{array.path}".rstrip("/")


def _this_process() -> str:
    try:
        worker = get_worker()
    except ValueError:
        return "this process"
    name = given_name(worker.name)
    return f"worker {name} ({worker.address})" if name else f"worker {worker.address}"


def is_dask_array(given: Any) -> bool:
    """Return True for an array of Dask.

    The module is not imported for the question: with what it imports it takes a third of the start of a command.
    """
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(given, module.Array)


def _coding(array: zarr.Array[Any], what: str = "images") -> Coding:
    """The coding by a Zarr array's attributes. In format 2 xarray keeps `_FillValue` as its own fill value."""
    old = array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in array.attrs
    fill = np.asarray(array.fill_value).item() if old and array.fill_value is not None else None
    return coding_of(array.attrs.asdict(), np.dtype(array.dtype), what, fill)


def _not_stored(array: zarr.Array[Any]) -> str | None:
    """A sentence on chunks that are not stored, by one listing or the indices of shards; None: none, or none known."""
    if not array.store.supports_listing:
        return None
    count = array.nchunks
    gone = count - array.nchunks_initialized if array.shards is None else absent_in_shards(array)
    return f"{gone:,} of {count:,} chunks are not stored" if gone else None


def _masked(images: Any, coding: Coding) -> Any:
    """Lazy images, or those in memory, by the coding. They are as they were where it changes nothing."""
    if not str(coding):
        return images
    if not is_dask_collection(images):
        return coding.masked(np.asarray(images))
    meta = coding.masked(np.empty((0,) * images.ndim, images.dtype))
    return images.map_blocks(coding.masked, dtype=coding.decoded_dtype, meta=meta)


def _undecoded(images: Any) -> Coding:
    """The coding by a DataArray's attributes: xarray takes them off where it decodes.

    Raises DataError for factors, which operations of xarray keep: its numbers may be decoded, or not.
    """
    coding = _coding_of_xarray(images, "images")
    if coding.packed:
        remedy = "decode it (open it with mask_and_scale=True); if its numbers are decoded: images.drop_attrs()"
        raise DataError("images", f"a DataArray with the attributes of numbers to be decoded ({coding})", remedy)
    return coding


def _coding_of_xarray(array: Any, what: str) -> Coding:
    known = {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        for key, value in array.attrs.items()
    }
    return coding_of(known, array.dtype, what)


def _of_xarray(images: Any) -> bool:
    return hasattr(images, "dims") and hasattr(images, "_in_memory")


def _axes(images: Any) -> Sequence[Any]:
    """The names of the axes; none where the array has no names."""
    if _of_xarray(images):
        return tuple(images.dims)
    return axes_of(images) if isinstance(images, zarr.Array) else ()


def as_array(what: str, given: Any) -> npt.NDArray[Any]:
    """Return anything as an array of NumPy, which may be masked. Raises DataError for what is no array."""
    try:
        return np.ma.asarray(given) if _listed_masks(given) else np.asanyarray(given)
    except (ValueError, TypeError) as error:
        raise DataError(what, f"no array ({error!s:.120})", "give an array, one entry for each sample") from error


def _listed_masks(given: Any) -> bool:
    """Return True for a list of masked arrays: NumPy makes an array without masks of it."""
    return isinstance(given, list | tuple) and any(isinstance(each, np.ma.MaskedArray) for each in given)


# --- what stands beside the images ---


def labels_of(labels: Any, what: str = "labels", images: Any = None) -> npt.NDArray[Any]:
    """Return labels or weights as an array in memory, whatever they are in.

    Where they and the images, of xarray, have coordinates of the samples, they are in the order of the images. Raises
    DataError where they are no array, are masked, stand for no data by their attributes, or are those of other samples.
    """
    inside = labels.data if _of_xarray(labels) else getattr(labels, "values", labels)
    if callable(inside):  # PyTorch's tensors and mappings have a method of this name
        inside = labels
    if is_dask_collection(labels):
        inside = (inside if is_dask_collection(inside) else labels).compute()
    found = as_array(what, _stored_labels(inside, what) if isinstance(inside, zarr.Array) else inside)
    if np.ma.is_masked(found):
        sample = np.argwhere(np.ma.getmaskarray(found))[0].tolist()[0] if found.ndim else 0
        remedy = f"leave such samples out: keep those of ~numpy.ma.getmaskarray({what})"
        raise DataError(what, f"sample {sample} is masked", remedy)
    found = np.asarray(found)
    if _of_xarray(labels) and found.dtype.kind in "iuf":
        check_labels(what, found, _coding_of_xarray(labels, what))
    places = _places(labels, what, images)
    return found if places is None else found[places]


def _stored_labels(array: zarr.Array[Any], what: str) -> Any:
    """The labels in a Zarr array. Raises DataError where some are not stored, or not there by its attributes."""
    if gone := _not_stored(array):
        raise DataError(what, f"{gone}, and would be read as the array's fill value {array.fill_value}", WRITE_ALL)
    found = array[...]
    if np.dtype(array.dtype).kind in "iuf":
        check_labels(what, np.asarray(found), _coding(array, what))
    return found


def _places(labels: Any, what: str, images: Any) -> npt.NDArray[np.intp] | None:
    """The place of each image's label, by their coordinates; None if it is the same, or they have none."""
    wanted, found = _coordinates(images) if _of_xarray(images) else None, _coordinates(labels)
    if wanted is None or found is None or len(wanted) != len(found) or found.equals(wanted):
        return None
    if found.is_unique and wanted.is_unique and (places := found.get_indexer(wanted)).min() >= 0:
        if _counts_rows(found):
            reason = f"the images' coordinates {wanted.name!s:.40} are the numbers of their rows in another order"
            remedy = f"give {what}.to_numpy() if they are in the order of the images; else name their index"
            raise DataError(what, reason, f"{remedy}: {what}.rename_axis({wanted.name!r:.40})")
        order: npt.NDArray[np.intp] = places
        return order
    if wanted.name != found.name:
        return None
    remedy = f"give {what} with the coordinates of the images, each once, or without coordinates"
    raise DataError(what, f"coordinates {found.name!s:.40} of other samples than the images'", remedy)


def _counts_rows(index: Any) -> bool:
    """Return True for the index that pandas gives a column of itself: it may say nothing about the samples."""
    return (getattr(index, "start", None), getattr(index, "step", None), index.name) == (0, 1, None)


def _coordinates(given: Any) -> Any:
    """The samples' coordinates of an array of xarray, a table or a column, as an index of pandas, if it has some."""
    if _of_xarray(given):
        return given.indexes.get(given.dims[0]) if given.dims and hasattr(given, "indexes") else None
    return given.index if hasattr(given, "iloc") and not is_dask_collection(given) else None


def with_coordinates(images: Any, found: Any, classes: Iterable[Any]) -> Any:
    """Return predictions with the samples' coordinates where images are a DataArray, and as they are elsewhere.

    found : classes (N,), probabilities (N, classes) with an axis `class` of their own, or images as those given.
    """
    if not (_of_xarray(images) and hasattr(images, "coords")):
        return found
    if found.ndim == len(images.dims) and found.ndim > 2:
        return type(images)(found, dims=images.dims, coords=images.coords)
    if found.ndim == 4:  # images of one channel, which were given without its axis
        return type(images)(found[..., 0], dims=images.dims, coords=images.coords)
    sample, *rest = images.dims
    of_pixels = [name for name, known in images.coords.items() if not {sample}.issuperset(known.dims)]
    known = images.drop_vars(of_pixels).isel(dict.fromkeys(rest, 0)).coords
    if found.ndim == 1:
        return type(images)(found, dims=(sample,), coords=known)
    name = "class" if "class" not in (sample, *known) else "predicted_class"
    return type(images)(found, dims=(sample, name), coords=known).assign_coords({name: list(classes)})
