"""The meaning of an array's numbers by the CF conventions, as xarray, netCDF and GDAL write them into attributes.

`_FillValue` and `missing_value` are stored numbers that stand for no data. `scale_factor` and `add_offset` turn stored
numbers into those that are meant (CF conventions 1.11, sections 2.5.1 and 8.1).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError

Numbers = npt.NDArray[Any]
Mark = int | float
_MARKS = ("_FillValue", "missing_value")
_MOST_MARKS = 64
_LARGEST = 1 << 64
_REMEDY = "correct the attribute, or write the array anew"


@dataclass(frozen=True, slots=True)
class Coding:
    """The way from stored numbers to those that are meant: number·scale + offset.

    `marks` are stored numbers that stand for no data. All of them become the first one.
    """

    dtype: np.dtype[Any]
    scale: float = 1.0
    offset: float = 0.0
    marks: tuple[Mark, ...] = ()

    @property
    def packed(self) -> bool:
        """True if the stored numbers are not those that are meant."""
        return (self.scale, self.offset) != (1.0, 0.0)

    @property
    def decoded_dtype(self) -> np.dtype[Any]:
        """Number type of those that are meant: a real one that has room for them, where they are computed."""
        if not self.packed:
            return self.dtype
        small = self.dtype.itemsize <= (4 if self.dtype.kind == "f" else 2)
        return np.dtype(np.float32 if small and not self.offset else np.float64)

    @property
    def nodata(self) -> float | None:
        """The value of pixels without data after decoding; None where no stored number stands for that."""
        return float(self.decoded(np.array(self.marks[:1], self.dtype))[0]) if self.marks else None

    def marking(self, nodata: float | None) -> Coding:
        """Return the same with another stored number for no data, before those that there are."""
        found = None if nodata is None else _as_stored(nodata, self.dtype)
        return self if found is None else replace(self, marks=tuple(dict.fromkeys((found, *self.marks))))

    def marked(self, stored: Numbers) -> npt.NDArray[np.bool_]:
        """Return where stored numbers stand for no data."""
        return np.isin(stored, np.array(self.marks, self.dtype))

    def decoded(self, stored: Numbers) -> Numbers:
        """Return the numbers that are meant, one value for all without data."""
        if len(self.marks) > 1:
            stored = np.where(self.marked(stored), self.dtype.type(self.marks[0]), stored)
        if not self.packed:
            return stored
        kind = self.decoded_dtype.type
        return stored.astype(kind) * kind(self.scale) + kind(self.offset)

    def masked(self, stored: Numbers) -> Numbers:
        """Return the numbers that are meant. Where some stand for no data, the array is masked there."""
        found = self.decoded(stored)
        return np.ma.MaskedArray(found, self.marked(stored), fill_value=self.nodata) if self.marks else found

    def __str__(self) -> str:
        factors = [("scale_factor", self.scale, 1.0), ("add_offset", self.offset, 0.0)]
        told = [f"{name} = {value:g}" for name, value, none in factors if value != none]
        return ", ".join([*told, *(f"{mark:g} for no data" for mark in self.marks)])


def coding_of(attributes: Mapping[str, Any], dtype: np.dtype[Any], path: str, fill: Any = None) -> Coding:
    """Return the coding that attributes describe. Raises DataError for those that are not understood.

    fill : the array's own fill value, where it is kept there in place of `_FillValue`.
    """
    unsigned = str(attributes.get("_Unsigned", "")).lower()
    if (unsigned, dtype.kind) in {("true", "i"), ("false", "u")}:
        reason = f"_Unsigned = {unsigned!r}, while its numbers are {dtype}"
        raise DataError(path, reason, "write it anew in the type that its numbers are meant in")
    scale, offset = _factor(attributes, "scale_factor", 1.0, path), _factor(attributes, "add_offset", 0.0, path)
    found = [mark for key in _MARKS for mark in _marks(attributes, key, dtype, path)]
    if isinstance(fill, int | float) and not isinstance(fill, bool):
        found.append(fill)
    stored = (_as_stored(mark, dtype) for mark in found)
    return Coding(dtype, scale, offset, tuple(dict.fromkeys(mark for mark in stored if mark is not None)))


def _factor(attributes: Mapping[str, Any], key: str, usual: float, path: str) -> float:
    value = attributes.get(key, usual)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not _is_number(value) or not isfinite(value) or (key == "scale_factor" and not value):
        raise DataError(path, f"{key} = {value!r:.60}: one finite number is needed", _REMEDY)
    return float(value)


def _marks(attributes: Mapping[str, Any], key: str, dtype: np.dtype[Any], path: str) -> Iterable[Mark]:
    found = attributes.get(key)
    for value in found[:_MOST_MARKS] if isinstance(found, list) else [] if found is None else [found]:
        if isinstance(value, str):  # NaN by name, or a real number as xarray keeps it in format 3
            value = _real(value) if dtype.kind == "f" else None
        if not _is_number(value):
            raise DataError(path, f"{key} = {found!r:.60}: a number is needed", _REMEDY)
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= _LARGEST)


def _real(text: str) -> float | None:
    try:
        return float(text) if len(text) < 12 else float(struct.unpack("<d", base64.b64decode(text, validate=True))[0])
    except (ValueError, struct.error):
        return None


def _as_stored(mark: Mark, dtype: np.dtype[Any]) -> Mark | None:
    """Return the number as this type has it; None where it has no room for it, so that no pixel is one, and for NaN."""
    if not isfinite(mark) or dtype.kind not in "iuf":
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            found = float(dtype.type(mark))
        return found if isfinite(found) else None
    room = np.iinfo(dtype)
    return int(mark) if mark == int(mark) and room.min <= mark <= room.max else None
