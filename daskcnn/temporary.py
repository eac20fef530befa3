"""Temporary folders that go with their process: after a kill, the next process that makes one removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PREFIX = "daskcnn-"
_LOCK = ".in-use"
"""File in a folder, locked as long as its process lives. A folder without one is not ours to remove."""

_TRIES, _PAUSE = 20, 0.1  # to remove a folder, and seconds between two of them


class OwnFolder(tempfile.TemporaryDirectory[str]):
    """A new temporary folder, which is removed at the end of its context or process, or after a kill by the next.

    label : what it is for, in its name
    """

    def __init__(self, label: str = "") -> None:
        remove_left()
        super().__init__(prefix=f"{PREFIX}{label}")
        with suppress(OSError):  # a disk without locks, or a full one: it is removed by its own process alone
            descriptor = _locked(Path(self.name) / f"{_LOCK}.new", os.O_CREAT)
            weakref.finalize(self, os.close, descriptor)
            os.rename(f"{self.name}/{_LOCK}.new", f"{self.name}/{_LOCK}")  # with the lock on it

    def cleanup(self) -> None:
        """Remove the folder, as `remove_folder` does."""
        _insist(super().cleanup, self.name)


def remove_folder(folder: str | Path) -> None:
    """Remove a folder as far as that is possible, if it is there.

    A task of a graph that failed may write into it meanwhile: then it is tried again.
    """

    def remove() -> None:
        if os.path.lexists(folder):
            shutil.rmtree(folder)

    _insist(remove, folder)


def _insist(remove: Callable[[], object], folder: str | Path) -> None:
    for _ in range(_TRIES):
        with suppress(OSError):
            remove()
            return
        time.sleep(_PAUSE)
    shutil.rmtree(folder, ignore_errors=True)


def inherit(folder: Path) -> None:
    """Keep a folder that a process has left as long as this one lives, where it is a folder of ours."""
    if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(PREFIX):
        with suppress(OSError):
            _locked(folder / _LOCK)  # never closed


def remove_left() -> None:
    """Remove the temporary folders of this user's processes that are gone."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as found:
        for entry in found:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # it is in use, another user's, or gone
                    _remove(entry)


def _remove(folder: os.DirEntry[str]) -> None:
    if folder.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    descriptor = _locked(Path(folder.path) / _LOCK)
    try:
        shutil.rmtree(folder.path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _locked(path: Path, how: int = 0) -> int:
    """Open a file of this user's and lock it. Raises OSError where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | how, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
