"""Workers of a layer-sharded run within this process: the driver's tasks run one by one, with the workers' functions.

A task runs once all that it hangs on has run. Chance says which task of which worker is next: Dask may run tasks of a
later step before one of an earlier step that hangs on the same results. What another worker, or the driver, has made
arrives as it would over the network: pickled, so that it is what the wire's dtype leaves of it. Parts that are called
for are answered by the handler that a worker registers for them.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakValueDictionary

import pytest
from dask.task_spec import Alias
from distributed import Future
from distributed.protocol.pickle import dumps, loads

from daskcnn.arrays import Device
from daskcnn.cluster.link.calls import Answers, CutOff, WorkersLost
from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.members import Members
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run import admission
from daskcnn.cluster.run.admission import versions
from daskcnn.cluster.run.context import Bundle, Dispatch, RunContext
from daskcnn.cluster.run.results import Name, Results
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.cluster.shell.shell import Heard, Shell
from daskcnn.cluster.worker.session import Session, forget_run, keep_session
from daskcnn.cluster.worker.tasks import calibrate
from daskcnn.events import Event, KernelsSharded, StepsEnded
from daskcnn.job.network import convolutions, network_of
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.runs.state import TrainingState
from daskcnn.store import Dataset, open_dataset
from daskcnn.training.coordinator.facts import Fact, StepDone, WorkerLeaving
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.replica import Replica
from tests.cluster.surroundings import E, Ways, member, of_kind

RUN = "a run in one process"
DRIVER = "the driver"


class Result:
    """The result of a task, as a future is one. It is wanted for as long as something refers to this object."""

    def __init__(self, key: tuple[str, int], tasks: Tasks) -> None:
        self.key, self._tasks = key, tasks
        self._told: list[Callable[[Result], None]] = []

    def done(self) -> bool:
        return self.key in self._tasks.made

    def add_done_callback(self, told: Callable[[Result], None]) -> None:
        self._told.append(told)

    def ended(self) -> None:
        """Tell who wants to know."""
        while self._told:
            self._told.pop()(self)

    def cancel(self) -> None:
        """Nobody refers to it any more."""


@dataclass(frozen=True)
class Submitted:
    """A task of this worker. batch: tasks that are submitted at once have the same number, later ones a higher one."""

    batch: int
    worker: str
    function: Callable[..., Any]
    args: tuple[Any, ...]

    @cached_property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """Keys of what it hangs on."""
        return tuple(_keys(self.args))


class Ran(NamedTuple):
    """A task that has run."""

    label: str
    worker: str
    function: Callable[..., Any]


def _keys(args: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for each in args:
        if isinstance(each, Result | Alias):
            yield each.key
        elif isinstance(each, list):
            yield from _keys(each)


@dataclass
class Made:
    """What a task came to, on its worker, and copies of it on others."""

    maker: str
    value: Any
    copies: dict[str, Any] = field(default_factory=dict)

    def on(self, worker: str) -> Any:
        """As this worker has it."""
        if worker == self.maker:
            return self.value
        if worker not in self.copies:
            self.copies[worker] = loads(dumps(self.value))
        return self.copies[worker]


class Worker:
    """What Dask's worker is to a task."""

    def __init__(self, address: str, cluster: Tasks) -> None:
        self.address, self.loop = address, SimpleNamespace(asyncio_loop=cluster.loop)
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.state = SimpleNamespace(tasks={"this": SimpleNamespace(state="executing")})
        self._cluster = cluster

    def get_current_task(self) -> str:
        return "this"

    def rpc(self, address: str) -> Any:
        """To call another worker."""
        return Calls(self._cluster, address)


class Calls:
    """A worker's handlers as methods."""

    def __init__(self, cluster: Tasks, address: str) -> None:
        self._cluster, self._address = cluster, address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(**asked: Any) -> dict[str, Any]:
            with self._cluster.being(self._address) as worker:
                answer = await worker.handlers[name](**loads(dumps(asked)))
            return {key: getattr(value, "data", value) for key, value in answer.items()}  # as if serialized

        return call


