"""The course of a run, from the end of its log and the names of its checkpoints: cheap however long it is."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daskcnn.errors import DataError
from daskcnn.files import open_regular

_TAIL = 1 << 20
_EPOCH = b'"event": "epoch"'


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Epochs trained, epochs in all (None: not known), and the accuracy on the validation samples."""

    epoch: float = 0.0
    epochs: float | None = None
    accuracy: float | None = None


def progress_of(run: Path) -> RunProgress:
    """Return the course of a run so far. One that cannot be read has not begun."""
    with suppress(OSError, ValueError, DataError), open_regular(run / "events.jsonl") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
        for line in reversed(log.read(_TAIL).splitlines()):
            if _EPOCH in line[:40] and (found := _read(line)) is not None:
                return found
    return RunProgress()


def _read(line: bytes) -> RunProgress | None:
    try:
        record: dict[str, Any] = json.loads(line)
        validation = record.get("validation") or {}
        return RunProgress(float(record["epoch"]), record.get("epochs"), validation.get("accuracy"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def newest_step(run: Path) -> int:
    """Return the step of the run's newest checkpoint; -1 without one."""
    with suppress(OSError):
        names = [name.removeprefix("step-") for name in os.listdir(run / "checkpoints")]
        return max((int(name) for name in names if name.isdecimal()), default=-1)
    return -1


def is_done(run: Path) -> bool:
    """Return True if the run's summary says that it has trained to its end."""
    with suppress(OSError, DataError, ValueError), open_regular(run / "summary.json") as file:
        return json.loads(file.read(_TAIL)).get("status") in ("done", "stopped")
    return False
