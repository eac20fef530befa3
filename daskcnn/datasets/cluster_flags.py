"""The cluster of commands that have no job."""

from __future__ import annotations

from collections.abc import Mapping

from daskcnn.job.resolve import parse_job
from daskcnn.job.sources import parse_value
from daskcnn.job.tables import Cluster


def cluster_of(flags: Mapping[str, str | None]) -> Cluster | None:
    """Return what flags say as the table `[cluster]` of a job; None where none is given. Raises JobError.

    flags: `scheduler`, `scheduler_file`, `workers` and `wait`, as they were written.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    numbers = {key: parse_value(value) for key, value in given.items() if key == "wait"}
    return parse_job({"cluster": {**given, **numbers}}).cluster if given else None
