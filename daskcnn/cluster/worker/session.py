"""A worker's session of a run, which lasts between its tasks.

The resource that a worker advertises is enough for one task, so Dask runs one task of a run at a time. A worker without
the resource has no such limit. There tasks take turns (`in_turn`), because they share the replica's weights and its
scratch memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

from distributed import get_worker

from daskcnn.arrays import Array, Device, DeviceKind, device_profile, keep_freed_memory, release_freed_memory
from daskcnn.cluster.link.leaving import hold_end_up
from daskcnn.cluster.worker.farewell import Farewell, RoundKey
from daskcnn.errors import ClusterError, DataError
from daskcnn.job.dataset import opened
from daskcnn.job.network import check_vectors
from daskcnn.job.tables import Job
from daskcnn.ps.wire import Feedback
from daskcnn.store import BatchPlan
from daskcnn.store.array_index import ArrayChanged, ArrayIndex
from daskcnn.training.replica import Replica
from daskcnn.training.replica_exchange import ReplicaExchange

THROTTLE = "DASKCNN_THROTTLE"
"""Environment variable of a worker: a factor ≥ 1 by which it computes slower, to simulate a slower machine."""
T = TypeVar("T")


@dataclass
class Counters:
    """Counts a worker's seconds and bytes in a layer-sharded run since it was last asked.

    conv_seconds: by stage, for conv_samples forward and backward.
    """

    busy: float = 0.0
    conv_seconds: dict[str, float] = field(default_factory=dict)
    conv_samples: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0


class TaskMemory:
    """Keeps objects on a worker for later tasks, one of each class."""

    def __init__(self) -> None:
        self._by_class: dict[type[Any], Any] = {}

    def find(self, kind: type[T]) -> T | None:
        """Return the object of this class, if there is one."""
        return cast(T | None, self._by_class.get(kind))

    def put(self, thing: T) -> T:
        """Keep this in place of what was kept of its class."""
        self._by_class[type(thing)] = thing
        return thing

    def drop(self, kind: type[Any]) -> None:
        """Keep nothing of this class."""
        self._by_class.pop(kind, None)


@dataclass
class Session:
    """A worker's life in a run.

    Attributes
    ----------
    farewell : What the driver is to have of it if the worker leaves.
    order : The order of the samples in the present pass of a layer-sharded run, by its plan.
    exchange : Its exchanges with the server; None until it joins one. feedback: of pushes in int8.
    kept : Objects that tasks leave for later ones.
    sender : The thread of exchanges that overlap training.
    tickets : Numbers for pushes of which parts go ahead. parts: whether they are to now.
    number : Of the run's sessions on this worker. Later ones have higher numbers.
    """

    replica: Replica
    farewell: Farewell = field(default_factory=Farewell)
    counters: Counters = field(default_factory=Counters)
    order: tuple[BatchPlan, Array] | None = None
    exchange: ReplicaExchange | None = None
    feedback: Feedback | None = None
    kept: TaskMemory = field(default_factory=TaskMemory)
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "daskcnn-exchange"))
    tickets: Iterator[int] = field(default_factory=partial(count, 1))
    parts: bool = False
    number: int = 0


class SessionGone(ClusterError):
    """A worker has no session of the run: it was started anew, or another run has begun there. value: names it."""


_sessions: dict[tuple[str, str], Session] = {}  # by run and worker: a process may be several workers
_lock = threading.Lock()


def _here() -> str:
    """Return the address of the worker that runs this task; empty where this process is no worker."""
    try:
        return str(get_worker().address)
    except ValueError:
        return ""


def check_dataset(job: Job, fingerprint: str, index: ArrayIndex | None = None) -> str | None:
    """Return None if this worker sees the same data set, else the reason.

    Reads a chunk of arrays in place, and raises ArrayChanged if it differs from the driver's index.
    """
    try:
        dataset = opened(job.data, index)
        if job.data.in_place:
            dataset.train.read(0, 1)
    except ArrayChanged:
        raise
    except DataError as error:
        return str(error)
    found = dataset.fingerprint
    return None if found == fingerprint else f"{dataset.path} holds another data set (fingerprint {found[:12]})"


def open_session(
    run: str,
    job: Job,
    kind: DeviceKind,
    index: ArrayIndex | None = None,
    *,
    number: int = 0,
    compiling: Callable[[int, int], None] = lambda done, of: None,
) -> Session:
    """Begin the run on this worker, and forget other runs and its own session before.

    compiling: is told how many loops are compiled, and of how many, if this machine has to compile them.
    Raises ClusterError without the device, or with too little memory for the network.
    """
    with _lock:
        here = _here()
        for other, worker in list(_sessions):
            if worker == here:
                forget_run(other)
        threads = job.train.threads or get_worker().state.nthreads
        dataset = opened(job.data, index)
        if kind == "cpu":  # a GPU says itself when it is full
            own = get_worker().memory_manager.memory_limit if here else None
            check_vectors(job, dataset, own or device_profile("cpu", 1).memory)
        limit = job.train.workspace_mib << 20
        how = {"exact": job.train.exact, "tuned": not job.train.reproducible}
        device = Device.of(kind, threads=threads, workspace_limit=limit, **how)
        device.warm(job.model.dtype, compiling)
        throttle = float(os.environ.get(THROTTLE, "1"))
        # a GPU's work, and that of other threads, takes none of this thread's time
        own = time.thread_time if kind == "cpu" and threads == 1 else None
        slowed: dict[str, Any] = {"throttle": throttle, "pause": time.sleep, "own": own}
        replica = Replica(job, dataset, device, clock=time.perf_counter, **slowed)
        keep_freed_memory()
        session = keep_session(run, Session(replica, number=number))
        needed = job.train.shards_kernels or (job.rule is not None and job.rule.serverless)
        hold_end_up(run, "replica", session.farewell, tasks=needed)
        return session


def keep_session(run: str, session: Session) -> Session:
    """Make this the worker's session of the run."""
    _sessions[run, _here()] = session
    return session


