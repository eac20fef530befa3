"""The report of a run: all its figures, from the events of a cluster or of the simulator.

Workers are compared by the number of the round (see `history`). Behind a barrier, rounds of one number ran at the same
time, and a worker without samples in one was idle in it. The number of an asynchronous worker counts passes, so balance
compares these: only those that every worker reached, without a last pass that the budget cut short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from daskcnn.events import CalibratedWorker, Event, Judged, RunStarted, StrategyChosen
from daskcnn.ps import RULES
from daskcnn.runs.totals import WorkerTotals
from daskcnn.show.alone import LAYER, AloneEstimate, alone_of, surely
from daskcnn.show.changes import WorkerChange
from daskcnn.show.history import EvaluationRow, History, Note, RoundRow, StepSums

UNFINISHED = "not ended"
WEIGHT = 4  # bytes of a number, where a log does not say otherwise


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker over the run, or all of them. gamma: the mean; q: the last.

    lost, left: True if it was lost, or left in good order, and has not come back; present: seconds that it took part.
    compute: seconds of `busy` without `load`; wait: seconds for the other workers. images_per_second: while busy; None
    for all workers, and for one that has a part of each sample's work. staleness_mean: of the largest in each round.
    """

    name: str
    device: str
    lost: bool
    left: bool
    present: float
    samples: int
    rounds: int
    pushes: int
    busy: float
    compute: float
    load: float | None
    communication: float | None
    wait: float
    evaluation: float | None
    images_per_second: float | None
    bytes_up: int
    bytes_down: int
    staleness_mean: float | None
    staleness_max: int | None
    gamma: float | None
    q: float | None


@dataclass(frozen=True, slots=True)
class RoundBalance:
    """The balance of the workers in rounds first…last: mean ÷ max of their busy seconds. Seconds are sums.

    wait: Σ_j (max t − t_j), BPT-CNN eq. 8 with t the busy seconds; of an asynchronous rule the cost of a barrier.
    """

    increment: int | None
    first: int
    last: int
    rounds: int
    workers: int
    samples: int
    mean_busy: float
    max_busy: float
    balance: float | None
    wait: float
    waited: float  # as measured


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Bytes and seconds of all exchanges of the rounds. vector_bytes: of one vector on the wire.

    foreseen: 2·bytes·m·K, BPT-CNN eq. 11, m·K being the pushes; None if no vector is exchanged. share: measured ÷
    foreseen. a_step: bytes sent in a step of a layer-sharded run; eq2: numbers sent in it by Marques et al., eq. 2.
    """

    up: int
    down: int
    seconds: float | None
    pushes: int
    vector_bytes: int | None
    foreseen: int | None
    share: float | None
    a_step: float | None = None
    eq2: int | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of the run's servers: pushes merged, repeats, refusals by reason."""

    merged: int
    repeated: int
    refused: dict[str, int]


@dataclass(frozen=True)
class StepParts:
    """Seconds of a worker in a step of a layer-sharded run (Marques et al., fig. 6 and 8).

    conv: its kernels, and the layers that are spread with them; comp: all else that it computes; comm: the rest.
    """

    comm: float
    conv: float
    comp: float


