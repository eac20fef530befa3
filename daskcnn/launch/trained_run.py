"""A run that has trained: its job and one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from daskcnn.errors import DataError
from daskcnn.job.tables import Job
from daskcnn.launch.resume import kept_job
from daskcnn.runs.checkpoint import Checkpoint, best, latest
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import check_of

Which = Literal["last", "best"]
"""The checkpoint of the last epoch, or of the best validation accuracy."""


def load_trained(run: str, which: Which, say: Callable[[str], None]) -> tuple[Job, Checkpoint]:
    """A run's job and its last or best checkpoint. Raises DataError where there is none."""
    directory = RunDirectory.open(run)
    job = kept_job(directory)
    check = check_of(job)
    found = (best if which == "best" else latest)(directory.checkpoints, warn=say, check=check)
    found = found or latest(directory.checkpoints, warn=say, check=check)
    if found is None:
        raise DataError(run, "no checkpoint yet", "wait for the first epoch, or resume the run")
    return job, found
