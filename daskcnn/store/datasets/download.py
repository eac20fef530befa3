"""Downloads one known file: with progress, continuing an earlier try, verified before it gets its name."""

from __future__ import annotations

import fcntl
import http.client
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from daskcnn.errors import DataError
from daskcnn.files import check_regular
from daskcnn.store.datasets.archive import file_sha256

_BLOCK = 1 << 18
_TIMEOUT = 30.0

OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class Download:
    """A file whose address, size in bytes and SHA-256 are known."""

    url: str
    size: int
    sha256: str

    def fetch(self, folder: Path, progress: OnBytes) -> Path:
        """Return the file in this folder, downloaded if it is not there yet. `progress(done, total)` counts bytes.

        Raises DataError if the network fails (the bytes so far are kept in a `.part` file) or the bytes are wrong.
        """
        target = folder / Path(urlsplit(self.url).path).name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                self._download(target, progress)
        except OSError as error:
            raise DataError(
                target, f"cannot be written ({error.strerror or error})", "choose another folder"
            ) from error
        found = file_sha256(target)
        if found != self.sha256:
            raise DataError(
                target,
                f"SHA-256 {found} instead of {self.sha256}",
                "remove it to download it again, or give it as --archive to use it as it is",
            )
        return target

    def _download(self, target: Path, progress: OnBytes) -> None:
        part = target.with_name(target.name + ".part")
        with _locked(part) as file:
            self._receive(file, part, progress)
            found = file_sha256(part)
            if found != self.sha256:
                part.unlink()
                raise DataError(
                    self.url, f"what came has SHA-256 {found} instead of {self.sha256}", "dropped, try again"
                )
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
                if have and not _continues(response, have):
                    have = file.truncate(0)
                have = self._copy(response, file, have, progress)
        except (URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._interrupted(file, part, error) from error
        if have != self.size:
            raise self._interrupted(file, part, "the server closed the connection")

    def _open(self, have: int) -> Any:
        headers = {"User-Agent": "daskcnn", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            return urlopen(Request(self.url, headers=headers), timeout=_TIMEOUT)
        except HTTPError as error:
            error.close()
            raise DataError(
                self.url,
                f"the server answered {error.code} {error.reason}",
                "download it by other means and give --archive",
            ) from None

    def _copy(self, response: Any, file: IO[bytes], have: int, progress: OnBytes) -> int:
        progress(have, self.size)
        while block := response.read(_BLOCK):
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
        return DataError(
            self.url,
            f"stopped after {file.tell()} of {self.size} bytes ({reason})",
            f"the same command goes on from {part}, or give --archive",
        )


def _continues(response: Any, have: int) -> bool:
    """Return whether the answer is the rest of the file rather than all of it."""
    return response.status == 206 and str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """Open the `.part` file for appending, exclusively. Raises DataError while another process writes to it.

    The lock lies on the data themselves, not on a lock file of filelock's: it goes with them when they are renamed, so
    that one who waited sees that they are finished, and nothing is left beside the archive.
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