@dataclass(frozen=True)
class RunReport:
    """All figures of one run. seconds: of training, those before a resume included; began: at which its lives began.

    increments, by_round, balance: of the rounds of each increment, of each round, and of all rounds. kernels, shards,
    conv_seconds: of a layer-sharded run, by worker and layer; shards are for people, samples as per cent. breakdown,
    papers_step: its steps by worker, and by the papers' definition, None if no epoch of sharded layers has ended.
    """

    start: RunStarted
    status: str
    epoch: float
    seconds: float
    images_per_second: float | None
    test: Judged | None
    workers: tuple[WorkerRow, ...]
    total: WorkerRow
    rounds: tuple[RoundRow, ...]
    increments: tuple[RoundBalance, ...]
    by_round: tuple[RoundBalance, ...]
    balance: RoundBalance | None
    traffic: BytesMoved
    server: Counted | None
    looks: tuple[EvaluationRow, ...]
    notes: tuple[Note, ...]
    changes: tuple[WorkerChange, ...]
    kernels: dict[str, dict[str, int]]
    shards: dict[str, dict[str, str]]
    conv_seconds: dict[str, dict[str, float]]
    breakdown: dict[str, StepParts]
    papers_step: StepParts | None
    began: dict[int, float]
    calibrated: tuple[CalibratedWorker, ...] = ()
    alone: AloneEstimate | None = None
    choice: StrategyChosen | None = None

    @property
    def utilisation(self) -> float | None:
        """The busy part of the time that the workers took part; None if no time passed."""
        return min(1.0, self.total.busy / self.total.present) if self.total.present else None

    def from_increment(self, first: int) -> RoundBalance | None:
        """Return the balance of the rounds from this increment on; None without any."""
        later = [b for b in self.by_round if b.increment is not None and b.increment >= first]
        return _pooled(later) if later else None

    def reached(self, accuracy: float) -> EvaluationRow | None:
        """Return the first evaluation with an accuracy of at least this on validation samples (BPT-CNN table 1).

        One of a part of them counts if its accuracy lies two standard errors above it.
        """
        return next((look for look in self.looks if surely(look) >= accuracy), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON, under the fields' own names."""
        plain = ("status", "epoch", "seconds", "images_per_second", "utilisation", "began")
        one = ("total", "balance", "traffic", "server", "alone")
        many = ("workers", "increments", "by_round", "looks", "notes", "changes")
        return {
            "start": self.start.model_dump(exclude={"at"}),
            **{name: getattr(self, name) for name in plain},
            "test": self.test.model_dump() if self.test else None,
            **{name: (row := getattr(self, name)) and asdict(row) for name in one},
            "choice": self.choice.model_dump(exclude={"at"}) if self.choice else None,
            "kernels": self.kernels,
            "shards": self.shards,
            "conv_seconds": self.conv_seconds,
            "breakdown": {name: asdict(parts) for name, parts in self.breakdown.items()},
            "papers_step": self.papers_step and asdict(self.papers_step),
            **{name: [asdict(row) for row in getattr(self, name)] for name in many},
            "rounds": [row.to_dict() for row in self.rounds],
            "calibrated": [row.model_dump() for row in self.calibrated],
        }


def tables(events: Iterable[Event]) -> RunReport:
    """Return the report of a run, whether it has ended or not."""
    run = History()
    for event in events:
        run.take(event)
    return report_of(run)


def report_of(run: History) -> RunReport:
    """Return the report of a run's course so far."""
    by_round, ended = tuple(_balances(run)), run.end
    increments: dict[int | None, list[RoundBalance]] = {}
    for balance in by_round:
        increments.setdefault(balance.increment, []).append(balance)
    seconds = run.now if ended is None or ended.seconds is None else ended.seconds
    images = run.epoch * (run.start.samples or 0)
    rows: dict[str, list[RoundRow]] = {name: [] for name in run.devices}
    for row in run.rows:
        rows.setdefault(row.worker, []).append(row)
    workers = tuple(_worker(run, name, own) for name, own in rows.items())
    total = replace(_worker(run, "all", run.rows), present=sum(worker.present for worker in workers))
    return RunReport(
        start=run.start,
        status=UNFINISHED if ended is None else ended.status,
        epoch=run.epoch,
        seconds=seconds,
        images_per_second=images / seconds if images and seconds else None,
        test=ended.test if ended else None,
        workers=workers,
        total=replace(total, images_per_second=None),
        rounds=tuple(run.rows),
        increments=tuple(map(_pooled, increments.values())),
        by_round=by_round,
        balance=_pooled(by_round) if by_round else None,
        traffic=_traffic(run, total),
        server=_counted(run),
        looks=tuple(run.looks),
        notes=tuple(run.notes),
        changes=tuple(run.changes.rows),
        kernels=run.kernels,
        shards=run.shards,
        conv_seconds={name: dict(seconds) for name, seconds in run.conv_seconds.items()},
        breakdown={name: _step(run, _totals(own, name)) for name, own in rows.items() if _sharded(run) and run.steps},
        papers_step=_papers_step(run.step_sums),
        began=dict(run.began),
        calibrated=tuple(run.calibrated.values()),
        alone=alone_of(run),
        choice=run.choice,
    )


def _papers_step(sums: StepSums) -> StepParts | None:
    """The mean step: communication is what remains of it besides the slowest convolutions and home's rest."""
    if not sums.steps:
        return None
    comm = max(0.0, sums.seconds - sums.conv - sums.comp)
    return StepParts(comm / sums.steps, sums.conv / sums.steps, sums.comp / sums.steps)


def _step(run: History, own: WorkerTotals) -> StepParts:
    """A worker's part of the mean step, over the epochs that it took part in."""
    conv, steps = sum(run.conv_seconds.get(own.name, {}).values()), run.steps_of[own.name] or 1
    comm, comp = own.wait + own.communication, max(0.0, own.busy - conv)
    return StepParts(comm / steps, conv / steps, comp / steps)


# --- workers ---


def _totals(rows: Iterable[RoundRow], name: str) -> WorkerTotals:
    totals = WorkerTotals(name)
    for row in rows:
        totals.add(row.numbers)
    return totals


def _worker(run: History, name: str, rows: Sequence[RoundRow]) -> WorkerRow:
    sums = _totals(rows, name)
    apart = any(row.apart for row in rows)
    stale = [row.numbers.staleness for row in rows if row.numbers.staleness is not None]
    gammas = [row.numbers.gamma for row in rows if row.numbers.gamma is not None]
    return WorkerRow(
        name=name,
        device=run.devices.get(name, ""),
        lost=name in run.attendance.lost,
        left=name in run.attendance.left,
        present=run.attendance.stay(name),
        samples=_presented(run, rows),
        rounds=len(rows),
        pushes=sums.pushes,
        busy=sums.busy,
        compute=sums.compute,
        load=sums.load if apart else None,
        communication=sums.communication if apart else None,
        wait=sums.wait,
        evaluation=sums.evaluation if apart else None,
        images_per_second=sums.samples / sums.busy if sums.busy and not _sharded(run) else None,
        bytes_up=sums.bytes_up,
        bytes_down=sums.bytes_down,
        staleness_mean=sum(stale) / len(stale) if stale else None,
        staleness_max=max(stale, default=None),
        gamma=sum(gammas) / len(gammas) if gammas else None,
        q=rows[-1].numbers.q if rows else None,
    )


def _sharded(run: History) -> bool:
    """True for one replica over all workers, each of which sees every sample."""
    return run.start.strategy == LAYER


def _presented(run: History, rows: Sequence[RoundRow]) -> int:
    """Samples in these rounds; those that several workers saw together count once."""
    if _sharded(run):
        return sum({(row.life, row.number): row.numbers.samples for row in rows}.values())
    return sum(row.numbers.samples for row in rows)


# --- balance ---


def _balances(run: History) -> list[RoundBalance]:
    """The balance of each round that is compared, in the order of the log."""
    found: dict[tuple[int, int], list[RoundRow]] = {}
    for row in run.rows:
        found.setdefault((row.life, row.number), []).append(row)
    rule = RULES.get(run.start.strategy)
    if rule.barrier if rule else _sharded(run):
        return [_balance(run, rows, run.there[key] - {row.worker for row in rows}) for key, rows in found.items()]
    last = _last_compared(run)
    return [_balance(run, rows) for (life, number), rows in found.items() if number <= last.get(life, 0)]


def _last_compared(run: History) -> dict[int, int]:
    """By life, the last number that all workers which are still there reached with a whole round."""
    rounds: dict[tuple[int, str], list[RoundRow]] = {}
    for row in run.rows:
        if row.worker in run.present or not run.present:
            rounds.setdefault((row.life, row.worker), []).append(row)
    last: dict[int, int] = {}
    for (life, _), own in rounds.items():
        cut = len(own) > 1 and own[-1].numbers.samples < own[-2].numbers.samples
        last[life] = min(last.get(life, own[-1].number), own[-1].number - cut)
    return last


def _balance(run: History, rows: Sequence[RoundRow], idle: Iterable[str] = ()) -> RoundBalance:
    """The balance of one round, in which the idle workers had nothing to do."""
    busy = [row.numbers.busy for row in rows] + [0.0 for _ in idle]
    most = max(busy)
    return RoundBalance(
        increment=rows[0].increment,
        first=rows[0].number,
        last=rows[0].number,
        rounds=1,
        workers=len(busy),
        samples=_presented(run, rows),
        mean_busy=sum(busy) / len(busy),
        max_busy=most,
        balance=sum(busy) / len(busy) / most if most else None,
        wait=sum(most - t for t in busy),
        waited=sum(row.numbers.wait for row in rows),
    )


def _pooled(rounds: Sequence[RoundBalance]) -> RoundBalance:
    """Several rounds as one: seconds add up, so a long round counts more than a short one."""
    mean, most = sum(r.mean_busy for r in rounds), sum(r.max_busy for r in rounds)
    increments = {r.increment for r in rounds}
    return RoundBalance(
        increment=increments.pop() if len(increments) == 1 else None,
        first=min(r.first for r in rounds),
        last=max(r.last for r in rounds),
        rounds=len(rounds),
        workers=max(r.workers for r in rounds),
        samples=sum(r.samples for r in rounds),
        mean_busy=mean,
        max_busy=most,
        balance=mean / most if most else None,
        wait=sum(r.wait for r in rounds),
        waited=sum(r.waited for r in rounds),
    )


# --- exchanges ---


def _traffic(run: History, total: WorkerRow) -> BytesMoved:
    vector, up, down, pushes = run.start.vector_bytes, total.bytes_up, total.bytes_down, total.pushes
    if vector is None and run.start.parameters is not None:
        vector = WEIGHT * run.start.parameters
    foreseen = 2 * vector * pushes if vector and pushes else None
    share = (up + down) / foreseen if foreseen else None
    moved = BytesMoved(up, down, total.communication, pushes, vector, foreseen, share)
    return replace(moved, a_step=up / run.steps if run.steps else None, eq2=run.eq2) if _sharded(run) else moved


def _counted(run: History) -> Counted | None:
    """The sum over the servers' last counts: each server counts anew."""
    servers, refused = run.servers.values(), Counter[str]()
    for server in servers:
        refused.update(server.refused)
    found = Counted(sum(s.merged for s in servers), sum(s.repeated for s in servers), dict(refused))
    return found if servers else None
