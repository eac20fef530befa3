"""Runs that tools follow: real run directories, events of made-up runs, and a job on a cluster in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from distributed import Client

from daskcnn.events import Event, parsed
from daskcnn.followers import FollowedRun
from daskcnn.job.resolve import resolve
from daskcnn.launch.prepared_job import prepare_job
from tests.show.run_events import data_parallel
from tests.tiny_runs import random_state, tiny_job, tiny_run

AT = 1_795_000_000.0
END: dict[str, Any] = {"event": "end", "status": "done", "seconds": 9.0, "test": {"loss": 1.5, "accuracy": 0.5}}


def events(*log: dict[str, Any]) -> list[Event]:
    """The events of a log, a second after another."""
    return [event.logged(AT + i) for i, event in enumerate(parsed(log))]


def a_run() -> list[Event]:
    """A whole run of two workers."""
    return events(*data_parallel(), END)


@contextmanager
def followed(folder: Path, path: str, client: Client | None = None, **run: Any) -> Iterator[FollowedRun]:
    """A run directory with a checkpoint, in this folder. path: of its data set; run: keys of `[run]`."""
    raw = tiny_job(path, run={"dir": str(folder), **run})
    job = resolve(raw)
    kept = tiny_run(folder, raw, random_state(job), status="done")
    prepared = prepare_job(job, progress=lambda *_: None, warn=lambda _: None)
    yield FollowedRun(prepared.job, client or Mock(spec=Client), lambda: kept)
