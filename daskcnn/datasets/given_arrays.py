"""The way in for images, labels and weights as people have them: of NumPy, Dask, Zarr, xarray, pandas and others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array
import numpy as np
import numpy.typing as npt
import zarr
from dask.base import is_dask_collection

from daskcnn.errors import DataError
from daskcnn.store.foreign.array import Layout
from daskcnn.store.foreign.axes import axes_of, check_axes


@dataclass(frozen=True)
class Lazy:
    """A DataArray whose data are on disk."""

    array: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, at: slice) -> npt.NDArray[Any]:
        return np.asarray(self.array[at].values)


def array_of(images: Any) -> Any:
    """Return the images (N, H, W, C) as an array of NumPy or, where they are lazy or on disk, of Dask.

    Other lists than those of masked arrays, and tables, are returned as they are. Raises DataError as `unwrapped`.
    """
    if _listed_masks(images):
        return as_array("images", images)
    found = unwrapped(images, "NHWC", option=None)
    if isinstance(found, zarr.Array):
        found = dask.array.from_zarr(found)
    if isinstance(found, Lazy):
        found = found.array.data
    if isinstance(found, np.ndarray | dask.array.Array) and not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    return found


def unwrapped(images: Any, layout: Layout, *, option: str | None = "layout=") -> Any:
    """Return the array inside; what is on disk stays there. A lazy DataArray reads itself slice by slice.

    Raises DataError for a Dataset of xarray and a Zarr group, which hold several arrays; and for names of axes, of
    xarray or Zarr, that say that the channels are elsewhere than the layout has them. option: as for `check_axes`.
    """
    if isinstance(images, zarr.Group) or hasattr(images, "data_vars"):
        names = [str(name) for name in getattr(images, "data_vars", images)]
        remedy = f"give one of them, such as images[{names[0]!r}]" if names else "give an array"
        raise DataError("images", f"several arrays ({', '.join(names[:10])})", remedy)
    check_axes(_axes(images), layout, option=option, methods=_of_xarray(images))
    if _of_xarray(images):
        known = images.chunks is not None or images._in_memory
        images = images.data if known else Lazy(images, images.shape, images.dtype)
    if is_dask_collection(images) and hasattr(images, "to_dask_array"):
        return images.to_dask_array(lengths=True)
    if is_dask_collection(images) and np.isnan(images.shape).any():
        return images.copy().compute_chunk_sizes()  # it changes the array
    return images


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
    DataError where they are no array, are masked, or are those of other samples.
    """
    inside = labels.data if _of_xarray(labels) else getattr(labels, "values", labels)
    if is_dask_collection(labels):
        inside = (inside if is_dask_collection(inside) else labels).compute()
    found = as_array(what, inside[...] if isinstance(inside, zarr.Array) else inside)
    if np.ma.is_masked(found):
        sample = np.argwhere(np.ma.getmaskarray(found))[0].tolist()[0] if found.ndim else 0
        remedy = f"leave such samples out: keep those of ~numpy.ma.getmaskarray({what})"
        raise DataError(what, f"sample {sample} is masked", remedy)
    found = np.asarray(found)
    places = _places(labels, what, images)
    return found if places is None else found[places]


def _places(labels: Any, what: str, images: Any) -> npt.NDArray[np.intp] | None:
    """The place of each image's label, by their coordinates; None if it is the same, or they have none."""
    wanted, found = _coordinates(images) if _of_xarray(images) else None, _coordinates(labels)
    if wanted is None or found is None or len(wanted) != len(found) or found.equals(wanted):
        return None
    if found.is_unique and wanted.is_unique and (places := found.get_indexer(wanted)).min() >= 0:
        order: npt.NDArray[np.intp] = places
        return order
    if wanted.name != found.name:
        return None
    remedy = f"give {what} with the coordinates of the images, each once, or without coordinates"
    raise DataError(what, f"coordinates {found.name!s:.40} of other samples than the images'", remedy)


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
    sample, *rest = images.dims
    known = images.isel(dict.fromkeys(rest, 0), drop=True).coords
    if found.ndim == 1:
        return type(images)(found, dims=(sample,), coords=known)
    name = "class" if "class" not in (sample, *known) else "predicted_class"
    return type(images)(found, dims=(sample, name), coords=known).assign_coords({name: list(classes)})
