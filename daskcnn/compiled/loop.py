"""What makes a function a compiled loop. The only import of Numba."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import llvmlite.binding
import numba
import numpy.typing as npt
from numba import carray
from numba.extending import intrinsic
from numba.extending import overload as overload
from numba.np.linalg import _BLAS, get_blas_kind
from numba.types import CPointer, NamedUniTuple
from numba.types import boolean as boolean
from numba.types import float16 as float16
from numba.types import float32 as float32
from numba.types import float64 as float64
from numba.types import int64 as int64
from numba.types import intp as intp
from numba.types import uint8 as uint8
from numba.types import uint16 as uint16
from numba.types import uint32 as uint32
from numba.types import uint64 as uint64
from numba.types import uintp as uintp

from daskcnn.files import cache_folder

Array: TypeAlias = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
Signature = Callable[[Any], tuple[Any, ...]]
"""The types of a loop's arguments, for a number type T: `lambda T: (T[:, ::1], T[::1], intp)`."""


def fingerprint(*texts: str) -> str:
    """Return letters that stand for these texts, short enough for a name of a file."""
    return sha256("\n".join(texts).encode()).hexdigest()[:16]


def version() -> str:
    """Return what becomes another with any module of loops."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return "\n".join(f"{file} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files)


def cache_path() -> Path:
    """Return the folder where compiled loops are kept: Numba's own setting, or one in the cache of daskcnn.

    It is another one for each version: Numba compiles a loop anew if its own module changes, but not if those do that
    it calls functions of.
    """
    return Path(numba.config.CACHE_DIR or cache_folder() / "compiled" / fingerprint(version()))


def processor() -> str:
    """Return what Numba compiles for: its version, and name and features of the processor."""
    name = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = numba.config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    return f"numba {numba.__version__}, {name}, {features}"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


numba.config.CACHE_DIR = str(cache_path())
UNCACHED = not _writable(cache_path())
"""Whether every process compiles its loops anew, because the cache's folder cannot be written."""

FLOATS = {"float32": float32, "float64": float64}

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "cache": not UNCACHED,
    "error_model": "numpy",  # a division by zero gives inf, as in NumPy, without a test
}
_FREE = {"contract", "reassoc", "nsz"}
"""Sums may run in vectors, products into sums; NaN and inf stay what they are."""
_INNER: dict[str, Any] = {**_OPTIONS, "cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""For what Python does not call: half the time to compile it."""


def integers(kind: type[Any]) -> Any:
    """Return the type of a NamedTuple of integers."""
    return NamedUniTuple(intp, len(kind._fields), kind)


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

    def compile(self, dtype: str) -> bool:
        """Load it from the cache for networks of this dtype, or compile it; return whether it was compiled."""
        known = sum(self.function.stats.cache_misses.values())
        self.function.compile(self.types(dtype))
        return sum(self.function.stats.cache_misses.values()) > known


LOOPS: list[Loop] = []
"""Every loop that Python calls, filled by importing its module."""


def loop(signature: Signature, *, as_written: bool = False) -> Callable[[F], F]:
    """Compile a function that Python calls with contiguous arrays of these types.

    Other types are compiled when they are first met, which takes a second. `as_written` rounds every operation by
    itself, in the order given: the same bits as NumPy's.
    """

    def compiled(function: F) -> F:
        dispatcher = numba.njit(fastmath=set() if as_written else _FREE, **_OPTIONS)(function)
        LOOPS.append(Loop(dispatcher, signature))
        return dispatcher

    return compiled


def inner(function: F) -> F:
    """Compile a function that loops call; Python does not.

    The loops that call it are kept on disk with it inside. Alone it is not: an index on disk that names a class of an
    older version cannot be read.
    """
    return numba.njit(fastmath=_FREE, **_INNER)(function)


def blas_gemm(dtype: Any) -> tuple[int, Any]:
    """Return BLAS's letter for this type of numbers, and the general product that `numpy.dot` calls in loops."""
    return ord(get_blas_kind(dtype)), _BLAS().numba_xxgemm(dtype)


def inner_in_order(function: F) -> F:
    """Compile a function that loops call, whose operations are not reordered: its exactness hangs on their order."""
    return numba.njit(fastmath={"contract"}, **_INNER)(function)


def inner_as_written(function: F) -> F:
    """Compile a function that loops call, whose operations are rounded by themselves, in the order given."""
    return numba.njit(**_INNER)(function)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """Turn an address into a pointer to numbers of this type, or of this array's."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return CPointer(like.dtype)(address, like), generate


@inner_as_written
def vector_at(address: Any, like: Any, size: int) -> Any:
    """Numbers that lie at this address, of a type or of that of an array's numbers: a view, nothing is copied."""
    return carray(_pointer(address, like), (size,))
