"""Each worker's part in a job, and the gain of other workers, by simulation: `daskcnn plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import get_args

from daskcnn.arrays import DeviceKind
from daskcnn.errors import JobError, UserError, all_known
from daskcnn.events import StrategyChosen, WorkersCalibrated
from daskcnn.job.tables import Job
from daskcnn.planning.simulate import Scenario, simulate
from daskcnn.runs.directory import RunDirectory
from daskcnn.show.worker_plan import Row, Verdict, WorkerPlan
from daskcnn.sim.cluster import SimulatedCluster, Worker, patterns

_AS_MEASURED = 1.25
"""Largest ratio of the seconds of run and replay at which the replay counts as one of this run."""
FURTHER = 32
"""The most workers beyond those asked for that are tried, to see when another one stops paying."""


def plan(
    chosen: Scenario, additions: Mapping[str, int] | None = None, without: Collection[str] = (), *, seed: int = 0
) -> WorkerPlan:
    """Return what a job takes with fewer workers, and with more.

    By default each worker is left out in turn, and last several of the slowest: those without which it is the fastest.

    Parameters
    ----------
    chosen : the job and its cluster
    additions : how many workers to add, one at a time, by the kind or the name of one that they are like. More workers
        like the last one are tried, until another one does not pay.
    without : names of workers to leave out, all at once and before others are added
    seed : of workers' varying speeds

    Raises
    ------
    UserError
        For a name that no worker has, where no worker is left or added, and for a cluster on which the job cannot run.
    """
    additions = additions or {}
    out, known = _checked(chosen, additions, without)
    whole = _row(chosen, chosen.cluster, seed)
    if not additions and not without:
        return _each_left_out(chosen, whole, seed)
    rows = [whole]
    if out:
        rows.append(_row_without(chosen, out, whole, seed))
        chosen = replace(chosen, cluster=chosen.cluster.without(out))
    asked = [name for name, number in additions.items() for _ in range(number)]
    more = _rows_with([*asked, *asked[-1:] * FURTHER], chosen, known, rows, seed)
    rows += [next(more) for _ in asked]
    verdicts = [_verdict(name, rows, more if name == asked[-1] else ()) for name in dict.fromkeys(asked)]
    with_reasons = tuple(_with_reason(chosen, verdict, asked, known) for verdict in verdicts)
    return WorkerPlan(tuple(rows), with_reasons, merged=_merged(chosen.job))


def changed(chosen: Scenario, additions: Mapping[str, int], without: Collection[str]) -> Scenario:
    """Return the job on its cluster without some workers and with others. Raises UserError as `plan`."""
    out, known = _checked(chosen, additions, without)
    cluster = chosen.cluster.without(out)
    for name in (name for name, number in additions.items() for _ in range(number)):
        cluster = cluster.with_one_more(known[name])
    return replace(chosen, cluster=cluster)


def all_measured(chosen: Scenario) -> Scenario:
    """Return the job on all workers that a run has measured, those that it left out included.

    On the cluster of a file it is as it was: an entry of no worker is a pattern there.
    """
    if not Path(chosen.source).is_dir():
        return chosen
    workers = [worker.model_copy(update={"count": max(1, worker.count)}) for worker in chosen.cluster.worker]
    return replace(chosen, cluster=chosen.cluster.model_copy(update={"worker": workers}))


def _checked(
    chosen: Scenario, additions: Mapping[str, int], without: Collection[str]
) -> tuple[tuple[str, ...], dict[str, Worker]]:
    """The members to leave out, and the patterns for those to add. Raises UserError."""
    out, known = _left_out(chosen, without), patterns(chosen.cluster)
    check_additions(additions, known, chosen.source)
    return out, known


def doubt(run: str, epoch: float) -> str | None:
    """Return a warning where an epoch of a run took another time than its replay, in seconds; else None."""
    found = RunDirectory.open(run).summary()
    took = found["seconds"] / found["epochs"] if found and found.get("seconds") and found.get("epochs") else epoch
    if max(took, epoch) <= _AS_MEASURED * min(took, epoch):
        return None
    return (
        f"{run}: an epoch took {took:.3g} s, and takes {epoch:.3g} s by the workers' usual speeds: they varied, in the "
        "first rounds or because of other programs, so smaller differences than this one say little; go by a longer run"
    )


# --- fewer workers ---


def _left_out(chosen: Scenario, without: Collection[str]) -> tuple[str, ...]:
    """The members of these names; an entry of a cluster file stands for all of its members. Raises UserError."""
    alike, members = _alike(chosen.cluster), [member.name for member in chosen.cluster.members()]
    for name in without:
        if name not in alike and name not in members:
            raise UserError(f"--without {name}", f"{chosen.source} has no worker of this name{all_known(members)}")
    named = {member for name in without for member in alike.get(name, (name,))}
    if named >= {*members}:
        reason = f"{chosen.source} has no other worker, so that none is left"
        raise UserError(f"--without {','.join(without)}", reason, "leave out fewer")
    return tuple(member for member in members if member in named)


def _alike(cluster: SimulatedCluster) -> dict[str, tuple[str, ...]]:
    """The members of each entry of the cluster file, which are alike."""
    entries = ((entry.name, cluster.model_copy(update={"worker": [entry]})) for entry in cluster.worker)
    return {name: tuple(member.name for member in alone.members()) for name, alone in entries}


def _each_left_out(chosen: Scenario, whole: Row, seed: int) -> WorkerPlan:
    """Without one worker of each entry in turn; last, without several of the slowest together."""
    alike = [members for members in _alike(chosen.cluster).values() if members]
    if whole.workers == 1:
        others = [own.name for own in all_measured(chosen).cluster.members() if own not in chosen.cluster.members()]
        remedy = "add one, for example by --add cpu=1"
        if others:
            remedy = f"give --strategies to compare it with what the run measured beside it: {', '.join(others)}"
        raise UserError(chosen.source, "its cluster has one worker, which cannot be left out", remedy)
    rows, needed = [whole], dict[str, str]()
    for members in alike:
        try:
            rows.append(_row_without(chosen, members[-1:], whole, seed))
        except JobError as error:  # such as a rule for two workers or more
            needed[members[-1]] = "; ".join(error.problems)
    together = list[Row]()
    for out in _slowest(chosen.cluster, alike):
        with suppress(JobError):
            together.append(_row_without(chosen, out, whole, seed))
    if together:
        rows.append(min(reversed(together), key=lambda row: row.progress))  # of equal ones that with the fewest workers
    return WorkerPlan(tuple(rows), (), needed, _merged(chosen.job))


def _merged(job: Job) -> str:
    """The strategy, where its epochs are not those of one machine."""
    return "" if job.rule is None or job.rule.shares_steps else str(job.train.strategy)


def _slowest(cluster: SimulatedCluster, alike: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the slowest workers, two or more, of the entries that are below the mean speed: one more each time."""
    own = {member.name: member.images_per_second for member in cluster.members()}
    speeds = {members: mean(own[name] for name in members) for members in map(tuple, alike)}
    usual, out = mean(own.values()), list[str]()
    for members in sorted(speeds, key=speeds.__getitem__):
        out = [*out, *members]
        if speeds[members] >= usual or len(out) == len(own):  # their mean may be below it by rounding
            return
        if len(out) > 1:
            yield out


