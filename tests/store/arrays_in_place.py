"""Zarr arrays as somebody else may have written them, and jobs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.store import Dataset
from daskcnn.store.array_index import ArrayIndex
from daskcnn.store.foreign.in_place import Arrays, Outline, look, outline


def write_array(place: str | Path, data: npt.NDArray[Any], chunk: int | tuple[int, ...], **options: Any) -> str:
    """Write an array, chunked along the first axis, all chunks of it; the path."""
    options = {"config": {"write_empty_chunks": True}} | options
    chunks = (chunk, *data.shape[1:]) if isinstance(chunk, int) else chunk
    dtype = str if data.dtype.kind == "U" else data.dtype
    zarr.create_array(str(place), shape=data.shape, chunks=chunks, dtype=dtype, **options)[...] = data
    return str(place)


def tiles(
    folder: Path | str, *, samples: int = 300, chunk: int = 20, dtype: str = "uint16", classes: int = 5, **how: Any
) -> Arrays:
    """Random images (8, 6, 3) sorted by label, and where they lie."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 200, (samples, 8, 6, 3)).astype(dtype)
    y = np.sort(np.arange(samples) % classes)
    images = write_array(f"{folder}/tiles.zarr/x", x, chunk, **how)
    labels = write_array(f"{folder}/tiles.zarr/y", y, 64)
    return Arrays(images, labels, validation=40)


def index_of(found: Outline) -> ArrayIndex:
    """Read everything, as the workers do."""
    return found.index([seen for piece in found.pieces() for seen in look(piece)])


def opened(arrays: Arrays, **changes: Any) -> Dataset:
    """The data set of these arrays, with its index."""
    found = outline(replace(arrays, **changes))
    return found.dataset(index_of(found))
