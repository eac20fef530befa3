"""Reads untrusted archives and gzip files in memory, with limits; nothing is written to disk.

Only the header parser of `tarfile` is used. Its reader takes in PAX headers and maps of sparse files whole, and makes
tables of them: an archive of 1.5 MB took 2.7 GB. Such headers are passed over here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from daskcnn.errors import DataError
from daskcnn.files import check_regular, open_regular

_BLOCK = 1 << 20
_HEADERS = 1 << 20  # room for headers and padding beyond the members themselves
_MOST_HEADERS = 1000
_PASSED_OVER = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class _TooMuch(Exception):
    """A compressed file holds more than it may."""


class _Bounded(io.RawIOBase):
    """A stream that raises `_TooMuch` instead of yielding more than `limit` bytes, whatever a header promises."""

    def __init__(self, stream: gzip.GzipFile, limit: int, on_read: Callable[[], None] = lambda: None) -> None:
        self._stream = stream
        self._left = limit
        self._on_read = on_read

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(_BLOCK, size) if size >= 0 else _BLOCK)
        self._left -= len(data)
        if self._left < 0:
            raise _TooMuch
        self._on_read()
        return data


def read_tar_gz(
    path: Path, folder: str, expected: Mapping[str, int], progress: Callable[[int, int], None]
) -> dict[str, bytes]:
    """Return the files of a .tar.gz that holds `folder` and, in it, some of `expected` (file name → most bytes).

    Every header is checked before its content is read. If the archive is refused, what was read before is dropped.

    Raises
    ------
    DataError : for a link, a device, an absolute name or one with `..`; for a member that is not expected, comes
        twice or is too large; for an archive that is damaged or unpacks to more than it should
    """
    limit = sum(expected.values()) + _HEADERS
    total = file_size(path)
    found: dict[str, bytes] = {}
    try:
        with open_regular(path) as raw, gzip.open(raw) as unpacked:
            stream = _Bounded(unpacked, limit, lambda: progress(raw.tell(), total))
            for member in _members(stream):
                name = _checked_name(path, member, folder, expected, found)
                if name is not None:
                    found[name] = _exactly(stream, member.size)
                    _exactly(stream, -member.size % tarfile.BLOCKSIZE)
            while stream.read():  # to its end, where the checksum stands
                pass
    except _TooMuch:
        raise DataError(path, f"unpacks to more than {limit} bytes", "not the archive it should be") from None
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
        raise DataError(path, f"damaged or not a .tar.gz ({error})", "get it again") from error
    return found


def _members(stream: _Bounded) -> Iterator[tarfile.TarInfo]:
    """Yield the header of every member. The caller reads the content, up to a whole block, before the next.

    PAX headers are passed over: no name here is so long, and no file so large, that it needs one.
    """
    for number in range(_MOST_HEADERS):
        head = _at_most(stream, tarfile.BLOCKSIZE)
        if number and (not head or head.count(0) == tarfile.BLOCKSIZE):
            return
        member = tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
        if member.type in _PASSED_OVER:
            _skip(stream, -(-max(member.size, 0) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
        else:
            yield member
    raise tarfile.ReadError(f"more than {_MOST_HEADERS} headers")


def _at_most(stream: _Bounded, size: int) -> bytes:
    """Return `size` bytes, or all that are left where they are fewer."""
    content = bytearray()
    while len(content) < size and (piece := stream.read(size - len(content))):
        content += piece
    return bytes(content)


def _exactly(stream: _Bounded, size: int) -> bytes:
    content = _at_most(stream, size)
    if len(content) < size:
        raise EOFError(f"{len(content)} of {size} bytes, then it ends")
    return content


def _skip(stream: _Bounded, size: int) -> None:
    while size:
        if not (piece := stream.read(size)):
            raise EOFError("it ends in a header")
        size -= len(piece)


def _checked_name(
    path: Path, member: tarfile.TarInfo, folder: str, expected: Mapping[str, int], found: Mapping[str, bytes]
) -> str | None:
    """Return the member's file name, None for the folder itself.

    Raises DataError for a member that must not be there.
    """
    reason = _refusal(member, folder, expected, found)
    if reason is not None:
        raise DataError(path, f"member {member.name!r:.120} {reason}", "refused, nothing was unpacked")
    return None if member.isdir() else PurePosixPath(member.name).name


def _refusal(
    member: tarfile.TarInfo, folder: str, expected: Mapping[str, int], found: Mapping[str, bytes]
) -> str | None:
    parts = PurePosixPath(member.name).parts
    if member.name.startswith(("/", "\\")) or ".." in parts:
        return "has a name that leads out of the archive"
    if member.issym() or member.islnk():
        return f"is a link to {member.linkname!r:.120}"
    if member.isdir() and parts == (folder,):
        return None
    if not member.isfile() or member.issparse():
        return "is not a plain file"
    if len(parts) != 2 or parts[0] != folder or parts[1] not in expected:
        return f"is not expected: only {folder}/ with {', '.join(expected)}"
    if parts[1] in found:
        return "comes twice"
    if not 0 <= member.size <= expected[parts[1]]:
        return f"has {member.size} bytes, at most {expected[parts[1]]} are expected"
    return None


def read_gzip_or_plain(path: Path, limit: int) -> bytes:
    """Return a file's content, unpacked if it is gzip.

    Raises DataError if it is damaged or longer than `limit` bytes.
    """
    try:
        with open_regular(path) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            content = gzip.GzipFile(fileobj=raw).read(limit + 1) if packed else raw.read(limit + 1)
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(path, f"cannot be read ({error})", "get it again") from error
    if len(content) > limit:
        raise DataError(path, f"holds more than {limit} bytes", "not the file it should be")
    return content


def file_size(path: Path) -> int:
    """Return a file's size in bytes. Raises DataError if there is no such file, or it is no regular one."""
    try:
        return check_regular(path)
    except OSError as error:
        raise DataError(path, error.strerror, "check the path given as --archive") from error


def check_size(path: Path, limit: int) -> None:
    """Raise DataError for a file that is longer than `limit` bytes, before it is read."""
    if (size := file_size(path)) > limit:
        raise DataError(path, f"{size:,} bytes, more than the {limit:,} allowed", "not the file it should be")


def file_sha256(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Return a file's SHA-256, read in pieces. Raises DataError if it cannot be read."""
    digest, done, total = hashlib.sha256(), 0, file_size(path)
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                progress(done, total)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", "check the path and its permissions") from error
    return digest.hexdigest()
