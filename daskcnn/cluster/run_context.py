"""What both strategies share: the run's surroundings, its resumable state, its workers and their tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NoReturn, TypeVar

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import Alias, List, Task
from distributed import Client, Future, KilledWorker, wait

from daskcnn.arrays import Array
from daskcnn.cluster.calls import Unanswered, answer_to, ask_scheduler, ask_workers, silent_among
from daskcnn.cluster.members import Member, Members, advertised, present
from daskcnn.cluster.protocol import Calibration
from daskcnn.cluster.session.session import forget_run
from daskcnn.cluster.session.tasks import score_weights
from daskcnn.errors import Interrupted, Lost
from daskcnn.events import Event, Warned, WorkerIgnored, WorkerLost
from daskcnn.job.tables import Job
from daskcnn.nn.score import Score
from daskcnn.partition.proportional import proportional
from daskcnn.runs.state import TrainingState
from daskcnn.sharded import WorkerLinks
from daskcnn.store import Dataset
from daskcnn.training.coordinator.settings import PATIENCE

K = TypeVar("K")
LOOK = 0.5  # seconds between two looks at who is there, while tasks run
FREED = 20.0  # seconds at most that workers may take to free what a run keeps: one that hangs is left alone
EXPLAINED = 20.0  # seconds within which the scheduler says that a worker is gone, once its task has failed


class WorkersLost(Exception):
    """Workers of the run are gone."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(", ".join(self.names))


class NotYet(Exception):
    """A result has not come so far."""


class ServerLost(Exception):
    """The worker that held the parameter server is gone."""


class Bundle:
    """Tasks that go to the scheduler in one message: a task by itself costs it a millisecond."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._layers: dict[str, dict[Any, Task]] = {}

    def add(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Alias:
        """A task of this worker, as `RunContext.submit` would make it; returns what other tasks may be given for it."""
        key = self._context.key(label)
        own = self._layers.setdefault(worker, {})
        own[key] = Task(key, function, *map(_argument, args))
        return Alias(key)

    def submit(self, wanted: Iterable[Alias]) -> dict[Any, Future]:
        """Submit them all; futures by key of those that are wanted, the others are forgotten when they are used."""
        alive = self._context.alive
        layers = {
            worker: MaterializedLayer(
                own,
                annotations={
                    "workers": [alive[worker].address],
                    "resources": alive[worker].resource,
                    "allow_other_workers": False,
                },
            )
            for worker, own in self._layers.items()
        }
        graph = HighLevelGraph(layers, {worker: set() for worker in layers})  # tasks say what they depend on
        keys = list(dict.fromkeys(ref.key for ref in wanted))
        return dict(zip(keys, self._context.client.get(graph, keys, sync=False), strict=True))


def _argument(value: Any) -> Any:
    """A task's argument: results of other tasks, by themselves or in a list, are replaced by what they come to."""
    if isinstance(value, Future):
        return Alias(value.key)
    return List(*map(_argument, value)) if isinstance(value, list) else value


