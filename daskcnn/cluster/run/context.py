"""The surroundings of a run on a cluster: its job, data and workers, its ways to send them tasks, and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import Alias, List, Task
from distributed import Client, Future

from daskcnn.arrays import Array
from daskcnn.cluster.link.allowed import AllowedWorkers
from daskcnn.cluster.link.calls import CutOff, Unanswered, WorkersLost, answer_to, ask_workers, tell
from daskcnn.cluster.link.client import Connection, heed_signals
from daskcnn.cluster.link.leases import Hold
from daskcnn.cluster.link.members import Member, Members
from daskcnn.cluster.link.scaled import ScaledCluster
from daskcnn.cluster.link.sent import Sent, call_with_values, try_with_values
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.worker.session import forget_run, in_turn
from daskcnn.cluster.worker.tasks import score_weights
from daskcnn.errors import Interrupted, Lost
from daskcnn.events import Event, Warned
from daskcnn.job.tables import Job
from daskcnn.nn.score import Score
from daskcnn.partition.proportions import as_counted, proportional
from daskcnn.runs.state import TrainingState
from daskcnn.sharded.balance import WorkerLinks
from daskcnn.store import Dataset
from daskcnn.training.coordinator.settings import PATIENCE
from daskcnn.training.judging import JudgedPart


class Dispatch:
    """Submits tasks to workers, and sends them data, which must arrive within `limit` seconds.

    serial: numbers for keys, shared by all that dispatch for the run.
    """

    def __init__(self, run: str, workers: RunWorkers, limit: float, serial: count[int] | None = None) -> None:
        self.workers, self._run, self._limit = workers, run, limit
        self._serial = count() if serial is None else serial

    @property
    def client(self) -> Client:
        """The run's client of the cluster."""
        return self.workers.connection.client

    def only(self, workers: RunWorkers) -> Dispatch:
        """The same for these workers. Keys stay different from those of the whole run."""
        return Dispatch(self._run, workers, self._limit, self._serial)

    def key(self, label: str) -> tuple[str, int]:
        """A key that no other task has; the dashboard groups by the label."""
        return f"{label}-{self._run}", next(self._serial)

    def submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Future:
        """Run a task on this worker of the run, and nowhere else. A worker runs one task of a run at a time."""
        member = self.workers.alive[worker]
        call = _opening(try_with_values, *_taking_turns(member, function), *args)
        return self._pinned(member, self.key(label), *call)

    def submit_at(self, host: Member, label: str, function: Callable[..., Any], *args: Any) -> Future:
        """Run a task on this host, which need not be a worker of the run."""
        return self._pinned(host, self.key(label), function, *args)

    def submit_actor(
        self, key: tuple[str, int], actor: Callable[..., Any], *args: Any, host: Member, **options: Any
    ) -> Future:
        """Start an actor on this host, which need not be a worker of the run."""
        return self._pinned(host, key, *_opening(call_with_values, actor, *args, **options), **options, actor=True)

    def _pinned(
        self, to: Member, key: tuple[str, int], function: Callable[..., Any], *args: Any, **options: Any
    ) -> Future:
        where = {"workers": [to.address], "resources": to.resource, "allow_other_workers": False}
        return self.client.submit(function, *args, **options, **where, key=key, pure=False)

    def bundle(self) -> Bundle:
        """Begin a bundle of tasks that are submitted all at once."""
        return Bundle(self)

    def send(self, data: Any, worker: str) -> Future:
        """Send data to this worker of the run. Returns a future for its tasks, which has no lineage."""
        return self.send_to(data, self.workers.alive[worker].address)

    def send_to(self, data: Any, address: str) -> Future:
        """Send data to the worker at this address.

        Several are sent them one after another. Dask's broadcast locks the scheduler until all of them have the data:
        while one hangs, no job's workers are sent anything.

        Raises WorkersLost or ServerLost where it is gone or does not answer, else Lost if the data do not arrive.
        """
        workers, connection = self.workers, self.workers.connection
        try:
            call = self.client.scatter([data], workers=[address], hash=False, asynchronous=True)
            (future,) = answer_to(self.client, call, within=self._limit, check=connection.heed)
        except Interrupted:
            raise
        except Unanswered:
            workers.require_answers([address])
            reason = f"data did not arrive within {self._limit:g} s"
            remedy = "look at its link with `daskcnn doctor`, or raise cluster.stall_timeout"
            raise Lost(f"worker {address}: {reason}; {remedy}") from None
        except Exception as error:  # Dask has a different one for every moment at which a worker may go
            workers.explain(error)
        return future


