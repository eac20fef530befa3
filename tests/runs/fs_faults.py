"""Stands in the way of every file-system call of a save: to count them, to fail one, or to be killed at one.

Run as a program it saves a checkpoint once for every call there is, killed at that call:
`fs_faults.py BASE OUT TORN` copies the folder BASE to OUT/<k> and saves into the copy until call k.
"""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.runs.checkpoint import Checkpoint, save

CALLS = [(os, n) for n in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir", "scandir", "close")]


@contextmanager
def intercepted(before: Callable[[int, str], None]) -> Iterator[None]:
    """`before(k, name)` runs ahead of this thread's k-th call, k counting from 0; others may be about, left by Dask."""
    own = threading.get_ident()
    originals = [(module, name, getattr(module, name)) for module, name in [*CALLS, (builtins, "open")]]
    count = 0

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if threading.get_ident() == own:
                count += 1
                before(count - 1, name)
            return original(*args, **kwargs)

        return call

    for module, name, original in originals:
        setattr(module, name, wrap(name, original))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def checkpoint(step: int, score: float | None = None) -> Checkpoint:
    """A checkpoint every part of which tells its step."""
    arrays: dict[str, np.ndarray] = {
        "weights": np.full(40, step, np.float32),
        "momentum": np.full((3, 4), step, np.float64),
    }
    return Checkpoint(arrays, {"version": step, "sizes": [step, 0.1]}, step, score)


def _save_killed(folder: Path, kill_at: int, *, torn: bool) -> None:
    def before(k: int, _: str) -> None:
        if k == kill_at:
            if torn:  # what was written last has not reached the disk
                for file in folder.glob("tmp-*/*"):
                    os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with intercepted(before):
        save(folder, checkpoint(20), keep=1)
    os._exit(0)


def main(base: str, out: str, torn: str) -> None:
    status, k = -1, 0
    while status != 0:
        folder = Path(out, f"{k:03d}")
        shutil.copytree(base, folder)
        pid = os.fork()
        if pid == 0:
            _save_killed(folder, k, torn=torn == "torn")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        k += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