@dataclass
class RunContext:
    """A run's surroundings. `emit` takes events, `save` keeps a state, `interrupted` gives the signal that came."""

    client: Client
    name: str
    job: Job
    dataset: Dataset
    members: Members
    calibrations: dict[str, Calibration]
    emit: Callable[[Event], None]
    save: Callable[[TrainingState], None]
    interrupted: Callable[[], int | None]
    needs_server: bool = False
    hosts: frozenset[str] = frozenset()  # addresses of workers that hold a part of the server
    links: WorkerLinks | None = None  # of layer-sharded runs, once they are measured
    takes_newcomers: bool = False  # workers that come in mid-run are of use
    newcomers: list[Member] = field(default_factory=list)  # those that came, until they are taken from here
    alive: dict[str, Member] = field(init=False)
    _known: set[str] = field(init=False)
    _serial: count[int] = field(init=False, default_factory=count)
    _looked: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.alive = {m.name: m for m in self.members.workers}
        self._known = set(self._present())

    @property
    def samples(self) -> int:
        """Samples that are trained on; those of the validation slice lie behind them."""
        return len(self.dataset.train) - self.job.data.validation

    def look_round(self) -> bool:
        """See who is there; False where that was a moment ago. New workers are noted, or mentioned and ignored.

        Raises WorkersLost, ServerLost, Lost where the scheduler itself is gone, Interrupted after a signal.
        """
        self.heed()
        if time.monotonic() - self._looked < LOOK:
            return False
        self._looked = time.monotonic()
        now = self._present()
        for member in advertised({a: info for a, info in now.items() if a not in self._known}):
            if self.takes_newcomers and member.kind != "ps":
                self.newcomers.append(member)
            else:
                self.emit(WorkerIgnored(address=member.address))
        self._known |= set(now)
        if gone := [name for name, member in self.alive.items() if member.address not in now]:
            raise WorkersLost(gone)
        if self.needs_server and not {self.members.server.address, *self.hosts} <= now.keys():
            raise ServerLost
        return True

    @staticmethod
    def new_name(kind: str, taken: Iterable[str]) -> str:
        """The next name of a worker of this kind that nobody in the run has had."""
        numbers = [int(name.removeprefix(f"{kind}-")) for name in taken if name.startswith(f"{kind}-")]
        return f"{kind}-{max(numbers, default=-1) + 1}"

    def heed(self) -> None:
        """Raise Interrupted after a signal."""
        if (signum := self.interrupted()) is not None:
            raise Interrupted(f"interrupted by signal {signum}", signum)

    def _present(self) -> dict[str, Any]:
        address = self.client.scheduler.address
        try:
            now = present(self.client, self.heed)
        except OSError as error:
            raise Lost(f"scheduler {address}: connection lost") from error
        if self.client.status != "running":
            raise Lost(f"scheduler {address}: connection lost")
        return now

    def scheduler_seconds(self) -> float:
        """Seconds of processor that the scheduler has had so far. Raises Lost where it is gone."""
        try:
            return float(ask_scheduler(self.client, time.process_time, check=self.heed))
        except OSError as error:
            raise Lost(f"scheduler {self.client.scheduler.address}: connection lost") from error

    def processing(self) -> dict[str, Any]:
        """Tasks of each worker, by address, as the scheduler has them; none where it does not answer."""
        with suppress(OSError):
            return dict(answer_to(self.client, self.client.scheduler.processing(workers=None), check=self.heed))
        return {}

    def silent(self, seconds: float) -> list[str]:
        """Workers of the run that the scheduler has not heard of for so long, while it heard of others."""
        seen = {address: float(info["last_seen"]) for address, info in self._present().items()}
        newest = max(seen.values(), default=0.0)
        return [name for name, member in self.alive.items() if newest - seen.get(member.address, 0.0) > seconds]

    def new_host(self) -> Member:
        """The server goes to another worker set apart for it, else to one of the run, unless its own is there yet.

        Raises Lost where none of them answers.
        """
        members, now = self.members, self._present()
        apart = [member for member in (members.server, *members.servers) if member.address in now]
        silent = self.silent_now(member.address for member in (*apart, *self.alive.values()))
        apart = [member for member in apart if member.address not in silent]
        if not (able := apart or [member for member in self.alive.values() if member.address not in silent]):
            raise Lost(f"workers {', '.join(sorted(silent))}: none answers, and the parameter server needs one")
        host = able[0]
        alone = members.server_alone if apart else False
        servers = tuple(member for member in apart if member is not host)
        self.members = replace(members, server=host, servers=servers, server_alone=alone)
        return host

    def lose(self, worker: str, reason: str, samples_moved: int = 0) -> None:
        """The run goes on without this worker. Raises Lost where it was the last."""
        member = self.alive.pop(worker)
        self.emit(WorkerLost(worker=worker, reason=reason, samples_moved=samples_moved))
        if not self.alive:
            raise Lost(f"worker {worker} ({member.address}): {reason}, and it was the last of the run")

    def within(self, workers: Iterable[str]) -> RunContext:
        """The same surroundings with these workers only. Who is lost is told to the whole one."""
        part = copy(self)
        part.alive = {worker: self.alive[worker] for worker in workers}
        return part

    def key(self, label: str) -> tuple[str, int]:
        """A key that no other task has; the dashboard groups by the label."""
        return f"{label}-{self.name}", next(self._serial)

    def submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Future:
        """Run a task on this worker of the run, by its own kind of resource and nowhere else."""
        member = self.alive[worker]
        return self.client.submit(
            function,
            *args,
            key=self.key(label),
            workers=[member.address],
            resources=member.resource,
            allow_other_workers=False,
            pure=False,
        )

    def bundle(self) -> Bundle:
        """Tasks to be submitted all at once."""
        return Bundle(self)

    def ignore_signals(self) -> None:
        """From now on nothing interrupts: what is under way is finished and kept."""
        self.interrupted = lambda: None

    def settle(self, futures: Iterable[Future], *, within: float) -> None:
        """Wait until all have ended, one way or another, looking round meanwhile.

        Raises TimeoutError where they take longer than `within` seconds.
        """
        deadline, waiting = time.monotonic() + within, set(futures)
        while waiting := self.turn(waiting):
            self.look_round()
            if time.monotonic() > deadline:
                raise TimeoutError

    def turn(self, futures: Iterable[Future]) -> set[Future]:
        """Wait a moment; those that have not ended then. Raises WorkersLost where one was cancelled with its data."""
        waiting = set(futures)
        try:
            return set(wait(waiting, timeout=LOOK, return_when="FIRST_COMPLETED").not_done)
        except TimeoutError:
            return waiting
        except CancelledError as error:
            self.explain(error)

    def gather(self, futures: Mapping[K, Future], *, within: float | None = None) -> dict[K, Any]:
        """Results by the same keys. Raises what the tasks raise, WorkersLost, and so on.

        `within`: seconds, the stall timeout by default, after which the keys are workers, and those whose task
        has not ended or whose result does not come, are taken for lost.
        """
        deadline = time.monotonic() + (self.job.cluster.stall_timeout if within is None else within)
        waiting = set(futures.values())
        while waiting := self.turn(waiting):
            self.look_round()
            if time.monotonic() > deadline:
                raise WorkersLost(str(key) for key, future in futures.items() if future in waiting)
        return {key: self.result(future, str(key), deadline) for key, future in futures.items()}

    def result(self, future: Future, worker: str = "", deadline: float = math.inf) -> Any:
        """The task's result, looking round meanwhile. Raises as `fetch` and `look_round`, WorkersLost when late."""
        while True:
            try:
                return self.fetch(future)
            except NotYet:
                self.look_round()
                if time.monotonic() > deadline:
                    raise WorkersLost([worker]) from None

    def fetch(self, future: Future) -> Any:
        """The task's result, if it comes in a moment: where it has ended, its worker may be lost or held up since.

        Raises NotYet, WorkersLost or ServerLost where that is why there is none, or what the task raises.
        """
        try:
            return future.result(timeout=LOOK)
        except (KilledWorker, CancelledError) as error:
            self.explain(error)
        except RuntimeError as error:
            if "Actor was lost" in str(error):  # what the server's future has then
                self.explain(error)
            raise
        except OSError as error:
            if future.status == "error":
                self.explain(error)
            raise NotYet from None  # it was the timeout of this turn

    def explain(self, error: BaseException) -> NoReturn:
        """Raise who was lost, as soon as the scheduler knows, in place of the error that it led to."""
        deadline = time.monotonic() + EXPLAINED
        while time.monotonic() < deadline:
            self.look_round()
            time.sleep(LOOK / 5)
        raise error

    def send(self, data: Any, workers: Iterable[str] | None = None) -> Future:
        """Data to these workers (all by default), as a future for their tasks; it has no lineage."""
        return self.send_to(data, [self.alive[name].address for name in workers or self.alive])

    def send_to(self, data: Any, addresses: list[str]) -> Future:
        """Data to the workers at these addresses. Raises WorkersLost or ServerLost where one is gone or silent."""
        options = {"workers": addresses, "broadcast": True, "hash": False, "asynchronous": True}
        limit = self.job.cluster.stall_timeout
        try:
            (future,) = answer_to(self.client, self.client.scatter([data], **options), within=limit, check=self.heed)
        except Interrupted:
            raise
        except Unanswered:
            self.require_answers(addresses)
            raise Lost(
                f"workers {', '.join(addresses)}: data did not arrive within {limit:g} s; look at their links with "
                "`daskcnn doctor`, or raise cluster.stall_timeout"
            ) from None
        except Exception as error:  # Dask has a different one for every moment at which a worker may go
            self.explain(error)
        return future

    def silent_now(self, addresses: Iterable[str]) -> set[str]:
        """Which workers do not answer. Raises Lost where the scheduler is gone."""
        try:
            return silent_among(self.client, dict.fromkeys(addresses), check=self.heed)
        except OSError as error:
            raise Lost(f"scheduler {self.client.scheduler.address}: connection lost") from error

    def require_answers(self, addresses: Iterable[str]) -> None:
        """Raise WorkersLost or ServerLost where one of them does not answer."""
        silent = self.silent_now(addresses)
        if names := [name for name, member in self.alive.items() if member.address in silent]:
            raise WorkersLost(names)
        if silent:
            raise ServerLost

    def score(self, weights: Array, split: str, lo: int, hi: int) -> Score:
        """Judge weights on samples lo…hi of a split, each worker a part by its speed; again if one is lost."""
        while True:
            try:
                return self._score(weights, split, lo, hi)
            except WorkersLost as lost:
                for name in lost.names:
                    self.lose(name, "connection lost")
            except ServerLost:
                self.needs_server = False  # nor does scoring: who does will ask it, and see

    def _score(self, weights: Array, split: str, lo: int, hi: int) -> Score:
        vector, total = self.send(weights), Score(0.0, 0, 0)
        futures, slowest = {}, 0.0
        for name, begin, end in self.parts(lo, hi):
            futures[name] = self.submit("score", score_weights, self.name, vector, split, begin, end, worker=name)
            slowest = max(slowest, (end - begin) * self.calibrations[name].seconds_per_sample)
        for part in self.gather(futures, within=self.job.cluster.stall_timeout + PATIENCE * slowest).values():
            total += part
        return total

    def parts(self, lo: int, hi: int) -> list[tuple[str, int, int]]:
        """lo…hi cut over the workers in proportion to their calibrated speed."""
        names = [name for name in self.alive if name in self.calibrations]
        speeds = [1 / self.calibrations[name].seconds_per_sample for name in names]
        cut, begin = [], lo
        for name, size in zip(names, proportional(hi - lo, speeds), strict=True):
            if size:
                cut.append((name, begin, begin + size))
            begin += size
        return cut

    def close(self) -> None:
        """Free what the run keeps on the workers that are left, and warn of those that do not answer."""
        self.ignore_signals()
        there = {m.address: name for name, m in self.alive.items()}
        addresses = self._present().keys() & there.keys()
        limit = min(FREED, self.job.cluster.stall_timeout)
        answers = ask_workers(self.client, forget_run, addresses, self.name, within=limit)
        for address in answers.silent:
            value, remedy = f"worker {there[address]} ({address})", "restart it"
            reason = f"no answer within {limit:g} s, it may keep the run's memory"
            self.emit(Warned(value=value, reason=reason, remedy=remedy))
