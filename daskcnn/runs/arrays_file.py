"""Reads the file of arrays in a checkpoint: safetensors, whose header is checked before anything is allocated.

The library's own reader takes three times the file's size, and two kilobytes for each name in a header.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.documents import Bounds, parse_json
from daskcnn.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]

REMEDY = "take another checkpoint of the run"
BOUNDS = Bounds(size=4 << 20, values=1 << 19, tables=1 << 17)
"""What a header may hold: 40,000 arrays."""

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BOOL": "|b1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an array lies: the bytes from `start` to `stop` behind the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


Header = Mapping[str, Stored]


def read_header(
    source: BufferedReader, file: Path, size: int, *, remedy: str = REMEDY
) -> tuple[Header, Mapping[str, str]]:
    """Return where each array lies, in their order, and the metadata.

    Raises DataError for a file of another size, or a damaged one.
    """
    actual = os.fstat(source.fileno()).st_size
    if actual != size:
        raise DataError(file, f"{actual:,} bytes, not {size:,} as written", remedy)
    length = int.from_bytes(source.read(8), "little")
    if length > min(size - 8, BOUNDS.size):
        raise DataError(file, f"a header of {length:,} bytes, more than the file allows", remedy)
    found = parse_json(source.read(length), f"{file}: header", remedy=remedy, bounds=BOUNDS)
    try:
        metadata = _metadata(found.get("__metadata__", {}))
        entries = sorted(
            ((name, _stored(entry)) for name, entry in found.items() if name != "__metadata__"),
            key=lambda entry: (entry[1].start, entry[1].stop),
        )
        _check_order(entries, size - 8 - length)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(file, f"not a safetensors file ({type(error).__name__}: {error!s:.80})", remedy) from error
    return dict(entries), metadata


def _metadata(found: Any) -> Mapping[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its metadata are no table of strings")
    return found


def _stored(entry: Mapping[str, Any]) -> Stored:
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError("a shape or an offset is no whole number")
    if prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"an array of shape {shape} in {stop - start} bytes")
    return Stored(dtype, shape, start, stop)


def _check_order(entries: list[tuple[str, Stored]], size: int) -> None:
    """Raise ValueError unless the arrays lie one behind the other and fill the file."""
    end = 0
    for name, stored in entries:
        if stored.start != end:
            raise ValueError(f"{name:.40} starts at {stored.start}, the array before ends at {end}")
        end = stored.stop
    if end != size:
        raise ValueError(f"arrays of {end} bytes in {size}")


def read_arrays(source: BufferedReader, header: Header, size: int) -> Arrays:
    """Return the arrays, which may be written to. Raises OSError where the file has become shorter meanwhile."""
    source.seek(size - max((stored.stop for stored in header.values()), default=0))
    return {name: _read(source, stored) for name, stored in header.items()}


def _read(source: BufferedReader, stored: Stored) -> npt.NDArray[Any]:
    array = np.empty(stored.shape, stored.dtype)
    if array.nbytes and source.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
        raise OSError("the file ends too early")
    return array.astype(stored.dtype.newbyteorder("="), copy=False)
