"""The jobs of a queue as cells: of the command's table, and of the page in Dask's dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daskcnn.show.text import aligned, clean, percent

DESK = "daskcnn-queue"
"""The plugin of the scheduler that has the rows of the queue, where there is a service."""
QUEUE_COLUMNS = ("id", "user", "name", "state", "place", "epoch", "accuracy", "workers", "why")
_MOST = 8  # workers that are named


def row_of(job: Mapping[str, Any]) -> list[str]:
    """Return the cells of a job, as the service tells of it. place: in the queue; why: it waits, or has failed."""
    has = [*map(clean, job["has"])]
    workers = ", ".join(has[:_MOST]) + (f" and {len(has) - _MOST} more" if len(has) > _MOST else "") or _wanted(job)
    epoch = f"{job['epoch']:.4g}" + (f" of {job['epochs']:.4g}" if job["epochs"] else "") if job["epoch"] else "-"
    state = "cancelling" if job["state"] == "running" and job["cancelling"] else job["state"]
    cells = (job["id"], job["user"], job["name"], state, job["place"] or "-", epoch)
    return [*map(clean, cells), percent(job["accuracy"]), workers, clean(job["why"])]


def _wanted(job: Mapping[str, Any]) -> str:
    """Return the workers that a job asks for: '2 cpu', '2 to 4 cpu, 1 gpu'; 'any' where it gives no numbers."""
    if job["state"] in ("done", "failed", "cancelled"):
        return "-"
    return ", ".join(f"{_span(*count)} {clean(kind)}" for kind, count in job["workers"].items()) or "any"


def _span(least: int, most: int | None) -> str:
    return str(least) if least == most else f"{least} or more" if most is None else f"{least} to {most}"


def readable_jobs(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line a job, under a heading; the reason why it waits is the end of its line."""
    if not jobs:
        return "no jobs in the queue"
    cells = [QUEUE_COLUMNS, *map(row_of, jobs)]
    lines = aligned([row[:7] for row in cells], left=4)
    ends = ("  ".join(filter(None, row[7:])) for row in cells)
    return "\n".join(f"{line}  {end}".rstrip() for line, end in zip(lines, ends, strict=True))
