"""A worker's means: array namespace, thread pool, scratch memory. The only import of cupy."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import ceil, inf, prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
from threadpoolctl import ThreadpoolController

from daskcnn import compiled
from daskcnn.compiled.given import readable
from daskcnn.errors import ClusterError, installing
from daskcnn.pool import Pool as Pool

LINE = 64
"""Bytes of a cache line. Scratch arrays start at one, because vector loads that cross a line cost twice."""
ROUNDING = 64 * LINE
"""The most that alignment adds to the bytes of a pass."""

Array: TypeAlias = npt.NDArray[Any]
"""An array of the backend in use. CuPy's have the same interface as far as it is used here."""

DeviceKind = Literal["cpu", "gpu"]

_logger = logging.getLogger("daskcnn")


@dataclass(frozen=True)
class Backend:
    """One array library: its namespace, and the conversions between its arrays and the host's, which are NumPy's."""

    name: str
    xp: Any
    from_host: Callable[[npt.NDArray[Any]], Array]
    to_host: Callable[[Array], npt.NDArray[Any]]
    synchronize: Callable[[], None]
    block_bytes: int = sys.maxsize
    """Bytes of an array that one step of a pass works on, so that they stay in a core's cache; a GPU takes all."""

    @property
    def compiled(self) -> bool:
        """True if passes run as loops of `daskcnn.compiled`; if not, as expressions over arrays of `xp`."""
        return self.xp is np

    def contiguous(self, a: Array) -> Array:
        """Return an array in the order of its axes, as loops and products take it. It is only read."""
        return readable(a) if self.compiled else self.xp.ascontiguousarray(a)

    def scalar(self, x: Any) -> float:
        """Return the Python number in an array of one element; this waits for the device."""
        return float(self.to_host(x).item()) if hasattr(x, "shape") else float(x)


NUMPY = Backend("numpy", np, np.asarray, np.asarray, lambda: None, 1 << 19)


def _cupy() -> Backend:
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]

        cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        reason, remedy = "CuPy is not installed on this worker", f"{installing('gpu')} there"
        raise ClusterError("device gpu", reason, remedy) from error
    except Exception as error:  # CUDARuntimeError exists only where cupy does
        reason, remedy = f"no usable GPU on this worker ({error})", "start it with --resources CPU=1"
        raise ClusterError("device gpu", reason, remedy) from error
    return Backend("cupy", cupy, cupy.asarray, cupy.asnumpy, lambda: cupy.cuda.get_current_stream().synchronize())


BACKENDS: dict[str, Callable[[], Backend]] = {"cpu": lambda: NUMPY, "gpu": _cupy}


def backend(kind: DeviceKind) -> Backend:
    """Return the backend for a kind of device. Raises ClusterError if there is no such device or library."""
    return BACKENDS[kind]()


class Workspace:
    """Scratch arrays by name, cut off one slab that every pass, which begins with `recycle`, uses again.

    An array that does not fit the slab is newly allocated, and the slab is enlarged for the next pass.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp
        self._slab: Array | None = None
        self._used = 0
        self._taken: dict[tuple[str, np.dtype[Any]], Array] = {}
        self._beside: dict[tuple[str, np.dtype[Any]], int] = {}  # bytes of those that did not fit
        self._lock = threading.Lock()

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array of this shape. A later `take` of the same name returns the same memory."""
        dtype = np.dtype(dtype)
        key, size = (name, dtype), prod(shape)
        with self._lock:
            flat = self._taken.get(key)
            if flat is None or flat.size < size:
                self._taken.pop(key, None)  # freed before the larger one is made
                flat = self._taken[key] = self._new(key, size, dtype)
        return flat[:size].reshape(shape)

    def _new(self, key: tuple[str, np.dtype[Any]], size: int, dtype: np.dtype[Any]) -> Array:
        start, nbytes = self._used + -self._used % LINE, size * dtype.itemsize
        if self._slab is not None and start + nbytes <= self._slab_bytes:
            self._used = start + nbytes
            return self._slab[start : self._used].view(dtype)
        self._beside[key] = nbytes
        return _aligned(self._xp, nbytes).view(dtype)

    def recycle(self, nbytes: int = 0) -> None:
        """Make all memory available again: no earlier array may be used any more. nbytes: what the next pass takes."""
        with self._lock:
            self._taken.clear()
            beside = sum(n + LINE for n in self._beside.values())
            if (needed := max(nbytes, self._used + beside if beside else 0)) > self._slab_bytes:
                self._slab = None  # freed before the larger one is made
                self._slab = _pages(needed) if self._xp is np else _aligned(self._xp, needed)
            self._beside.clear()
            self._used = 0

    @property
    def _slab_bytes(self) -> int:
        return 0 if self._slab is None else len(self._slab)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept."""
        return self._slab_bytes + sum(self._beside.values())


def _pages(nbytes: int) -> Array:
    """Return memory, (nbytes,) uint8, that is not the heap's: among the arrays of a step it would leave gaps there."""
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return np.frombuffer(mmap.mmap(-1, max(1, nbytes), **private), np.uint8)[:nbytes]