class Tasks:
    """Tasks of all workers, and what they came to.

    Attributes
    ----------
    made : results by key, of those that are wanted.
    ran : what has run, in order.
    held_up : true for a task, by its label, that does not run now.
    """

    held_up: Callable[[str, Submitted], bool] = staticmethod(lambda label, task: False)

    def __init__(self, sessions: Mapping[str, Session], seed: int) -> None:
        self.made: dict[tuple[str, int], Made] = {}
        self.ran: list[Ran] = []
        self._waiting: dict[tuple[str, int], Submitted] = {}
        self._wanted: WeakValueDictionary[tuple[str, int], Result] = WeakValueDictionary()
        self._serial, self._batches, self._chance = count(), count(), random.Random(seed)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.sessions = sessions
        self.workers = {name: Worker(name, self) for name in sessions}
        self._now: str = next(iter(sessions))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for worker in self.workers:
            with self.being(worker):
                forget_run(RUN)

    @property
    def worker(self) -> Worker:
        """The one that this process is now."""
        return self.workers[self._now]

    @contextmanager
    def being(self, worker: str) -> Iterator[Worker]:
        """For a while this process is that worker."""
        before, self._now = self._now, worker
        keep_session(RUN, self.sessions[worker])
        try:
            yield self.workers[worker]
        finally:
            self._now = before
            keep_session(RUN, self.sessions[before])

    # --- tasks come ---

    def new_batch(self) -> int:
        """The number of a new batch: tasks that are submitted at once."""
        return next(self._batches)

    def add(self, label: str, task: Submitted) -> Alias:
        key = label, next(self._serial)
        self._waiting[key] = task
        return Alias(key)

    def wanted(self, ref: Alias) -> Result:
        result = self._wanted[ref.key] = self._wanted.get(ref.key) or Result(ref.key, self)
        return result

    def sent(self, value: Any) -> Result:
        """What the driver has."""
        key = "sent", next(self._serial)
        self._wanted[key] = result = Result(key, self)
        self.made[key] = Made(DRIVER, value)
        return result

    def drop(self) -> None:
        """Cancel all that was submitted or sent, as a scheduler does that drops the driver."""
        self._waiting.clear()
        self.made = {key: Made(DRIVER, CancelledError()) for key in self._wanted}
        for result in [*self._wanted.values()]:
            result.ended()

    # --- tasks run ---

    def run_one(self) -> None:
        """Run one of the tasks that may run now, chosen by chance."""
        self._forget()
        if key := self._next():
            self._run(key, self._waiting.pop(key))
            if (result := self._wanted.get(key)) is not None:
                result.ended()

    def _run(self, key: tuple[str, int], task: Submitted) -> None:
        failed = next((made for each in task.inputs if isinstance((made := self.made[each]).value, Exception)), None)
        if failed is not None:  # as Dask has it, what hangs on it has failed as well
            self.made[key] = failed
            return
        self.ran.append(Ran(key[0], task.worker, task.function))
        with self.being(task.worker):
            try:
                value = task.function(*self._given(task.args, task.worker))
            except Exception as error:
                value = error
        self.made[key] = Made(task.worker, value)

    def _next(self) -> tuple[str, int] | None:
        """A task of any worker that has some to run."""
        ready: dict[str, list[tuple[str, int]]] = {}
        for key, task in self._waiting.items():
            if all(each in self.made for each in task.inputs) and not self.held_up(key[0], task):
                ready.setdefault(task.worker, []).append(key)
        return self._chance.choice(self._chance.choice([*ready.values()])) if ready else None

    def _given(self, args: Iterable[Any], worker: str) -> list[Any]:
        return [
            self.made[each.key].on(worker)
            if isinstance(each, Result | Alias)
            else self._given(each, worker)
            if isinstance(each, list)
            else each
            for each in args
        ]

    def _forget(self) -> None:
        """Drop results and tasks that are wanted neither for themselves nor for what hangs on them."""
        left, needed = [*self._wanted], set[tuple[str, int]]()
        while left:
            if (key := left.pop()) not in needed:
                needed.add(key)
                left += self._waiting[key].inputs if key in self._waiting else ()
        self._waiting = {key: task for key, task in self._waiting.items() if key in needed}
        self.made = {key: made for key, made in self.made.items() if key in needed}