def session_of(run: str, worker: str | None = None) -> Session:
    """Return this worker's session of the run.

    Raises SessionGone where the worker was started anew, or another run has begun there. That is none that holds a
    lease on it: the scheduler gives a worker to one run alone.

    worker : its address, where this is no task of it.
    """
    here = _here() if worker is None else worker
    session = _sessions.get((run, here))
    if session is None:
        reason = "it was started anew, or a run without a lease on it has begun there"
        raise SessionGone(f"worker {here}", reason, "resume this run, and let all drivers be of one version")
    return session


def forget_run(run: str, until: int | None = None, dask_worker: Any = None) -> None:
    """Free what the run keeps on this worker.

    until: the number of its last session that is to be forgotten: by the time that this is heard it may have begun
    another one. None: any. dask_worker: the worker, where this is no task of it.
    """
    key = run, _here() if dask_worker is None else dask_worker.address
    session = _sessions.get(key)
    if session is not None and (until is None or session.number <= until):
        _sessions.pop(key, None)
        session.farewell.forget()
        session.replica.device.pool.close()
        session.sender.shutdown(wait=False)
        del session
        release_freed_memory()


async def await_release(run: str, dask_worker: Any) -> None:
    """Let this worker, which is to end, wait until the run has what it needs of it, and forgets it."""
    if (session := _sessions.get((run, dask_worker.address))) is not None:
        session.farewell.heard = True


async def end_round(run: str, key: RoundKey, within: float, dask_worker: Any) -> Any:
    """Let a round of this worker end early, and return its report, as `Farewell.report` does."""
    session = _sessions.get((run, dask_worker.address))
    return None if session is None else await session.farewell.report(key, within)


async def ask_to_end(run: str, key: RoundKey, dask_worker: Any) -> None:
    """Let a round of this worker end early. Its report is the result of its task."""
    if (session := _sessions.get((run, dask_worker.address))) is not None:
        session.farewell.ask(key)


_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by the worker's address


def in_turn(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function once no other task of a run is at work on this worker."""
    with _locks[get_worker().address]:
        return function(*args)


def stopped() -> bool:
    """Return True if the task in this thread was cancelled, by the driver or because the driver is gone.

    Do not rely on it in a task that depends on an actor: see `server.actor.ServerAt`.
    """
    return stop_signal()()


def stop_signal() -> Callable[[], bool]:
    """Return a function that any thread can call for the same answer about this thread's task."""
    worker = get_worker()
    key = worker.get_current_task()

    def stopped() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state != "executing"

    return stopped
