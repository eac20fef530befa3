"""Images as people have them in Python: what wraps an array is taken off, and what is not in memory stays lazy."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr
from dask.base import is_dask_collection

from daskcnn.errors import DataError


def check_one_array(images: Any) -> None:
    """Raise DataError for a Dataset of xarray and a Zarr group, which hold several arrays."""
    if isinstance(images, zarr.Group) or hasattr(images, "data_vars"):
        names = [str(name) for name in getattr(images, "data_vars", images)]
        remedy = f"give one of them, such as images[{names[0]!r}]" if names else "give an array"
        raise DataError("images", f"several arrays ({', '.join(names[:10])})", remedy)


def array_of(images: Any) -> Any:
    """Return the array itself where `images` wraps one: Zarr arrays and arrays of xarray on disk become Dask's.

    Raises DataError as `check_one_array`.
    """
    check_one_array(images)
    if isinstance(images, zarr.Array):
        import dask.array as da

        return da.from_zarr(images)
    if type(images).__module__.startswith("xarray."):
        images = images.data
    if is_dask_collection(images) and hasattr(images, "to_dask_array"):
        return images.to_dask_array(lengths=True)
    if is_dask_collection(images) and np.isnan(images.shape).any():
        return images.copy().compute_chunk_sizes()  # it changes the array
    return images
