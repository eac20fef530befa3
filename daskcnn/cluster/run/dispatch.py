"""Sends tasks and data to the workers of a run: each to the worker that it is for, and to no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.task_spec import Alias, List, Task
from distributed import Client, Future

from daskcnn.cluster.link.calls import Unanswered, answer_to
from daskcnn.cluster.link.members import Member
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.worker.session import in_turn
from daskcnn.errors import Interrupted, Lost


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
        return self._pinned(member, self.key(label), *_taking_turns(member, function), *args)

    def submit_actor(
        self, key: tuple[str, int], actor: Callable[..., Any], *args: Any, host: Member, **options: Any
    ) -> Future:
        """Start an actor on this host, which need not be a worker of the run."""
        return self._pinned(host, key, actor, *args, **options, actor=True)

    def _pinned(
        self, to: Member, key: tuple[str, int], function: Callable[..., Any], *args: Any, **options: Any
    ) -> Future:
        where = {"workers": [to.address], "resources": to.resource, "allow_other_workers": False}
        return self.client.submit(function, *args, **options, **where, key=key, pure=False)

    def bundle(self) -> Bundle:
        """Begin a bundle of tasks that are submitted all at once."""
        return Bundle(self)

    def send(self, data: Any, workers: Iterable[str] | None = None) -> Future:
        """Send data to these workers (all by default). Returns a future for their tasks, which has no lineage."""
        alive = self.workers.alive
        return self.send_to(data, [alive[name].address for name in workers or alive])

    def send_to(self, data: Any, addresses: list[str]) -> Future:
        """Send data to the workers at these addresses.

        Raises WorkersLost or ServerLost where one of them is gone or does not answer, else Lost if it does not arrive.
        """
        workers, connection = self.workers, self.workers.connection
        options = {"workers": addresses, "broadcast": True, "hash": False, "asynchronous": True}
        try:
            call = self.client.scatter([data], **options)
            (future,) = answer_to(self.client, call, within=self._limit, check=connection.heed)
        except Interrupted:
            raise
        except Unanswered:
            workers.require_answers(addresses)
            reason = f"data did not arrive within {self._limit:g} s"
            remedy = "look at their links with `daskcnn doctor`, or raise cluster.stall_timeout"
            raise Lost(f"workers {', '.join(addresses)}: {reason}; {remedy}") from None
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


def _argument(value: Any) -> Any:
    """A task's argument: results of other tasks, by themselves or in a list, are replaced by what they come to."""
    if isinstance(value, Future):
        return Alias(value.key)
    return List(*map(_argument, value)) if isinstance(value, list) else value