class Bundle:
    """Tasks that go to the scheduler in one message: a task by itself costs it a millisecond."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._layers: dict[str, dict[Any, Task]] = {}

    def add(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Alias:
        """Add a task of this worker, as `Dispatch.submit` would make it. Returns what other tasks are given for it."""
        key = self._dispatch.key(label)
        called = _taking_turns(self._dispatch.workers.alive[worker], function)
        self._layers.setdefault(worker, {})[key] = Task(key, *called, *map(_argument, args))
        return Alias(key)

    def submit(self, wanted: Iterable[Alias]) -> dict[Any, Future]:
        """Submit them all. Returns the futures of the wanted tasks by key; the others are forgotten once used."""
        layers = {}
        for worker, own in self._layers.items():
            member = self._dispatch.workers.alive[worker]
            where: dict[str, Any] = {"workers": [member.address], "allow_other_workers": False}
            where |= {"resources": member.resource} if member.resource else {}
            layers[worker] = MaterializedLayer(own, annotations=where)
        graph = HighLevelGraph(layers, {worker: set() for worker in layers})  # tasks say what they depend on
        keys = list(dict.fromkeys(ref.key for ref in wanted))
        return dict(zip(keys, self._dispatch.client.get(graph, keys, sync=False), strict=True))


def _taking_turns(member: Member, function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return the call in place of the function's, where no resource keeps a worker's threads from running two tasks."""
    return (in_turn, function) if member.plain else (function,)


def _opening(with_values: Callable[..., Any], *call: Any, **options: Any) -> tuple[Any, ...]:
    """Return the call, through `with_values` where an argument or an option has to be opened on the worker."""
    return (with_values, *call) if any(isinstance(each, Sent) for each in (*call, *options.values())) else call


def _argument(value: Any) -> Any:
    """A task's argument: results of other tasks, by themselves or in a list, are replaced by what they come to."""
    if isinstance(value, Future):
        return Alias(value.key)
    return List(*map(_argument, value)) if isinstance(value, list) else value


class Scoring:
    """Has weights judged by the workers that are calibrated, of whom others may come later.

    limit: seconds that judging may take beyond what calibration lets expect. even: parts do not go by speed.
    """

    def __init__(
        self,
        run: str,
        dispatch: Dispatch,
        results: Results,
        limit: float,
        calibrations: Mapping[str, Calibration],
        *,
        even: bool = False,
    ) -> None:
        self._run, self._dispatch, self._results = run, dispatch, results
        self._limit, self._calibrations, self._even = limit, calibrations, even

    def score(self, weights: Array, split: str, part: JudgedPart) -> Score:
        """Judge weights on a part of a split, and again where a worker is lost, or the connection cut, meanwhile."""
        workers = self._dispatch.workers
        while True:
            try:
                return self.try_score(weights, split, part)
            except WorkersLost as lost:
                for name in lost.names:
                    workers.lose(name, "connection lost")
            except CutOff:
                pass  # its tasks are made anew

    def try_score(self, weights: Array, split: str, part: JudgedPart) -> Score:
        """Judge weights on a part of a split. Raises WorkersLost, and what `RunWorkers.look_round` raises."""
        futures, known = self.submit(weights, split, part), self._calibrations
        each = (own.samples * known[name].seconds_per_sample for name, own in self.parts(part))
        slowest = max(each, default=0.0)
        found = self._results.gather(futures, within=self._limit + PATIENCE * slowest)
        return sum(found.values(), Score(0.0, 0, 0))

    def submit(self, weights: Array, split: str, part: JudgedPart) -> dict[str, Future]:
        """Let every worker judge its part. Returns the scores to come, by worker."""
        send, submit = self._dispatch.send, self._dispatch.submit
        return {
            name: submit("score", score_weights, self._run, send(weights, name), split, own, worker=name)
            for name, own in self.parts(part)
        }

    def parts(self, part: JudgedPart) -> list[tuple[str, JudgedPart]]:
        """The part cut over the workers in proportion to their calibrated speed, or evenly."""
        names = [name for name in self._dispatch.workers.alive if name in self._calibrations]
        seconds = as_counted([self._calibrations[name].seconds_per_sample for name in names], even=self._even)
        cut, begin = [], part.lo
        for name, size in zip(names, proportional(part.samples, [1 / each for each in seconds]), strict=True):
            if size:
                cut.append((name, part._replace(lo=begin, hi=begin + size)))
            begin += size
        return cut


FREED = 20.0  # seconds at most that workers may take to free what a run keeps: one that hangs is left alone