class TaskBundle(Bundle):
    """Tasks that are submitted at once."""

    def __init__(self, dispatch: DispatchHere) -> None:
        super().__init__(dispatch)
        self._tasks, self._batch = dispatch.tasks, dispatch.tasks.new_batch()

    def add(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Alias:
        return self._tasks.add(label, Submitted(self._batch, worker, function, args))

    def submit(self, wanted: Iterable[Alias]) -> dict[Any, Future]:
        return {ref.key: cast(Future, self._tasks.wanted(ref)) for ref in wanted}


@dataclass
class ClientOfTasks:
    """The part of a Dask client that asks workers beside their tasks."""

    loop: Any
    scheduler_comm: None = None

    async def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
        """Let none answer."""
        return {}


class ConnectionHere(Connection):
    """No scheduler knows anything."""

    def workers(self) -> dict[str, dict[str, Any]]:
        return {}

    def processing(self) -> dict[str, Any]:
        return {}


class WorkersHere(RunWorkers):
    """The workers stay as they are, but for those that a test lets come, or go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.going: list[str] = []
        self.cut_off: Tasks | None = None  # whose driver the scheduler drops next

    def look_round(self) -> bool:
        if (dropped := self.cut_off) is not None:
            self.cut_off = None
            dropped.drop()
            self.connection.go_on()
            raise CutOff
        gone, self.going = self.going, []
        if gone:
            raise WorkersLost(gone)
        return False

    def unheard(self, seconds: float) -> list[str]:
        return []


class DispatchHere(Dispatch):
    """Tasks run in this process. calibrations : what stands for a worker's task that measures it."""

    def __init__(
        self, workers: RunWorkers, tasks: Tasks, calibrations: Mapping[str, Callable[[], Calibration]]
    ) -> None:
        super().__init__(RUN, workers, 0.0)
        self.tasks, self._calibrations = tasks, calibrations

    def submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Future:
        task = Submitted(self.tasks.new_batch(), worker, function, args)
        if function is calibrate:
            task = replace(task, function=self._calibrations[worker], args=())
        return cast(Future, self.tasks.wanted(self.tasks.add(label, task)))

    def bundle(self) -> Bundle:
        return TaskBundle(self)

    def send_to(self, data: Any, address: str) -> Future:
        return cast(Future, self.tasks.sent(data))


class ResultsHere(Results):
    """A task runs whenever results are waited for."""

    def __init__(self, workers: RunWorkers, tasks: Tasks) -> None:
        super().__init__(workers, 0.0)
        self._tasks = tasks

    def next_ended(self) -> tuple[Name, Future] | None:
        if self.ended.empty():
            self._tasks.run_one()
        return None if self.ended.empty() else self.ended.get()

    def turn(self, futures: Iterable[Future]) -> set[Future]:
        self._tasks.run_one()
        return {future for future in futures if not future.done()}

    def fetch(self, future: Future) -> Any:
        value = self._tasks.made[future.key].on(DRIVER)
        if isinstance(value, CancelledError):
            self._workers.explain(value)
        if isinstance(value, Exception):
            raise value
        return value


@dataclass(frozen=True)
class InProcess:
    """A run's surroundings whose workers are all this process.

    Attributes
    ----------
    events : what the run has logged.
    saved : the states that it has saved.
    """

    context: RunContext
    tasks: Tasks
    events: list[Event]
    saved: list[TrainingState]

    @classmethod
    def of(
        cls, job: Job, dataset: Dataset, workers: Mapping[str, LocalWorker], *, seed: int = 0, late: Sequence[str] = ()
    ) -> InProcess:
        """The workers by name. seed: of the order in which tasks run. late: those that are not there at first."""
        events, saved = list[Event](), list[TrainingState]()
        members = tuple(member(name, each.kind) for name, each in workers.items() if name not in late)
        tasks = Tasks({name: each.session(job, dataset) for name, each in workers.items()}, seed)
        connection = ConnectionHere(cast(Any, ClientOfTasks(SimpleNamespace(asyncio_loop=tasks.loop))), lambda: None)
        there = WorkersHere(connection, Members(members, members[0], server_alone=False), events.append)
        measured = {name: partial(each.calibration, job, dataset) for name, each in workers.items()}
        dispatch, results = DispatchHere(there, tasks, measured), ResultsHere(there, tasks)
        context = Ways(RUN, connection, there, dispatch, results, 0.0).context(job, dataset, events, saved)
        return cls(context, tasks, events, saved)


@dataclass(frozen=True)
class LocalWorker:
    """A worker of a run in this process.

    Attributes
    ----------
    speed : samples a second of each stage, by its own account; what is not sharded takes it no time.
    throttle : factor by which it takes longer for its shards than it took when it was calibrated.
    problem : what its calibration raises.
    versions : those that differ from the driver's, by package.
    """

    speed: float = 1.0
    throttle: float = 1.0
    problem: Exception | None = None
    versions: dict[str, str] = field(default_factory=dict)
    kind: Literal["cpu", "gpu"] = "cpu"
    device: Callable[[], Device] = Device

    def session(self, job: Job, dataset: Dataset) -> Session:
        """Without any task so far."""
        device, clock, throttle = self.device(), time.perf_counter, self.throttle
        return Session(Replica(job, dataset, device, clock=clock, throttle=throttle, pause=list[float]().append))

    def calibration(self, job: Job, dataset: Dataset) -> Calibration:
        if self.problem is not None:
            raise self.problem
        named = convolutions(network_of(job, dataset), dataset.shape, 1, job.model.dtype)
        seconds = {name: 1 / self.speed for name, _ in named}
        return Calibration(sum(seconds.values()) or 1 / self.speed, seconds, {}, 1, "", 0, 0.0)


@dataclass(frozen=True)
class TrainedHere:
    """What a run came to.

    Attributes
    ----------
    ran : all tasks, in the order in which they ran.
    """

    events: list[Event]
    state: TrainingState
    ran: list[Ran]

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return of_kind(self.events, kind)

    @property
    def losses(self) -> list[float]:
        """The losses of the steps that were reported."""
        return [event.loss for event in self.of(StepsEnded) if event.loss is not None]

    @property
    def kernels(self) -> dict[str, dict[str, int]]:
        """The first shares, by worker and layer."""
        return self.of(KernelsSharded)[0].kernels


def train_here(
    tables: dict[str, Any],
    workers: Sequence[LocalWorker],
    *,
    seed: int = 0,
    prepare: Callable[[Tasks], None] = lambda tasks: None,
    heard: Heard | None = None,
    names: Sequence[str] = (),
    comes: Mapping[int, str] | None = None,
    goes: Mapping[int, str] | None = None,
    leaves: Mapping[int, str] | None = None,
    cut_off: Order | type[Order] | None = None,
) -> TrainedHere:
    """Run a job of strategy `layer`.

    seed: of the order in which tasks run. prepare: is done with all of them first. names: of the workers, if not cpu-0…
    comes, goes, leaves: the workers that come, are lost, or are to leave, once the step of this number has ended.
    cut_off: the order, or its kind, while which is carried out for the first time the scheduler drops the driver.
    """
    job = resolve(tables)
    dataset = open_dataset(str(job.data.path), limit=job.data.limit)
    names = names or [f"cpu-{i}" for i in range(len(workers))]
    comes, goes, leaves = comes or {}, goes or {}, leaves or {}
    late = [name for name in comes.values() if name not in goes.values()]
    here = InProcess.of(job, dataset, dict(zip(names, workers, strict=True)), seed=seed, late=late)
    there = cast(WorkersHere, here.context.workers)

    cuts = [] if cut_off is None else [cut_off]

    def hears(fact: Fact, found: list[Order]) -> None:
        if cuts and any(cuts[0] in (order, type(order)) for order in found):
            cuts.clear()
            there.cut_off = here.tasks
        if isinstance(fact, StepDone):
            there.newcomers += [member(comes[fact.number], "cpu")] if fact.number in comes else []
            if fact.number in leaves:
                shell.tell(WorkerLeaving((leaves[fact.number],), "it is shut down", fact.at))
            there.going += [goes[fact.number]] if fact.number in goes else []
        if heard is not None:
            heard(fact, found)

    with pytest.MonkeyPatch.context() as patch:
        found = {name: versions() | each.versions for name, each in zip(names, workers, strict=True)}
        patch.setattr(admission, "ask_workers", lambda *args, **how: Answers({a: found[a] for a in args[2]}, {}, ()))
        for module in ("layers.transfers", "worker.session"):
            patch.setattr(f"daskcnn.cluster.{module}.get_worker", lambda: here.tasks.worker)
        shell = Shell(here.context, LayerSharded(here.context, None), hears)
        try:
            prepare(here.tasks)
            state = shell.train()
        finally:
            here.tasks.close()
    return TrainedHere(here.events, state, here.tasks.ran)
