"""The event log: one JSON object a line, appended while the run goes on."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from daskcnn.documents import Bounds, dumps, parse_json
from daskcnn.errors import DataError
from daskcnn.events import DamagedEvent, Event, parsed
from daskcnn.files import check_regular, open_regular

LINE = Bounds(size=16 << 20, values=100_000, tables=20_000)
"""Bounds of a line: an event with twenty fields of each of thousands of workers."""


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line's object; None if it is none, or larger than any event."""
    try:
        event = parse_json(line, "line", remedy="", bounds=LINE)
    except DataError:
        return None
    return event if isinstance(event, dict) else None


def _sound_length(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line: a writer that is killed leaves at most one torn behind it."""
    size = file.seek(0, os.SEEK_END)
    first = file.seek(max(0, size - 2 * LINE.size))
    tail = file.read(size - first)
    end = tail.rfind(b"\n") + 1
    start = tail.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return first + (end if _parse(tail[start:end]) is not None else start)


def read_events(path: Path) -> list[Event]:
    """Return the events of a log, oldest first, without kinds that this version does not know; [] if it is missing.

    Raises DataError naming a damaged line, or if the log cannot be read.
    """
    try:
        with open_regular(path) if path.exists() else io.BytesIO() as file:
            return events_in(file, path)
    except OSError as error:
        raise DataError(path, error.strerror or error, "make it readable") from error


def followed(path: Path, more: Callable[[], bool]) -> Iterator[Event]:
    """Yield the events of a log as they are written, oldest first, until no more will come.

    more: waits for a moment once all was read; returns False if no more will come. Raises DataError as `read_events`,
    and if the log is missing.
    """
    may_come, number = True, 0
    try:
        with open_regular(path) as file:
            while True:
                line = file.readline(LINE.size + 1)
                if line.endswith(b"\n"):
                    number += 1
                    yield from events_in(io.BytesIO(line), path, number)
                    continue
                file.seek(-len(line), os.SEEK_CUR)
                if not may_come:
                    return
                may_come = more()
    except OSError as error:
        raise DataError(path, error.strerror or error, "give a run directory, or an event log") from error


def events_in(file: BinaryIO, path: Path, first: int = 1) -> list[Event]:
    """Return the events of an open log, as `read_events` does. first: number of the first line."""
    try:
        return list(parsed(_records(file, path, first), first))
    except DamagedEvent as error:
        raise DataError(f"{path}: {error.value}", error.reason, error.remedy) from error


def _records(file: BinaryIO, path: Path, first: int = 1) -> Iterator[dict[str, Any]]:
    """The log's objects, one in memory at a time. A last line that is torn is left out. first: number of the first."""
    end = _sound_length(file)
    at, number = file.seek(0), first - 1
    while at < end:
        line = file.readline(LINE.size + 1)
        at, number = at + len(line), number + 1
        if (record := _parse(line)) is None:
            raise DataError(path, f"line {number} is no JSON object", "remove that line to read the rest")
        yield record


class EventLog:
    """Appends events to a file; opening it cuts off a last line that a killed writer left torn.

    Events that cannot be written stay in memory, and go to the file before the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with suppress(FileNotFoundError):
            check_regular(path)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - kept open; unbuffered: a failed write is retried here
        self._waiting: deque[bytes] = deque()
        with open_regular(path) as written:
            self._end = _sound_length(written)
        self._file.truncate(self._end)

    def append(self, event: Event, at: datetime) -> None:
        """Write one event and its time, unless it has one. Raises OSError if it cannot, and keeps it in memory."""
        record = {"event": event.kind, "at": at.isoformat(timespec="milliseconds"), **event.record()}
        self._waiting.append((dumps(record) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Write the events that could not be written before. Raises OSError if they still cannot."""
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting.popleft()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:  # a signal's too: half a line would spoil the next one
            self._file.truncate(self._end)
            raise
        self._end += len(line)

    @property
    def in_place(self) -> bool:
        """True if the file is still the one at its path: it may have been removed, or its disk unmounted."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def content(self) -> bytes:
        """Return all that can be read of the log, also of a removed one, with the events that wait."""
        written = bytearray()
        with suppress(OSError):
            while piece := os.pread(self._file.fileno(), self._end - len(written), len(written)):
                written += piece
        return bytes(written) + b"".join(self._waiting)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
