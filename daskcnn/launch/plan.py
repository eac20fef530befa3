"""What more workers would bring: what `daskcnn plan` calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from daskcnn.arrays import DeviceKind
from daskcnn.errors import JobError
from daskcnn.launch.simulate import Scenario, simulate
from daskcnn.show.report_tables import Report
from daskcnn.show.text import aligned, duration, percent, size
from daskcnn.sim.cluster import Cluster, ClusterFileError, Worker, kinds

PAYS = 0.05
"""A worker pays as long as it shortens an epoch by this part of it or more."""
FURTHER = 32
"""So many workers more than asked for are tried, to see where another one stops paying."""


@dataclass(frozen=True)
class Row:
    """A cluster: how many workers, the last one added, and what an epoch on it takes.

    gain: the part by which the epoch is shorter than without the last one; speedup: against the cluster as it is.
    communication, wait: parts of the workers' time. up_and_down: bytes an epoch.
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
        return self.gain is None or self.gain >= PAYS


@dataclass(frozen=True)
class Verdict:
    """Of one kind. stops: the first of its workers that does not pay; None where there is none as far as was tried.

    further: how many more than asked for would pay; None where none were tried.
    """

    kind: str
    stops: Row | None
    further: int | None = None


@dataclass(frozen=True)
class Plan:
    """The cluster as it is and with every addition, and what each kind comes to."""

    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "pays": PAYS}


def plan(chosen: Scenario, additions: Mapping[str, int], *, seed: int = 0) -> Plan:
    """Add the workers of each kind, one at a time; of the last kind more, until another one does not pay.

    Raises ClusterFileError for a kind that has no pattern, JobError where nothing is added.
    """
    patterns: Mapping[Any, Worker] = kinds(chosen.cluster)
    check_additions(additions, patterns, chosen.source)
    asked = [kind for kind, number in additions.items() for _ in range(number)]
    steps = _rows(chosen, [patterns[kind] for kind in [*asked, *asked[-1:] * FURTHER]], seed)
    rows = [next(steps) for _ in range(len(asked) + 1)]
    return Plan(
        tuple(rows), tuple(_verdict(kind, rows, steps if kind == asked[-1] else ()) for kind in dict.fromkeys(asked))
    )


def _verdict(kind: str, rows: Sequence[Row], more: Iterable[Row]) -> Verdict:
    """By the rows asked for, or by some more where all of them pay."""
    stops = next((row for row in rows if row.added == kind and not row.pays), None)
    if stops is not None or not more:
        return Verdict(kind, stops)
    further = 0
    for row in more:
        if not row.pays:
            return Verdict(kind, row, further)
        further += 1
    return Verdict(kind, None, further)


def check_additions(additions: Mapping[str, int], patterns: Mapping[str, Worker], source: str) -> None:
    """Raise ClusterFileError for kinds without a pattern, JobError where nothing is added."""
    if missing := [kind for kind in additions if kind not in patterns]:
        raise ClusterFileError([f"--add {kind}: {_remedy(kind, source)}" for kind in missing])
    if not any(additions.values()):
        raise JobError(["--add: adds no worker; write a kind and how many, for example gpu=1,cpu=4"])


def _remedy(kind: str, source: str) -> str:
    if kind not in get_args(DeviceKind):
        return f"there is no such kind of worker; write one of {', '.join(get_args(DeviceKind))}"
    return (
        f"{source} has no worker of this kind to go by; add a [[worker]] with kind = {kind!r}, count = 0 and its "
        "images_per_second to the cluster file (daskcnn simulate RUN --write-cluster FILE makes one of a run)"
    )


def _rows(chosen: Scenario, more: list[Worker], seed: int) -> Iterator[Row]:
    """The cluster as it is, then with one worker more each time."""
    cluster = chosen.cluster
    first = before = row = _row(chosen, cluster, "", seed)
    yield row
    for pattern in more:
        cluster = cluster.with_one_more(pattern)
        row = _row(chosen, cluster, pattern.kind, seed)
        row = replace(row, gain=1 - row.epoch / before.epoch, speedup=first.epoch / row.epoch)
        before = row
        yield row


def _row(chosen: Scenario, cluster: Cluster, added: str, seed: int) -> Row:
    report = simulate(replace(chosen, cluster=cluster), seed=seed).report
    epochs, workers = chosen.job.train.epochs, len(cluster.members())
    if chosen.sharded:
        step = chosen.sharding(cluster).step()
        communication = step.comm / step.seconds
        waited = max(0.0, 1 - communication - sum(step.busy) / workers / step.seconds)
    else:
        communication, waited = _shares(report)
    moved = report.traffic.up + report.traffic.down
    balance = report.balance.balance if report.balance else None
    return Row(workers, added, report.seconds / epochs, None, 1.0, communication, waited, balance, moved / epochs)


def _shares(report: Report) -> tuple[float, float]:
    """Communication and waiting as parts of the workers' time."""
    spent = report.seconds * len(report.workers)
    return (report.total.communication or 0.0) / spent, report.total.wait / spent


def readable_plan(found: Plan) -> str:
    """The table, and what it comes to."""
    head = ("workers", "added", "an epoch", "gain", "speed-up", "communication", "waiting", "balance", "bytes an epoch")
    table = aligned([head, *(_cells(row) for row in found.rows)], left=0)
    verdicts = aligned([(verdict.kind, _in_words(verdict)) for verdict in found.verdicts], left=2)
    return "\n".join([*table, "", *verdicts])


def _cells(row: Row) -> tuple[str, ...]:
    balance = "-" if row.balance is None else f"{row.balance:.3f}"
    return (
        str(row.workers),
        row.added or "-",
        duration(row.epoch) if row.epoch >= 10 else f"{row.epoch:.3g} s",
        percent(row.gain),
        f"{row.speedup:.2f}",
        percent(row.communication),
        percent(row.wait),
        balance,
        size(row.up_and_down),
    )


def _in_words(verdict: Verdict) -> str:
    stops, further = verdict.stops, verdict.further
    more = f"each one pays, and so would {further} more" if further else "each one pays"
    if stops is None:
        return more
    gained = f"{percent(stops.gain)} of an epoch, less than {percent(PAYS)}"
    if further is None:
        return f"does not pay from the {_ordinal(stops.workers)} worker on, which gains {gained}"
    return f"{more}; the {_ordinal(stops.workers)} worker would gain {gained}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
