"""A queue that is yet to be: jobs with the times at which they come, from a TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from daskcnn.batch.records import Count, QueuedJob
from daskcnn.batch.shares import SharingRules
from daskcnn.documents import reason_of
from daskcnn.errors import JobError, nearest
from daskcnn.job.options import Options
from daskcnn.job.resolve import read_job_file

_USUAL = SharingRules()
_MOST = 1000  # jobs


class QueueFileError(JobError):
    """The queue file is wrong: all problems, one a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(problems)
        self.args = (self.args[0].replace("the job has", "the queue file has", 1),)


class SharingTable(Options):
    """`[sharing]`: the numbers of `SharingRules`, in seconds and parts of 1."""

    half_life: float = Field(default=_USUAL.half_life, gt=0)
    ahead: float = Field(default=_USUAL.ahead, ge=0)
    aged: float = Field(default=_USUAL.aged, gt=0)
    pays: float = Field(default=_USUAL.pays, gt=0, lt=1)
    moves: float = Field(default=_USUAL.moves, ge=1)
    elastic: bool = _USUAL.elastic


class ComingJob(Options):
    """`[[job]]`: `count` jobs alike, the first at `at` seconds, each later one `every` seconds after the one before.

    file: the job file, from the folder of the queue file. set: keys of the job, as `--set` has them. workers: such as
    cpu=2 or cpu=2..4, in place of those in the job file. after: names of jobs that end before it begins.
    """

    file: str
    name: str | None = Field(default=None, min_length=1)
    user: str = Field(default="you", min_length=1)
    at: float = Field(default=0.0, ge=0)
    count: int = Field(default=1, ge=1, le=_MOST)
    every: float = Field(default=0.0, ge=0)
    workers: str | None = None
    only: tuple[str, ...] = Field(default=(), strict=False)
    priority: int = 0
    after: tuple[str, ...] = Field(default=(), strict=False)
    set: tuple[str, ...] = Field(default=(), strict=False)

    @property
    def title(self) -> str:
        """The name, by default that of the file."""
        return self.name or Path(self.file).stem


class QueueFile(Options):
    """The content of a queue file."""

    sharing: SharingTable = SharingTable()
    job: list[ComingJob] = Field(min_length=1)


@dataclass(frozen=True)
class ComingQueue:
    """The jobs of a queue file by number, each with what the file says of it, and the rules of sharing."""

    jobs: tuple[QueuedJob, ...]
    entries: Mapping[int, ComingJob]
    rules: SharingRules


def counts_of(text: str) -> dict[str, Count]:
    """Return numbers of workers by kind, from `cpu=2,gpu=1` or ranges, `cpu=2..4` or `cpu=2..`. Raises ValueError."""
    found = dict[str, Count]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(cpu|gpu)\s*=\s*(\d{1,9})(\.\.(\d{1,9})?)?\s*", part)
        if match is None:
            raise ValueError(f"{text!r:.80}: write cpu=2, gpu=1, cpu=2..4 or several of them with commas between")
        least, most = int(match[2]), int(match[4]) if match[4] else None if match[3] else int(match[2])
        if most is not None and most < max(1, least):
            raise ValueError(f"{text!r:.80}: write a least that is no more than the most, and a most of 1 or more")
        found[match[1]] = Count(least, most)
    return found


def read_queue(path: str | Path) -> ComingQueue:
    """Read the queue of a TOML file. Raises QueueFileError with all problems."""
    try:
        raw = read_job_file(path, what="a queue file")
    except JobError as error:
        raise QueueFileError(error.problems) from error
    try:
        found = QueueFile.model_validate(raw)
    except ValidationError as error:
        raise QueueFileError([_problem(item) for item in error.errors()]) from error
    if problems := [*_problems(found.job)]:
        raise QueueFileError(problems)
    jobs, entries = _numbered(found.job)
    return ComingQueue(jobs, entries, SharingRules(**found.sharing.model_dump()))


def _problem(item: Any) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).removeprefix(".")
    if item["type"] == "extra_forbidden":
        section, *inside = (str(part) for part in item["loc"])
        tables: dict[str, type[Options]] = {"sharing": SharingTable, "job": ComingJob}
        known = tables[section] if inside else QueueFile
        return f"{key}: unknown {'key' if inside else 'section'}{nearest(item['loc'][-1], known.model_fields)}"
    if item["type"] == "missing":
        return f"{key}: is missing; a queue file has [[job]] tables, each with a file"
    return f"{key} = {item['input']!r:.80}: {reason_of(item)}"


def _problems(entries: Sequence[ComingJob]) -> Iterator[str]:
    """Yield what is wrong with the jobs together."""
    titles = [entry.title for entry in entries]
    if (many := sum(entry.count for entry in entries)) > _MOST:
        yield f"job: {many:,} jobs; at most {_MOST:,} are played"
    for i, entry in enumerate(entries):
        if titles.index(entry.title) < i:
            yield f"job[{i}].name = {entry.title!r}: another job has it; give each a name of its own"
        for other in entry.after:
            if other not in titles[:i]:
                yield f"job[{i}].after = {other!r}: no job before it has this name{nearest(other, titles[:i])}"
        try:
            counts_of(entry.workers or "cpu=1")
        except ValueError as error:
            yield f"job[{i}].workers: {error}"


def _numbered(entries: Sequence[ComingJob]) -> tuple[tuple[QueuedJob, ...], dict[int, ComingJob]]:
    """The jobs, numbered in the order in which they come: none before those that it comes after."""
    last, coming = dict[str, float](), list[tuple[float, int, int]]()
    for i, entry in enumerate(entries):
        begin = max([entry.at, *(last[name] for name in entry.after)])
        coming += [(begin + n * entry.every, i, n) for n in range(entry.count)]
        last[entry.title] = coming[-1][0]
    coming.sort()
    ids = dict[str, tuple[int, ...]]()
    for id_, (_, i, _) in enumerate(coming, 1):
        title = entries[i].title
        ids[title] = (*ids.get(title, ()), id_)
    jobs = tuple(
        QueuedJob(
            id=id_,
            user=entry.user,
            submitted=at,
            name=f"{entry.title}-{n + 1}" if entry.count > 1 else entry.title,
            priority=entry.priority,
            after=tuple(other for name in entry.after for other in ids[name]),
            workers=counts_of(entry.workers) if entry.workers else {},
            only=entry.only,
        )
        for id_, (at, i, n) in enumerate(coming, 1)
        for entry in (entries[i],)
    )
    return jobs, {id_: entries[i] for id_, (_, i, _) in enumerate(coming, 1)}
