"""A run in this process: the driver, the workers' tasks and the server are a cluster's; Dask alone is left out.

Each worker has a thread that makes its tasks one after the other, as a worker of one thread does. A result that comes
from another worker has been through Dask's serialisation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dask.task_spec import Alias
from distributed.protocol import deserialize, serialize

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.cluster.groups.group_tasks import GroupMeeting
from daskcnn.cluster.layers.task_context import TaskContext
from daskcnn.cluster.link.calls import ServerLost
from daskcnn.cluster.link.client import Connection, heed_signals
from daskcnn.cluster.link.members import Member, Members
from daskcnn.cluster.link.sent import Sent
from daskcnn.cluster.messages import Calibration, RoundOrder
from daskcnn.cluster.peers import pieces
from daskcnn.cluster.peers.pieces import Peers
from daskcnn.cluster.run.context import Bundle, Dispatch
from daskcnn.cluster.run.early_ends import EarlyEnds
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.server import actor as server_actor
from daskcnn.cluster.server import stream
from daskcnn.cluster.shell.data_parallel import DataParallel
from daskcnn.cluster.shell.shell import Heard, Shell
from daskcnn.cluster.worker import session as stopping
from daskcnn.cluster.worker.session import Session, forget_run, keep_session
from daskcnn.cluster.worker.tasks import calibrate
from daskcnn.errors import PushRefused
from daskcnn.events import Event
from daskcnn.job.network import network_of
from daskcnn.job.tables import Job
from daskcnn.ps import Leave, Push, Refuse, Reply, Request, RuleState
from daskcnn.runs.state import TrainingState
from daskcnn.sharded.cutting import stages_of
from daskcnn.store import Dataset
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.replica import Replica
from tests.cluster.surroundings import E, Ways, member, of_kind

NAME = "run-here"


def assert_same(weights: np.ndarray, others: np.ndarray) -> None:
    """Two runs went the same way. How a library rounds a sum may depend on where an array lies in memory."""
    np.testing.assert_allclose(weights, others, rtol=1e-5, atol=2e-7)


class TaskHere:
    """A task's result to come, with what of a Dask future the driver uses.

    Attributes
    ----------
    state : what its worker is asked for by a task that wants to know whether it was stopped.
    """

    def __init__(self, key: Any, worker: str, future: Future[Any] | None = None) -> None:
        self.key, self.worker, self.future = key, worker, future or Future()
        self.state = "executing"

    @property
    def status(self) -> str:
        """As Dask calls it."""
        failed = self.done() and not self.future.cancelled() and self.future.exception() is not None
        return "error" if failed else "finished" if self.done() else "pending"

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float | None = None) -> Any:
        if self.state == "dropped":
            raise CancelledError
        return self.future.result(timeout)

    def add_done_callback(self, told: Callable[[Any], None]) -> None:
        self.future.add_done_callback(lambda _: told(self))

    def cancel(self) -> None:
        self.state = "cancelled"
        self.future.cancel()

    def drop(self) -> None:
        """Cancel it as a scheduler does that drops the driver: a result that there is is gone."""
        self.cancel()
        self.state = "dropped"

    def release(self) -> None:
        """Results are kept until the run is over."""


class ThreadsHere:
    """Threads that make the tasks of workers, each worker's in the order in which they were submitted.

    Attributes
    ----------
    tasks : all so far, by key.
    submitted : is told each, as its worker is about to have it.
    """

    submitted: Callable[[TaskHere], None] = staticmethod(lambda task: None)

    def __init__(self, names: Iterable[str]) -> None:
        self._threads = {name: ThreadPoolExecutor(1, f"worker-{name}") for name in names}
        self._present = threading.local()
        self.tasks: dict[Any, TaskHere] = {}

    def submit(self, key: Any, worker: str, function: Callable[..., Any], args: Sequence[Any]) -> TaskHere:
        """Make the task once the results that it is given are there: all of them were submitted before."""

        def made() -> Any:
            self._present.key = key
            return function(*[self._given(worker, arg) for arg in args])

        self.tasks[key] = task = TaskHere(key, worker)
        task.future = self._threads[worker].submit(made)
        self.submitted(task)
        return task

    def keep(self, key: Any, worker: str, value: Any) -> TaskHere:
        """A result that was sent."""
        self.tasks[key] = task = TaskHere(key, worker)
        task.future.set_result(value)
        return task

    def _given(self, worker: str, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._given(worker, each) for each in arg]
        task = self.tasks[arg.key] if isinstance(arg, Alias | TaskHere) else None
        if task is None:
            return _at(worker, arg)
        found = task.result()
        return found if task.worker == worker else deserialize(*serialize(found))

    def worker(self) -> Any:
        """This thread's worker, as a task asks Dask for it."""
        return SimpleNamespace(get_current_task=lambda: self._present.key, state=self, address="")

    def close(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()
        for thread in self._threads.values():
            thread.shutdown()


def _at(worker: str, arg: Any) -> Any:
    """The argument as this worker gets it: the run has a name at each of them, for all sessions are in this process."""
    match arg:
        case str() if arg == NAME:
            return f"{NAME}@{worker}"
        case TaskContext() | Peers() | RoundOrder():
            return replace(arg, run=f"{NAME}@{worker}")
        case Sent():
            return arg.value
        case GroupMeeting():
            return replace(arg, order=_at(worker, arg.order))
        case _:
            return arg


class ActorHere:
    """The server's actor on an event loop of its own. A call gives the answer to come.

    Attributes
    ----------
    requests : what workers asked, in order, with payloads.
    """

    def __init__(self, actor: Any) -> None:
        self._actor, self.requests = actor, list[Request]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-here", daemon=True)
        self._thread.start()

    def handle(self, request: Request) -> Future[Any]:
        if isinstance(request, Push):  # the replica may use its memory again
            request = replace(request, payload=request.payload.copy())
        return self._called("handle", request, noted=request)

    def leave(self, worker: str, session: int, last: int = 0) -> Future[Any]:
        return self._called("leave", worker, session, last, noted=Leave(worker, session, last=last))

    def go_on_with(self, state: RuleState) -> Future[Any]:
        return self._called("go_on_with", state)

    def snapshot(self) -> Future[Any]:
        return self._called("snapshot")

    def waiting(self) -> Future[Any]:
        return self._called("waiting")

    def _called(self, method: str, *args: Any, noted: Request | None = None) -> Future[Any]:
        async def called() -> Any:
            self.requests += [noted] if noted else []  # the actor handles them in the order of these calls
            return await getattr(self._actor, method)(*args)

        return asyncio.run_coroutine_threadsafe(called(), self._loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_unanswered_calls_end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _unanswered_calls_end() -> None:
    """Calls that still wait behind a barrier are cancelled, without an answer."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for call in left:
        call.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class EndHere:
    """A way to the desk of another worker of this process."""

    def __init__(self, secret: str) -> None:
        self._desk, self._answers = stream._servers[secret], SimpleQueue[Any]()

    def begin(self, request: Push, stopped: Callable[[], bool]) -> None:
        self._desk.serve(replace(request, payload=request.payload.copy()), self._answers.put)

    def finish(self, request: Push, stopped: Callable[[], bool]) -> Reply:
        while True:
            try:
                answer = self._answers.get(timeout=0.1)
            except Empty:
                if stopped():
                    raise EOFError from None
                continue
            if isinstance(answer, Refuse):
                raise PushRefused(answer.reason, answer.code)
            assert isinstance(answer, Reply)
            return answer

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(eq=False)
class ClientHere:
    """What of a Dask client starts actors."""

    threads: ThreadsHere
    actors: dict[Any, ActorHere] = field(default_factory=dict)
    scheduler_comm: object = None

    def cut_off(self) -> None:
        """Lose the connection, with all tasks, and be connected again."""
        for task in [*self.threads.tasks.values()]:
            task.drop()
        self.scheduler_comm = object()

    def subscribe_topic(self, topic: str, heard: Callable[..., None]) -> None:
        """Nobody sends any."""

    def submit(self, kind: Callable[..., Any], *args: Any, key: Any, workers: list[str], **options: Any) -> TaskHere:
        placing = ("actor", "resources", "allow_other_workers", "pure")
        own = {name: value for name, value in options.items() if name not in placing}
        given = [arg.result() if isinstance(arg, TaskHere) else arg for arg in args]
        actor = self.actors[key] = ActorHere(kind(*given, **own))
        return self.threads.keep(key, workers[0], actor)


class BundleHere(Bundle):
    """Tasks that are submitted as they are put in."""

    def __init__(self, dispatch: DispatchHere) -> None:
        super().__init__(dispatch)
        self._here = dispatch

    def add(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Alias:
        return Alias(self._here.submit(label, function, *args, worker=worker).key)

    def submit(self, wanted: Iterable[Alias]) -> dict[Any, Any]:
        return {ref.key: self._here.threads.tasks[ref.key] for ref in wanted}


class ConnectionHere(Connection):
    """The workers stay as they are, but for those that a test takes away. members : those of the run."""

    def __init__(self, client: Any, interrupted: Callable[[], int | None], members: Members) -> None:
        super().__init__(client, heed_signals(interrupted))
        self.away = set[str]()
        self._there = {
            each.address: {"name": each.name, "host": "here", "nthreads": 1, "resources": {each.kind.upper(): 1}}
            for each in (*members.workers, members.server)
        }

    def workers(self) -> dict[str, dict[str, Any]]:
        return {address: info for address, info in self._there.items() if address not in self.away}

    def silent(self, addresses: Iterable[str]) -> set[str]:
        return set()

    def first_to_answer(self, addresses: Iterable[str]) -> str | None:
        return next(iter(addresses), None)


class DispatchHere(Dispatch):
    """Tasks are made by threads of this process.

    Attributes
    ----------
    sessions : those of all workers.
    """

    def __init__(self, workers: RunWorkers, limit: float, threads: ThreadsHere, dataset: Dataset) -> None:
        super().__init__(NAME, workers, limit)
        self.threads, self._dataset = threads, dataset
        self.sessions: list[Session] = []

    def only(self, workers: RunWorkers) -> Dispatch:
        part = copy(self)
        part.workers = workers
        return part

    def submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Any:
        function = self._calibrated if function is calibrate else function
        return self.threads.submit(self.key(label), worker, function, args)

    def submit_at(self, host: Member, label: str, function: Callable[..., Any], *args: Any) -> Any:
        return self.threads.submit(self.key(label), host.name, function, args)

    def bundle(self) -> Bundle:
        return BundleHere(self)

    def send_to(self, data: Any, address: str) -> Any:
        return self.threads.keep(self.key("sent"), address, deserialize(*serialize(data)))

    def _calibrated(self, run: str, job: Job, *_: Any) -> Calibration:
        """All are equally fast, and each look at a clock takes a millisecond: the machine's own speed does not show."""
        ticks = count()
        device = Device(tuned=False)  # what was measured before does not show either
        replica = Replica(job, self._dataset, device, clock=lambda: next(ticks) / 1000)
        self.sessions.append(keep_session(run, Session(replica)))
        convs = {stage.name: 1e-3 for stage in stages_of(network_of(job, self._dataset)) if stage.name}
        return Calibration(2e-3, convs, {}, 1, "here", 0, None)


class ResultsHere(Results):
    """Waits for threads."""

    def turn(self, futures: Iterable[Any]) -> set[Any]:
        wait([future.future for future in futures], timeout=0.5, return_when="FIRST_COMPLETED")
        return {future for future in futures if not future.done()}


class ShellHere(Shell):
    """Calls workers, whose addresses are their names, beside their tasks."""

    def ask(self, address: str, function: Callable[..., Any], *args: Any) -> None:
        found = function(f"{NAME}@{address}", *args, dask_worker=SimpleNamespace(address=""))
        if asyncio.iscoroutine(found):
            asyncio.run(found)


class RunHere:
    """One run of a resolved job.

    Parameters
    ----------
    workers : their number, or their names.
    interrupted_after : states that are saved before a signal comes; None: there is no signal.
    server_lost_after : states that are saved before the server is lost; None: it is not.
    cut_off : the label of the task with which the scheduler drops the driver, the first time; empty: it does not.
    heard : is told every fact too, with the orders that it led to.

    Attributes
    ----------
    heard : facts, and the orders that they led to.
    saved : states in the order in which they were saved.
    shell : of the last time that it was trained.
    connection : likewise.
    """

    shell: Shell
    connection: ConnectionHere

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        workers: int | Sequence[str],
        *,
        interrupted_after: int | None = None,
        server_lost_after: int | None = None,
        cut_off: str = "",
        heard: Heard = lambda fact, found: None,
    ) -> None:
        self.job, self.dataset, self._limit, self._heard = job, dataset, interrupted_after, heard
        self._server_lost, self._cut_off = server_lost_after, cut_off
        self.names = [f"cpu-{i}" for i in range(workers)] if isinstance(workers, int) else [*workers]
        self.events: list[Event] = []
        self.heard: list[tuple[Fact, list[Order]]] = []
        self.saved: list[TrainingState] = []
        self._actors: dict[Any, ActorHere] = {}

    def train(self, resumed: TrainingState | None = None) -> np.ndarray:
        """To the end; returns the weights. Raises as a cluster's run does."""
        threads, limit = ThreadsHere([*self.names, "ps"]), self.job.cluster.stall_timeout
        members = Members(tuple(member(name, "cpu") for name in self.names), member("ps", "ps"), True)
        client = ClientHere(threads, self._actors)
        self.connection = connection = ConnectionHere(client, self._signal, members)

        def submitted(task: TaskHere) -> None:
            if task.key[0] == f"{self._cut_off}-{NAME}":
                self._cut_off = ""
                client.cut_off()

        threads.submitted = submitted
        workers = RunWorkers(connection, members, self.events.append)
        dispatch, results = DispatchHere(workers, limit, threads, self.dataset), ResultsHere(workers, limit)
        ways = Ways(NAME, connection, workers, dispatch, results, limit)
        context = ways.context(self.job, self.dataset, self.events, self.saved)
        with pytest.MonkeyPatch.context() as patch, single_threaded_blas():
            patch.setattr(stopping, "get_worker", threads.worker)
            patch.setattr(EarlyEnds, "ask", lambda *_: None)  # their rounds go on to their end
            patch.setattr(server_actor, "Actor", lambda kind, address, key: self._actors[key])
            patch.setattr(stream, "get_worker", lambda: SimpleNamespace(handlers={}))
            patch.setattr(pieces, "end_of", lambda peers, name, other, *_: EndHere(peers.desk(other)))
            try:
                strategy = DataParallel(context, resumed)
                self.shell = ShellHere(context, strategy, self._hear)
                state = self.shell.train()
            finally:
                threads.close()
                for session in dispatch.sessions:
                    session.sender.shutdown()
                for actor in self._actors.values():
                    actor.close()
                for name in self.names:
                    forget_run(f"{NAME}@{name}")
        return np.asarray(state.weights)

    def _hear(self, fact: Fact, found: list[Order]) -> None:
        self.heard.append((fact, found))
        self._heard(fact, found)

    def _signal(self) -> int | None:
        if self._server_lost is not None and len(self.saved) >= self._server_lost:
            self._server_lost = None
            raise ServerLost
        return 15 if self._limit is not None and len(self.saved) >= self._limit else None

    @property
    def requests(self) -> list[Request]:
        """The workers' requests to the server, in order, with payloads, and their leaving."""
        return [request for actor in self._actors.values() for request in actor.requests]

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return of_kind(self.events, kind)
