"""Folders that go with their process: after a kill, the next process that makes one in the same place removes them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        if (descriptor := _held(Path(self.name))) is not None:
            weakref.finalize(self, os.close, descriptor)

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


@contextmanager
def hidden_beside(target: Path, kind: str) -> Iterator[Path]:
    """Make a hidden folder beside a path for as long as the context lasts, and the path's parents.

    Folders of killed processes of this machine beside the same path are removed first. The folder may be moved away:
    `let_go` comes before. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.\w+")
    _remove_held_by_none(target.parent, lambda name: pattern.fullmatch(name) is not None)
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.{kind}"
    folder.mkdir()
    descriptor = _held(folder)
    try:
        yield folder
    finally:
        if descriptor is not None:
            os.close(descriptor)  # first: NFS keeps the name of an open file
        remove_folder(folder)


def let_go(folder: Path) -> None:
    """Take away what says that this process uses a folder. Raises OSError."""
    (folder / _LOCK).unlink(missing_ok=True)


def inherit(folder: Path) -> None:
    """Keep a folder that a process has left as long as this one lives, where it is a folder of ours."""
    if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith(PREFIX):
        with suppress(OSError):
            _locked(folder / _LOCK)  # never closed


def remove_left() -> None:
    """Remove the temporary folders of this user's processes that are gone."""
    _remove_held_by_none(Path(tempfile.gettempdir()), lambda name: name.startswith(PREFIX))


def _remove_held_by_none(parent: Path, ours: Callable[[str], bool]) -> None:
    with suppress(OSError), os.scandir(parent) as found:
        for entry in found:
            if ours(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # it is in use, another user's, or gone
                    _remove(entry)


def _remove(folder: os.DirEntry[str]) -> None:
    if folder.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    descriptor = _locked(Path(folder.path) / _LOCK)
    try:
        if os.read(descriptor, 1000) in (b"", _machine()):
            shutil.rmtree(folder.path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _held(folder: Path) -> int | None:
    """Say that this process uses a folder. Return the descriptor, which holds the lock until it is closed.

    None on a disk without locks, or a full one: the folder is removed by its own process alone.
    """
    new = folder / f"{_LOCK}.new"
    with suppress(OSError):
        descriptor = _locked(new, os.O_CREAT)
        try:
            os.write(descriptor, _machine())  # locks of a file system may not reach other machines
            os.rename(new, folder / _LOCK)  # with the lock on it
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
    return None


def _machine() -> bytes:
    return socket.gethostname().encode()


def _locked(path: Path, how: int = 0) -> int:
    """Open a file of this user's and lock it. Raises OSError where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | how, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