def _aligned(xp: Any, nbytes: int) -> Array:
    """Return uninitialised memory, (nbytes,) uint8, that starts at a cache line."""
    memory = xp.empty(nbytes + LINE, np.uint8)
    start = -getattr(memory, "__array_interface__", {"data": (0,)})["data"][0] % LINE  # a GPU's memory is aligned
    return memory[start : start + nbytes]


@dataclass
class Device:
    """A worker's means. workspace_limit: bytes to plan with. exact: algorithms round as products do at most.

    tuned: plans go by times that were measured on this machine; else by the model alone, so that results repeat.
    """

    backend: Backend = NUMPY
    pool: Pool = field(default_factory=Pool)
    workspace: Workspace = field(default_factory=Workspace)
    workspace_limit: int = 1 << 30
    exact: bool = False
    tuned: bool = True

    @classmethod
    def of(
        cls,
        kind: DeviceKind,
        *,
        threads: int = 1,
        workspace_limit: int = 1 << 30,
        exact: bool = False,
        tuned: bool = True,
    ) -> Device:
        """Return a device of this kind. On a GPU the pool has one thread: the device itself runs work in parallel."""
        b = backend(kind)
        return cls(b, Pool(threads if kind == "cpu" else 1), Workspace(b.xp), workspace_limit, exact, tuned)

    @property
    def xp(self) -> Any:
        """The array namespace: NumPy or CuPy."""
        return self.backend.xp

    def warm(self, dtype: str, say: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Load the compiled loops for networks of this dtype, if this device runs them; compile those that are new.

        Buffers of BLAS are made ready too. `say` is told how many of how many there are, when one was compiled.
        """

        def told(done: int, of: int) -> None:
            _logger.info("compiled loop %d of %d for this machine; later processes load them", done, of)
            say(done, of)

        if self.backend.compiled:
            compiled.warm.warm(dtype, told)
            compiled.products.touch_buffers(self.pool.threads, self.pool.map)


_EVERY = 10
"""Compilations for each line that tells of them."""


def compile_here(dtype: str, say: Callable[[str], None]) -> None:
    """Load the compiled loops for networks of this dtype. `say` is told before and while they have to be compiled."""
    compilations = count(1)

    def told(done: int, of: int) -> None:
        if next(compilations) % _EVERY == 0 or done == of:
            say(f"compiled loop {done} of {of}")

    if not compiled.warm.is_ready(dtype):
        once = "in this process, as nothing can be kept" if compiled.loop.UNCACHED else "once for this machine"
        say(f"compiling loops, {once}: this takes a minute or more (`daskcnn doctor --warm` does it on all cores)")
    compiled.warm.warm(dtype, told)


@dataclass(frozen=True)
class DeviceProfile:
    """A worker's description of itself, with the processor's or the GPU's name. memory: bytes."""

    kind: DeviceKind
    name: str
    threads: int
    memory: int


def device_profile(kind: DeviceKind, threads: int) -> DeviceProfile:
    """Return the device of this kind as measured times and plans name it."""
    if kind == "gpu":
        xp = backend("gpu").xp
        properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
        return DeviceProfile("gpu", properties["name"].decode(), 1, int(properties["totalGlobalMem"]))
    return DeviceProfile("cpu", _processor(), threads, psutil.virtual_memory().total)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _libraries() -> ThreadpoolController:
    """Return the BLAS of NumPy and of SciPy among others. Looking for them costs as much as a small task of a step."""
    import scipy.linalg.cython_blas  # compiled loops call it: it must be there before it is looked for

    assert scipy.linalg.cython_blas
    return ThreadpoolController()


class _Setting:
    """A setting of the process, which several threads may ask for: the first one makes it, the last one lifts it."""

    def __init__(self, make: Callable[[], object], lift: Callable[[], object]) -> None:
        # a finalizer may release it in the thread that is just asking for it, whenever garbage is collected
        self._make, self._lift, self._lock, self._users = make, lift, threading.RLock(), 0

    def ask(self) -> None:
        with self._lock:
            if not self._users:
                self._make()
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)
            if not self._users:
                self._lift()


