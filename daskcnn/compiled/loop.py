"""What makes a function a compiled loop. The only import of Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.types import boolean as boolean
from numba.types import float16 as float16
from numba.types import float32, float64
from numba.types import int64 as int64
from numba.types import intp as intp
from numba.types import uint8 as uint8
from numba.types import uint64 as uint64
from numba.types import uintp as uintp

F = TypeVar("F", bound=Callable[..., Any])
Signature = Callable[[Any], tuple[Any, ...]]
"""The types of a loop's arguments, for a number type T: `lambda T: (T[:, ::1], T[::1], intp)`."""

FLOATS = {"float32": float32, "float64": float64}

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",  # a division by zero gives inf, as in NumPy, without a test
    "fastmath": {"contract", "reassoc", "nsz"},  # sums in vectors; NaN and inf stay what they are
}


class Loop:
    """A compiled function, and the types of arguments that its callers give it."""

    def __init__(self, function: Any, signature: Signature) -> None:
        self.function, self._signature = function, signature

    @property
    def name(self) -> str:
        """The names of module and function: "winograd.transform_input"."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    def types(self, dtype: str) -> tuple[Any, ...]:
        """Return the types of the arguments for networks of this dtype."""
        return self._signature(FLOATS[dtype])

    def compile(self, dtype: str) -> None:
        """Compile it for networks of this dtype, or load it from the cache on disk."""
        self.function.compile(self.types(dtype))


LOOPS: list[Loop] = []
"""Every loop that Python calls, filled by importing its module."""


def loop(signature: Signature) -> Callable[[F], F]:
    """Compile a function that Python calls with contiguous arrays of these types.

    Other types are compiled when they are first met, which takes a second.
    """

    def compiled(function: F) -> F:
        dispatcher = numba.njit(**_OPTIONS)(function)
        LOOPS.append(Loop(dispatcher, signature))
        return dispatcher

    return compiled


def inner(function: F) -> F:
    """Compile a function that loops call; Python does not.

    The loops that call it are kept on disk with it inside. Alone it is not: an index on disk that names a class of an
    older version cannot be read.
    """
    options = {**_OPTIONS, "cache": False}
    return numba.njit(**options, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
