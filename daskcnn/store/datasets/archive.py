"""Publishers' archives: downloaded, continuing an earlier try, and read in memory with limits, as they are untrusted.

Only the header parser of `tarfile` is used. Its reader takes in PAX headers and maps of sparse files whole, and makes
tables of them: an archive of 1.5 MB took 2.7 GB. Such headers are passed over here.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

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

    Every header is checked before its content is read. Raises DataError for a link, a device, an absolute name or one
    with `..`; for a member that is not expected, comes twice or is too large; for an archive that is damaged or unpacks
    to more than it should.
    """
    limit = sum(expected.values()) + _HEADERS
    total = file_size(path)
    found: dict[str, bytes] = {}
    try:
        with open_regular(path) as raw, gzip.open(raw) as unpacked:
            stream = _Bounded(unpacked, limit, lambda: progress(raw.tell(), total))
            for member in _members(stream):
                if reason := _refusal(member, folder, expected, found):
                    raise DataError(path, f"member {member.name!r:.120} {reason}", "refused, nothing was unpacked")
                if not member.isdir():
                    found[PurePosixPath(member.name).name] = _exactly(stream, member.size)
                    _exactly(stream, -member.size % tarfile.BLOCKSIZE)
            while stream.read():  # to its end, where the checksum stands
                pass
    except _TooMuch:
        raise DataError(path, f"unpacks to more than {limit} bytes", "not the archive it should be") from None
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
        raise DataError(path, f"damaged or not a .tar.gz ({error})", "get it again") from error
    return found


def _members(stream: _Bounded) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of members, not PAX ones. The caller reads each content, up to a whole block, first."""
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
    """Return a file's content, unpacked if it is gzip. Raises DataError if it is damaged or longer than the limit."""
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


_DOWNLOAD_BLOCK = 1 << 18
_TIMEOUT = 30.0
OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class Download:
    """A file whose address, size in bytes and SHA-256 are known."""

    url: str
    size: int
    sha256: str

    def target(self, folder: Path) -> Path:
        """Return the file's place in a folder."""
        return folder / Path(urlsplit(self.url).path).name

    def fetch(self, folder: Path, progress: OnBytes) -> Path:
        """Return the file in this folder, downloaded if it is not there yet. `progress(done, total)` counts bytes.

        Raises DataError if the network fails (the bytes so far are kept in a `.part` file) or the bytes are wrong.
        """
        target = self.target(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                self._download(target, progress)
        except OSError as error:
            reason = f"cannot be written ({error.strerror or error})"
            raise DataError(target, reason, "choose another folder") from error
        if (found := file_sha256(target)) != self.sha256:
            remedy = "remove it to download it again, or give it as --archive to use it as it is"
            raise DataError(target, f"SHA-256 {found} instead of {self.sha256}", remedy)
        return target

    def _download(self, target: Path, progress: OnBytes) -> None:
        part = target.with_name(target.name + ".part")
        with _locked(part) as file:
            self._receive(file, part, progress)
            if (found := file_sha256(part)) != self.sha256:
                part.unlink()
                reason = f"what came has SHA-256 {found} instead of {self.sha256}"
                raise DataError(self.url, reason, "dropped, try again")
            os.fsync(file.fileno())
            part.rename(target)

    def _receive(self, file: IO[bytes], part: Path, progress: OnBytes) -> None:
        have = file.seek(0, os.SEEK_END)
        if have > self.size:
            have = file.truncate(0)
        if have == self.size:
            return
        try:
            with self._open(have) as response:
                there = str(response.headers.get("Content-Range", ""))
                if have and not (response.status == 206 and there.startswith(f"bytes {have}-")):  # all of the file
                    have = file.truncate(0)
                have = self._copy(response, file, have, progress)
        except (URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._interrupted(file, part, error) from error
        if have != self.size:
            raise self._interrupted(file, part, "the server closed the connection")

    def _open(self, have: int) -> Any:
        headers = {"User-Agent": "daskcnn", "Accept-Encoding": "identity"}
        rest = {"Range": f"bytes={have}-"} if have else {}
        try:
            return urlopen(Request(self.url, headers={**headers, **rest}), timeout=_TIMEOUT)
        except HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            raise DataError(self.url, reason, "download it by other means and give --archive") from None

    def _copy(self, response: Any, file: IO[bytes], have: int, progress: OnBytes) -> int:
        progress(have, self.size)
        while block := response.read(_DOWNLOAD_BLOCK):
            have += len(block)
            if have > self.size:
                file.truncate(0)
                raise DataError(self.url, f"the server sends more than {self.size} bytes", "not the file it should be")
            file.write(block)
            progress(have, self.size)
        file.flush()
        return have

    def _interrupted(self, file: IO[bytes], part: Path, reason: object) -> DataError:
        file.flush()
        stopped = f"stopped after {file.tell()} of {self.size} bytes ({reason})"
        return DataError(self.url, stopped, f"the same command goes on from {part}, or give --archive")


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """Open the `.part` file for appending, exclusively. Raises DataError while another process writes to it.

    The lock lies on the data themselves and goes with them when they are renamed, so that one who waited sees that they
    are finished, and nothing is left beside the archive.
    """
    with suppress(FileNotFoundError):
        check_regular(part)
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = part.exists() and part.stat().st_ino == os.fstat(file.fileno()).st_ino
        except BlockingIOError:
            ours = False
        if not ours:  # a finished file was renamed between open and lock, or the lock is taken
            raise DataError(part, "another process is downloading it", "wait for it, then run the same command again")
        yield file
