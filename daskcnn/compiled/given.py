"""Arguments of loops: arrays in the order of their axes, and the addresses of several arrays. Numba is not needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def readable(a: Array) -> Array:
    """Return an array in the order of its axes that a loop reads.

    A read-only array, as those from other processes are, would make Numba compile the loop anew. Loops leave their
    input as it is, so the result is a view that hides this.
    """
    a = np.ascontiguousarray(a)
    if not a.flags.aligned:
        return a.copy()
    return a if a.flags.writeable else np.asarray(_Writable(a))


class _Writable:
    """A read-only array as if it could be written to."""

    def __init__(self, a: Array) -> None:
        place, _ = a.__array_interface__["data"]
        self.__array_interface__ = {**a.__array_interface__, "data": (place, False)}
        self._kept = a


def addresses(arrays: Iterable[Array]) -> npt.NDArray[np.uint64]:
    """Return where these arrays begin. They must be contiguous, and outlive the loop that reads them there."""
    return np.array([address(a) for a in arrays], np.uint64)


def address(array: Array) -> int:
    """Return where an array begins."""
    return array.__array_interface__["data"][0]