def _row_without(chosen: Scenario, out: Sequence[str], whole: Row, seed: int) -> Row:
    row = _row(chosen, chosen.cluster.without(out), seed)
    speedup = whole.progress / row.progress
    return replace(row, without=tuple(out), gain=1 - speedup, speedup=speedup)


# --- more workers ---


def check_additions(additions: Mapping[str, int], known: Mapping[str, Worker], source: str) -> None:
    """Raise UserError for a kind or name without a pattern, JobError if nothing is added."""
    if unknown := next((name for name in additions if name not in known), None):
        raise UserError(f"--add {unknown}", *_unknown(unknown, known, source))
    if additions and not any(additions.values()):
        raise JobError(["--add: adds no worker; write a kind or a worker's name, and how many: gpu=1,cpu=4"])


def _unknown(name: str, known: Mapping[str, Worker], source: str) -> tuple[str, str]:
    """The reason why a worker cannot be added, and the remedy."""
    kinds: tuple[str, ...] = get_args(DeviceKind)
    if name not in kinds:
        named = f"or the name of a worker that it is like{all_known({*known} - {*kinds})}"
        return "there is no such kind of worker", f"write one of {', '.join(kinds)}, {named}"
    written = f"a [[worker]] with kind = {name!r}, count = 0 and its images_per_second"
    made = "daskcnn simulate RUN --write-cluster FILE makes one of a run"
    return (
        f"{source} has no worker of this kind to go by",
        f"give --cluster with a cluster file that has {written} ({made})",
    )


def _rows_with(
    more: Sequence[str], chosen: Scenario, known: Mapping[str, Worker], rows: Sequence[Row], seed: int
) -> Iterator[Row]:
    """Yield the rows behind these ones, with one worker more each time."""
    cluster, first, before = chosen.cluster, rows[0], rows[-1]
    for name in more:
        cluster = cluster.with_one_more(known[name])
        row = replace(_row(chosen, cluster, seed), added=name)
        before = row = replace(row, gain=1 - row.progress / before.progress, speedup=first.progress / row.progress)
        yield row


def _verdict(name: str, rows: Sequence[Row], more: Iterable[Row]) -> Verdict:
    """The verdict by the rows asked for, or by further ones if all of them pay."""
    stops = next((row for row in rows if row.added == name and not row.pays), None)
    if stops is not None or not more:
        return Verdict(name, stops)
    further = 0
    for row in more:
        if not row.pays:
            return Verdict(name, row, further)
        further += 1
    return Verdict(name, None, further)


def _with_reason(chosen: Scenario, verdict: Verdict, asked: Sequence[str], known: Mapping[str, Worker]) -> Verdict:
    """Add the reason, for a sharded network, why the first worker that does not pay brings so little."""
    if verdict.stops is None or not chosen.sharded:
        return verdict
    cluster = chosen.cluster
    more = verdict.stops.workers - len(cluster.members())
    for name in [*asked, *[asked[-1]] * more][:more]:
        cluster = cluster.with_one_more(known[name])
    return replace(verdict, reason=chosen.sharding(cluster).why_no_shorter())


def _row(chosen: Scenario, cluster: SimulatedCluster, seed: int) -> Row:
    found = simulate(replace(chosen, cluster=cluster), seed=seed)
    report, calibrated = found.report, next(each for each in found.events if isinstance(each, WorkersCalibrated))
    seconds = (calibrated.at or 0.0) + report.seconds  # until the first worker comes none computes
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
    choices = [each for each in found.events if isinstance(each, StrategyChosen)]
    needed = choices[-1].candidates[0].needed if choices else 1.0
    return Row(workers, seconds, seconds / epochs, communication, waited, balance, moved / epochs, needed)
