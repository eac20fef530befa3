"""The gain of more workers: a table, its verdicts, and both in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from daskcnn.markup import as_lines
from daskcnn.show.text import aligned, duration, percent, size

PAYS = 0.05  # a worker pays if it shortens an epoch by this part or more


@dataclass(frozen=True)
class Row:
    """A cluster with its last worker added. gain: the part by which that shortens the epoch, in seconds.

    speedup: against the cluster as it is; communication, wait: parts of the workers' time; up_and_down: bytes an epoch.
    """

    workers: int
    added: str
    epoch: float
    gain: float | None
    speedup: float
    communication: float
    wait: float
    balance: float | None
    up_and_down: float

    @property
    def pays(self) -> bool:
        """True if the added worker pays."""
        return self.gain is None or self.gain >= PAYS


@dataclass(frozen=True)
class Verdict:
    """The verdict on one kind of worker. stops: the first that does not pay; None if all that were tried do.

    further: workers beyond those asked for that would pay, None if none were tried. reason: why it stops, if the step
    of a sharded network shows it.
    """

    kind: str
    stops: Row | None
    further: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class WorkerPlan:
    """The cluster as it is and with every addition, and the verdict on each kind."""

    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "pays": PAYS}

    def _repr_html_(self) -> str:
        return as_lines("What more workers would bring", format_worker_plan(self))


def format_worker_plan(found: WorkerPlan) -> str:
    """Return the table and the verdicts."""
    head = ("workers", "added", "an epoch", "gain", "speed-up", "communication", "waiting", "balance", "bytes an epoch")
    table = aligned([head, *(_cells(row) for row in found.rows)], left=0)
    verdicts = aligned([(verdict.kind, _in_words(verdict)) for verdict in found.verdicts], left=2)
    return "\n".join([*table, "", *verdicts])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.workers),
        row.added or "-",
        duration(row.epoch) if row.epoch >= 10 else f"{row.epoch:.3g} s",
        percent(row.gain),
        f"{row.speedup:.2f}",
        percent(row.communication),
        percent(row.wait),
        "-" if row.balance is None else f"{row.balance:.3f}",
        size(row.up_and_down),
    )


def _in_words(verdict: Verdict) -> str:
    stops, further = verdict.stops, verdict.further
    more = f"each one pays, and so would {further} more" if further else "each one pays"
    if stops is None:
        return more
    gained = f"{percent(stops.gain)} of an epoch, less than {percent(PAYS)}"
    gained += f": {verdict.reason}" if verdict.reason else ""
    if further is None:
        return f"does not pay from the {_ordinal(stops.workers)} worker on, which gains {gained}"
    return f"{more}; the {_ordinal(stops.workers)} worker would gain {gained}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