@dataclass
class RunContext:
    """The values that the parts of a run share.

    Attributes
    ----------
    name : the run as it shows in task names.
    save : takes a state that is to be kept.
    calibrations : measurements of each calibrated worker.
    links : the workers' links, once a layer-sharded run has measured them.
    ends : the monotonic clock's time at which the run's time limit is over, if it has one.
    sessions : the number of the session that was begun last on each worker, by its address.
    """

    name: str
    job: Job
    dataset: Dataset
    emit: Callable[[Event], None]
    save: Callable[[TrainingState], None]
    connection: Connection
    workers: RunWorkers
    dispatch: Dispatch
    results: Results
    calibrations: dict[str, Calibration]
    scoring: Scoring
    links: WorkerLinks | None = None
    ends: float | None = None
    sessions: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        client: Client,
        name: str,
        job: Job,
        dataset: Dataset,
        members: Members,
        *,
        emit: Callable[[Event], None],
        save: Callable[[TrainingState], None],
        interrupted: Callable[[], int | None] = lambda: None,
        hold: Hold | None = None,
        scaled: ScaledCluster | None = None,
    ) -> RunContext:
        """Put the surroundings of a run together.

        interrupted: gives the number of the signal that came, if one did. hold: the run's, which has the members.
        scaled: the cluster, if it may be asked for workers.
        """
        connection, cluster = Connection(client, heed_signals(interrupted)), job.cluster
        allowed = AllowedWorkers.of(cluster)
        numbered = cluster.workers.given and not cluster.workers.ranged
        grows = (allowed.changes or not numbered) and not job.train.reproducible
        leases: dict[str, Any] = {"hold": hold, "allowed": allowed, "grows": grows}
        asks = cluster.workers.ranged and not allowed.changes  # else there may be more than the run is to have
        wanted = cluster.workers.given if cluster.adapt else cluster.workers.most
        leases["most"] = sum(wanted.values()) if asks else 0
        workers = RunWorkers(connection, members, emit, **leases, scaled=scaled)
        dispatch, results = Dispatch(name, workers, cluster.stall_timeout), Results(workers, cluster.stall_timeout)
        workers.news.subscribe(client, name, results.wake)
        calibrations = dict[str, Calibration]()
        even = job.train.reproducible
        scoring = Scoring(name, dispatch, results, cluster.stall_timeout, calibrations, even=even)
        return cls(name, job, dataset, emit, save, connection, workers, dispatch, results, calibrations, scoring)

    def only(self, names: Iterable[str]) -> RunContext:
        """The same surroundings with these workers only. What becomes of them is told to the whole one."""
        workers, cluster = self.workers.only(names), self.job.cluster
        dispatch, results = self.dispatch.only(workers), Results(workers, cluster.stall_timeout)
        even = self.job.train.reproducible
        scoring = Scoring(self.name, dispatch, results, cluster.stall_timeout, self.calibrations, even=even)
        return replace(self, workers=workers, dispatch=dispatch, results=results, scoring=scoring)

    def turned(self, job: Job) -> RunContext:
        """The same surroundings for another job of the same images, for which those alive measure themselves anew."""
        self.calibrations.clear()
        there = tuple(self.workers.alive.values())
        self.workers.members = replace(self.workers.members, workers=there)
        return replace(self, job=job)

    @property
    def asks(self) -> int:
        """Workers that the run may ask its cluster for, if it may ask for any."""
        workers, scaled = self.job.cluster.workers, self.workers.scaled
        if scaled is None:
            return 0
        return max(sum(workers.given.values()), int(min(sum(workers.most.values()), scaled.most)))

    @property
    def samples(self) -> int:
        """Samples that are trained on; those of the validation slice lie behind them."""
        return len(self.dataset.train) - self.job.data.validation

    def close(self) -> None:
        """Free what the run keeps on workers, and warn of those that it has and that do not answer.

        Those that it has given up are told without waiting for them.
        """
        connection = self.connection
        connection.ignore_signals()
        self.workers.news.unsubscribe(connection.client, self.name)
        self.workers.close()
        self.results.drop_cancelled()
        there = {member.address: name for name, member in self.workers.alive.items()}
        present = connection.workers().keys()
        addresses = present & there.keys()
        for address in self.sessions.keys() & present - there.keys():
            tell(connection.client, address, forget_run, self.name)
        limit = min(FREED, self.job.cluster.stall_timeout)
        answers = ask_workers(connection.client, forget_run, addresses, self.name, within=limit)
        reason = f"no answer within {limit:g} s, it may keep the run's memory"
        for address in answers.silent:
            self.emit(Warned(value=f"worker {there[address]} ({address})", reason=reason, remedy="restart it"))
