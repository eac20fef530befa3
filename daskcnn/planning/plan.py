"""The gain of further workers by simulation: `daskcnn plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from daskcnn.arrays import DeviceKind
from daskcnn.errors import JobError
from daskcnn.planning.simulate import Scenario, simulate
from daskcnn.show.worker_plan import Row, Verdict, WorkerPlan
from daskcnn.sim.cluster import ClusterFileError, SimulatedCluster, Worker, kinds

FURTHER = 32
"""The most workers beyond those asked for that are tried, to see when another one stops paying."""


def plan(chosen: Scenario, additions: Mapping[str, int], *, seed: int = 0) -> WorkerPlan:
    """Add the workers of each kind, one at a time; of the last kind more, until another one does not pay.

    Raises ClusterFileError for a kind that has no pattern, JobError if nothing is added.
    """
    patterns: Mapping[Any, Worker] = kinds(chosen.cluster)
    check_additions(additions, patterns, chosen.source)
    asked = [kind for kind, number in additions.items() for _ in range(number)]
    steps = _rows(chosen, [patterns[kind] for kind in [*asked, *asked[-1:] * FURTHER]], seed)
    rows = [next(steps) for _ in range(len(asked) + 1)]
    verdicts = [_verdict(kind, rows, steps if kind == asked[-1] else ()) for kind in dict.fromkeys(asked)]
    return WorkerPlan(tuple(rows), tuple(_with_reason(chosen, verdict, asked, patterns) for verdict in verdicts))


def _with_reason(chosen: Scenario, verdict: Verdict, asked: Sequence[str], patterns: Mapping[Any, Worker]) -> Verdict:
    """Add the reason, for a sharded network, why the first worker that does not pay brings so little."""
    if verdict.stops is None or not chosen.sharded:
        return verdict
    cluster = chosen.cluster
    more = verdict.stops.workers - len(cluster.members())
    for kind in [*asked, *[asked[-1]] * more][:more]:
        cluster = cluster.with_one_more(patterns[kind])
    return replace(verdict, reason=chosen.sharding(cluster).why_no_shorter())


def _verdict(kind: str, rows: Sequence[Row], more: Iterable[Row]) -> Verdict:
    """The verdict by the rows asked for, or by further ones if all of them pay."""
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
    """Raise ClusterFileError for kinds without a pattern, JobError if nothing is added."""
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
    """Yield the row of the cluster as it is, then with one worker more each time."""
    cluster = chosen.cluster
    first = before = row = _row(chosen, cluster, "", seed)
    yield row
    for pattern in more:
        cluster = cluster.with_one_more(pattern)
        row = _row(chosen, cluster, pattern.kind, seed)
        before = row = replace(row, gain=1 - row.epoch / before.epoch, speedup=first.epoch / row.epoch)
        yield row


def _row(chosen: Scenario, cluster: SimulatedCluster, added: str, seed: int) -> Row:
    report = simulate(replace(chosen, cluster=cluster), seed=seed).report
    epochs, workers = chosen.job.train.epochs, len(cluster.members())
    if chosen.sharded:
        step = chosen.sharding(cluster).step()
        communication = step.comm / step.seconds
        waited = max(0.0, 1 - communication - sum(step.busy) / workers / step.seconds)
    else:
        spent = report.seconds * len(report.workers)
        communication, waited = (report.total.communication or 0.0) / spent, report.total.wait / spent
    moved = report.traffic.up + report.traffic.down
    balance = report.balance.balance if report.balance else None
    return Row(workers, added, report.seconds / epochs, None, 1.0, communication, waited, balance, moved / epochs)
