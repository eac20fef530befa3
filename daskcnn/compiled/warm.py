"""Compile every loop before it is needed, once for a machine; later processes load what the first one compiled.

Two processes that fill Numba's cache with the same function at once may crash (numba#4807). Processes that share a
folder, on one machine or several, therefore take turns by a lock, until a file in it says that all loops are there.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from inspect import getsource
from multiprocessing import get_context
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout

from daskcnn.compiled.loop import LOOPS, TROUBLES, UNCACHED, cache_path, fingerprint, processor, trouble, version

Say = Callable[[int, int], None]
"""Called after each compilation with the number of loops that are ready and the number of all."""

PATIENCE = 600.0
"""Seconds that a process waits while another one compiles."""
_WARM: set[str] = set()
"""The number types that this process has loaded."""
_ONE = Lock()


def warm(dtype: str, say: Say = lambda done, of: None) -> int:
    """Load all loops for networks of this dtype. Compile those that are not in the cache, and return their number.

    The first call on a machine takes a minute; later ones take a few tenths of a second.
    """
    with _ONE:
        if dtype in _WARM:
            return 0
        _import_all()
        ready = is_ready(dtype)
        if ready or UNCACHED:
            new = _compile(dtype, say)
        else:
            with _turn():
                new = _compile(dtype, say)
                _set_mark(dtype)
        _WARM.add(dtype)
        return new


def warm_module(module: str, dtype: str) -> None:
    """Load the loops of one module, for a process that needs no others. Compile those that are not in the cache."""
    import_module(f"{__package__}.{module}")
    with _ONE, nullcontext() if UNCACHED or is_ready(dtype) else _turn():
        for each in LOOPS:
            if each.name.startswith(f"{module}."):
                each.compile(dtype)


def warm_in_processes(dtype: str, say: Say, processes: int) -> int:
    """Compile the loops that are not in the cache, in several processes at once. Return their number."""
    if UNCACHED or is_ready(dtype):
        return 0
    _import_all()
    with _turn(), ProcessPoolExecutor(processes, get_context("spawn"), logging.disable) as pool:
        new = 0
        # the longest first, so that the processes end together
        order = sorted(LOOPS, key=lambda loop: -len(getsource(loop.written)))
        for done, compiled in enumerate(as_completed([pool.submit(_compile_one, o.name, dtype) for o in order]), 1):
            is_new, troubles = compiled.result()
            for each in troubles:
                trouble(each)
            if is_new:
                new += 1
                say(done, len(LOOPS))
        _set_mark(dtype)
    return new


def _compile_one(name: str, dtype: str) -> tuple[bool, list[str]]:
    """Compile a loop in a process of the pool. Return whether it is new, and what was wrong with the cache so far."""
    _import_all()
    return next(loop for loop in LOOPS if loop.name == name).compile(dtype), TROUBLES


def is_ready(dtype: str) -> bool:
    """Return whether a process has compiled all loops of this version for a processor like this one."""
    return _mark(dtype).exists()


def _compile(dtype: str, say: Say) -> int:
    new = 0
    for done, loop in enumerate(LOOPS, 1):
        if loop.compile(dtype):
            new += 1
            say(done, len(LOOPS))
    return new


def _import_all() -> None:
    for module in _modules():
        import_module(f"{__package__}.{module}")


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]


@contextmanager
def _turn() -> Iterator[None]:
    """Let processes that share the folder wait meanwhile. Where the lock cannot be had this one goes on without it."""
    with ExitStack() as held:
        try:
            held.enter_context(FileLock(cache_path() / "compile.lock", timeout=PATIENCE, fallback_to_soft=False))
        except OSError as error:
            reason = f"another process has held it for {PATIENCE:g} s" if isinstance(error, Timeout) else error
            trouble(f"{cache_path()}: loops are compiled without a lock ({reason})")
        yield


def _set_mark(dtype: str) -> None:
    """Say that all loops are there, unless something was wrong."""
    if not TROUBLES:
        with suppress(OSError):
            _mark(dtype).touch()


def _mark(dtype: str) -> Path:
    """Return the file that says that all loops are compiled, named by all that they depend on."""
    return cache_path() / f"ready-{fingerprint(processor(), version(), dtype)}"
