"""Decorators that make a function a compiled loop. The only import of Numba."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir as ir
from numba import carray
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.cgutils import alloca_once, for_range, get_or_insert_function
from numba.extending import intrinsic as intrinsic
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
from numba.types import void as void

from daskcnn.files import cache_folder

Array: TypeAlias = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
Signature = Callable[[Any], tuple[Any, ...]]
"""The types of a loop's arguments, for a number type T: `lambda T: (T[:, ::1], T[::1], intp)`."""
_logger = logging.getLogger("daskcnn")


def fingerprint(*texts: str) -> str:
    """Return letters that stand for these texts, short enough for a name of a file."""
    return sha256("\n".join(texts).encode()).hexdigest()[:16]


def version() -> str:
    """Return a text that changes with any module of loops."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return "\n".join(f"{file} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files)


def cache_path() -> Path:
    """Return the folder where compiled loops are kept: Numba's own setting, or one in the cache of daskcnn.

    Each version has a folder of its own: Numba compiles a loop anew when its own module changes, but not when a module
    changes whose functions it calls. So has each kind of processor: unlike machines write no index of each other.
    """
    return Path(numba.config.CACHE_DIR or cache_folder() / "compiled" / fingerprint(version(), processor()))


def processor() -> str:
    """Return the target of compilation: Numba's version, and the processor's name and features."""
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
"""True where every process compiles its loops anew, because the cache's folder cannot be written."""

FLOATS = {"float32": float32, "float64": float64}

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # a division by zero gives inf, as in NumPy, without a test
}
_FREE = {"contract", "reassoc", "nsz"}
"""Sums may run in vectors, products into sums; NaN and inf stay what they are."""
_INNER: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""For functions that Python does not call: they compile in half the time."""


def integers(kind: type[Any]) -> Any:
    """Return the type of a NamedTuple of integers."""
    return NamedUniTuple(intp, len(kind._fields), kind)


TROUBLES: list[str] = []
"""Faults of the cache that this process has met."""


def trouble(message: str) -> None:
    """Warn that the cache does not serve as it should, once for each message."""
    if message not in TROUBLES:
        TROUBLES.append(message)
        _logger.warning(message)


class _CachePlace(UserProvidedCacheLocator):  # type: ignore[misc]
    """The cache's folder, also where no file can be made in it now: loops that are there can be read."""

    @classmethod
    def from_function(cls, function: Any, file: str) -> _CachePlace:
        return cls(function, file)


class _InCachePlace(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_CachePlace,)


class _LoopCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, whose failures are no failures of the function."""

    _impl_class = _InCachePlace

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return what was kept for these types; None if there is nothing, or if a file is damaged."""
        try:
            return super().load_overload(signature, target)
        except Exception as error:  # unpickling a damaged file raises any
            trouble(f"{self.cache_path}: damaged files are removed, and their loops compiled anew ({_reason(error)})")
            for file in Path(self.cache_path).glob(f"{self._impl.filename_base}.*nb[ci]"):  # index and data
                with suppress(OSError):
                    file.unlink()

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled for these types, if that is possible."""
        try:
            super().save_overload(signature, compiled)
        except Exception as error:  # a full disk, or an index that is damaged and cannot be removed
            trouble(f"{self.cache_path}: compiled loops cannot be kept ({_reason(error)}); set DASKCNN_CACHE_DIR")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class Loop:
    """A compiled function, and the types of arguments that its callers give it."""

    def __init__(self, function: Any, signature: Signature, written: Callable[..., Any]) -> None:
        self.function, self._signature, self.written = function, signature, written

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
        fastmath = set() if as_written else _FREE
        # inlined before types are known: one function less to optimise, a quarter of the time of compiling all loops
        within = numba.njit(fastmath=fastmath, inline="always", **_INNER)(function)
        dispatcher = numba.njit(fastmath=fastmath, **_OPTIONS)(_by_turns(function, within))
        if not UNCACHED:
            dispatcher._cache = _LoopCache(dispatcher.py_func)
        LOOPS.append(Loop(dispatcher, signature, function))
        return dispatcher

    return compiled


def _by_turns(function: Any, within: Any) -> Any:
    """Return a function that leaves the interpreter, calls `within`, and comes back when no other thread is there.

    It has the name, parameters and place of `function`: Numba keeps what it compiled under these.
    """
    code = function.__code__
    given = ", ".join(code.co_varnames[: code.co_argcount])
    lines = f"def {code.co_name}({given}):", " leave()", f" result = within({given})", " come_back()", " return result"
    source = compile("\n" * (code.co_firstlineno - 1) + "\n".join(lines), code.co_filename, "exec")
    names = {"__name__": function.__module__, "leave": _leave, "within": within, "come_back": _come_back}
    exec(source, names)  # noqa: S102
    return update_wrapper(names[code.co_name], function, ("__module__", "__qualname__", "__doc__"), ())


def inner(function: F) -> F:
    """Compile a function that loops call; Python does not.

    Loops are kept on disk with the functions they call inside. The function alone is not kept: an index on disk that
    names a class of an older version cannot be read.
    """
    return numba.njit(fastmath=_FREE, **_INNER)(function)


def blas_gemm(dtype: Any) -> tuple[int, Any]:
    """Return BLAS's letter for this type of numbers, and the general product that `numpy.dot` calls in loops."""
    return ord(get_blas_kind(dtype)), _BLAS().numba_xxgemm(dtype)


