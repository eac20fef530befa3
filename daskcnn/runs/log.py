"""The event log: one JSON object a line, appended while the run goes on."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from daskcnn.errors import DataError
from daskcnn.events import DamagedEvent, Event, parsed
from daskcnn.runs.files import dumps


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _sound_length(data: bytes) -> int:
    """Bytes up to the end of the last whole line: a writer that is killed leaves at most one torn behind it."""
    end = data.rfind(b"\n") + 1
    start = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return end if _parse(data[start:end]) is not None else start


def read_events(path: Path) -> list[Event]:
    """The events of a log, oldest first, but for kinds that this version does not know; a missing log is empty.

    Raises DataError naming the line that is damaged and what to do, or where the log cannot be read.
    """
    try:
        return list(parsed(read_records(path)))
    except DamagedEvent as error:
        raise DataError(f"{path}: {error.value}", error.reason, error.remedy) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every line of a log as its JSON object, oldest first; a torn last line is left out, a missing log is empty.

    Raises DataError where a line before the last is damaged, or the log cannot be read.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise DataError(path, error.strerror or error, "make it readable") from error
    events = []
    for number, line in enumerate(data[: _sound_length(data)].splitlines(), start=1):
        if (event := _parse(line)) is None:
            raise DataError(path, f"line {number} is no JSON object", "remove that line to read the rest")
        events.append(event)
    return events


class EventLog:
    """Appends events to a file; opening it cuts off a last line that a killed writer left torn."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - kept open; unbuffered, so a failed write is not retried
        data = path.read_bytes()
        self._end = _sound_length(data)
        if self._end < len(data):
            self._file.truncate(self._end)

    def append(self, event: Event, at: datetime) -> None:
        """Write one event and its time, unless it has one. Raises OSError when it cannot; the log stays as it was."""
        record = {"event": event.kind, "at": at.isoformat(timespec="milliseconds"), **event.record()}
        line = (dumps(record) + "\n").encode()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:  # a signal's too: half a line would spoil the next one
            self._file.truncate(self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