_LIMIT = ExitStack()
_SINGLE_THREADED = _Setting(lambda: _LIMIT.enter_context(_libraries().limit(limits=1, user_api="blas")), _LIMIT.close)


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Let BLAS run one thread inside; the pool does the rest. Else two kinds of threads compete for the same cores."""
    _SINGLE_THREADED.ask()
    try:
        yield
    finally:
        _SINGLE_THREADED.release()


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step instead of returning it to the system.

    A step takes and frees the same hundreds of MiB as the step before, and fresh pages can cost as much as the work on
    them. Applies to this process and to glibc only, until all who asked for it have called `release_freed_memory`.
    """
    _FREED.ask()


def release_freed_memory() -> None:
    """Return kept memory to the system, and memory freed from now on, as the C library does by default.

    Nothing changes while another one in this process still asks for it: a training run, say, when a prediction ends.
    """
    _FREED.release()


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def _set_malloc(most_maps: int, trim_threshold: int) -> None:
    if mallopt := _libc_function("mallopt"):
        mallopt(_M_MMAP_MAX, most_maps)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)


def _usual_malloc() -> None:
    _set_malloc(65536, 128 << 10)  # glibc's defaults
    if malloc_trim := _libc_function("malloc_trim"):
        malloc_trim(0)


_FREED = _Setting(lambda: _set_malloc(0, -1), _usual_malloc)


def _libc_function(name: str) -> Any:
    """Return a function of the C library, None if it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def cpu_count(root: Path = Path("/")) -> int:
    """Return the cores this process may use: those of its affinity, fewer where control groups limit its time.

    A limit between two whole numbers is rounded up, as Dask does. root: of the file system that tells the limits.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ceil(min([cores, *map(_quota, _groups_of_time(root))]))


def _groups_of_time(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups, v1 or v2, that this process's time counts in, the innermost first."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                top, own = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), Path(path.lstrip("/"))
                yield from (top / group for group in (own, *own.parents))  # in a container its own may be the top


def _quota(group: Path) -> float:
    """Return the seconds of processor time a second that a control group allows; inf where it sets no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # no such file, or no number: "max"
            quota, period = map(int, " ".join((group / name).read_text(encoding="ascii") for name in names).split())
            if quota > 0:
                return quota / period
    return inf


# --- random numbers keyed by their purpose, so that they depend neither on the worker nor on the order of drawing ---

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(xp: Any, x: Array) -> Array:
    """Apply SplitMix64's finalizer to a uint64 array: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> xp.uint64(30))) * xp.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> xp.uint64(27))) * xp.uint64(0x94D049BB133111EB)
    return x ^ (x >> xp.uint64(31))


def derive(xp: Any, keys: Array, salt: int | Array) -> Array:
    """Derive independent uint64 keys from keys and a number, or uint64 numbers, broadcast against the keys."""
    return mix64(xp, keys + xp.uint64((_GOLDEN * (2 * salt + 1)) & _MASK))


def uniform(xp: Any, keys: Array) -> Array:
    """Return float32 numbers in [0, 1), one per key."""
    return (keys >> xp.uint64(40)).astype(xp.float32) * xp.float32(2.0**-24)