def inner_in_order(function: F) -> F:
    """Compile a function that loops call, whose operations keep their order, because its exactness depends on it."""
    return numba.njit(fastmath={"contract"}, **_INNER)(function)


def inner_as_written(function: F) -> F:
    """Compile a function that loops call, whose operations are each rounded, in the order given."""
    return numba.njit(**_INNER)(function)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """Turn an address into a pointer to numbers of this type, or of this array's."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return CPointer(like.dtype)(address, like), generate


@inner_as_written
def vector_at(address: Any, like: Any, size: int) -> Any:
    """Return a view of the numbers at this address, of this type or of the type of an array's numbers."""
    return carray(_pointer(address, like), (size,))


place_for, counted = alloca_once, for_range
"""For functions that write LLVM's code themselves: memory that the compiler makes a register, and a loop."""


def array_data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return the pointer to the numbers of an array, for such functions."""
    return context.make_array(kind)(context, builder, value).data


_PAUSES: dict[str, tuple[str, list[int]]] = {
    **dict.fromkeys(("x86_64", "AMD64", "i686"), ("llvm.x86.sse2.pause", [])),
    **dict.fromkeys(("aarch64", "arm64"), ("llvm.aarch64.hint", [1])),
}
"""LLVM's function that tells a processor that a loop waits, and its arguments, by the machine's name."""


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing: Any) -> Any:
    """Tell the processor that a loop waits: the core's other thread runs faster, or it saves power."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, given = _PAUSES[platform.machine()]
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(given))
            builder.call(get_or_insert_function(builder.module, kind, name), [ir.IntType(32)(each) for each in given])
        return context.get_dummy_value()

    return void(), generate


def _system_yield() -> int:
    """Return the address of the system's function that gives the processor to a thread that waits for it."""
    windows = os.name == "nt"
    function = ctypes.CDLL("kernel32").SwitchToThread if windows else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


llvmlite.binding.add_symbol("daskcnn_yield", _system_yield())


@intrinsic  # type: ignore[untyped-decorator]
def _give_way(typing: Any) -> Any:
    """Give the processor to another thread that waits for it, if there is one: half a microsecond if not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(get_or_insert_function(builder.module, kind, "daskcnn_yield"), [])
        return context.get_dummy_value()

    return void(), generate


_GIVE_WAY = 64
"""After so many turns a loop that waits gives way: the thread it waits for may need the same processor."""


@inner_as_written
def rest(turn: int) -> None:
    """Pass the time between two turns of a loop that waits."""
    if turn % _GIVE_WAY == _GIVE_WAY - 1:
        _give_way()
    else:
        pause()


def _shared(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def read_shared(typing: Any, address: Any) -> Any:
    """Read an integer of 64 bits that other threads change."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_shared(builder, arguments[0]), "acquire", 8)

    return int64(intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_shared(typing: Any, address: Any, number: Any) -> Any:
    """Write an integer of 64 bits that other threads read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _shared(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return void(intp, int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_shared(typing: Any, address: Any, number: Any) -> Any:
    """Add to an integer of 64 bits that other threads read or change too; return what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _shared(builder, arguments[0]), arguments[1], "acq_rel")

    return int64(intp, int64), generate


_TURN = np.zeros(8, np.int64)
"""1 while a thread that came back from a loop is in the interpreter."""
llvmlite.binding.add_symbol("daskcnn_turn", _TURN.ctypes.data)
_TURNS = 4_000
"""Turns that a thread waits before it comes back although another one is there: 100 µs, or more on other processors."""


def step_aside() -> None:
    """Say that this thread, which is in the interpreter, is about to sleep."""
    _TURN[0] = 0


@intrinsic  # type: ignore[untyped-decorator]
def _turn(typing: Any) -> Any:
    """Return the address of `_TURN`, by its name: compiled loops on disk are for other processes too."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.module.globals.get("daskcnn_turn")
        number = number or ir.GlobalVariable(builder.module, ir.IntType(64), "daskcnn_turn")
        return builder.ptrtoint(number, ir.IntType(64))

    return intp(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _swap_shared(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Write an integer of 64 bits that other threads change too, if it is `old`; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, old, new = arguments
        pair = builder.cmpxchg(_shared(builder, address), old, new, "acq_rel", "monotonic")
        return builder.extract_value(pair, 1)

    return boolean(intp, int64, int64), generate


@inner_as_written
def _leave() -> None:
    """Say that this thread has left the interpreter."""
    write_shared(_turn(), 0)


@inner_as_written
def wait_for_turn(turns: int) -> None:
    """Wait until another thread of loops is in the interpreter, for this number of turns at most."""
    for _ in range(turns):
        if read_shared(_turn()):
            return
        pause()


@inner_as_written
def _come_back() -> None:
    """Wait until no other thread of loops is in the interpreter, for a while.

    A thread that waits for the interpreter itself sleeps, and waking takes longer than most threads stay there.
    """
    for turn in range(_TURNS):
        if _swap_shared(_turn(), 0, 1):
            return
        rest(turn)
