"""Files that survive a crash, and files of others: only regular files are opened, and none is read without a bound."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from platformdirs import user_cache_path

from daskcnn.errors import DataError

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
REGULAR = "give a regular file"
SEEN = "check the path and its permissions"
"""The remedy where the system does not let a path be looked at."""


def local_path(path: str | Path) -> Path:
    """Return the path with `~` replaced by a home directory. The name of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def check_regular(path: str | Path) -> int:
    """Return the size of a regular file in bytes; symbolic links are followed. The file is not opened.

    Raises DataError for a pipe, a device or a socket: opening one may wait for ever, and reading one may never end.
    Raises OSError for a file that is not there, and for a folder.
    """
    return _checked(os.stat(path), path)


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file to read. It never waits. Raises DataError and OSError as `check_regular`."""
    check_regular(path)  # first: opening a device may do something already
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _checked(os.fstat(descriptor), path)  # what was opened may be another file by now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int, *, remedy: str = REGULAR) -> bytes:
    """Return a regular file's content. Raises as `check_regular`, and DataError for more than `limit` bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) <= limit:
            content = file.read(size + 1)
            if len(content) > size:  # it has grown meanwhile, or is a file of /proc, which has no size
                content += file.read(limit + 1 - len(content))
            if (size := len(content)) <= limit:
                return content
    raise DataError(path, f"{size:,} bytes, more than the {limit:,} allowed", remedy)


def _checked(found: os.stat_result, path: str | Path) -> int:
    if stat.S_ISREG(found.st_mode):
        return found.st_size
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise DataError(path, f"{_KINDS.get(stat.S_IFMT(found.st_mode), 'a special file')}, not a regular file", REGULAR)


def output_file(path: str | Path, remedy: str = "give a file that may be written") -> Path:
    """Return the place of a file to write under a path that a user gives: that of its target, where it is a link.

    Raises DataError where no file can be: at a folder, a pipe, a device or a socket, and where there is no folder.
    """
    place = Path(os.path.realpath(path))
    try:
        check_regular(place)
    except DataError as error:
        raise DataError(path, error.reason, remedy) from error
    except OSError as error:
        if not isinstance(error, FileNotFoundError) or not place.parent.is_dir():
            raise DataError(path, error.strerror or error, remedy) from error
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise DataError(path, "it may not be written", remedy)
    return place


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder with all that is inside, at all depths, is on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def replace_file(path: Path, data: bytes) -> None:
    """Put a file in place of `path` in one step. Raises OSError; then, and after a crash, the old file stays.

    Two writers at a time need a lock: they share the name of the temporary file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def cache_folder() -> Path:
    """Return the folder of what can be made again: compiled loops, measured times, indexes of arrays.

    It is $DASKCNN_CACHE_DIR if that is given. Otherwise it is the first of these that can be written: the system's
    place for caches ($XDG_CACHE_HOME), `~/.cache`, and a folder of the user's own among the temporary files. Where
    there is none, it is one that cannot be written.
    """
    if own := os.environ.get("DASKCNN_CACHE_DIR"):
        return local_path(own)
    places = list[Path]()
    with suppress(RuntimeError):  # a user without a home, as in some containers
        places.append(user_cache_path("daskcnn", appauthor=False))
        places.append(Path.home() / ".cache" / "daskcnn")
    temporary = Path(tempfile.gettempdir()) / f"daskcnn-{os.getuid()}"
    found = next(filter(_may_be_written, places), None) or (temporary if _is_private(temporary) else None)
    return found or next(iter(places), temporary)


def _may_be_written(folder: Path) -> bool:
    """Return True if the folder can be written, or made. Nothing is made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _is_private(folder: Path) -> bool:
    """Make the folder if it is not there. Return True if it is this user's and no other may write in it.

    Anybody can make a folder of this name, and compiled loops are run as they are read.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
