"""The results of a run's tasks, as the driver takes them."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, wait
from concurrent.futures import Future as Pending
from typing import Any, TypeAlias, TypeVar

from distributed import Future, KilledWorker
from distributed.client import _wait

from daskcnn.cluster.link.calls import NotYet, Refusal, WorkersLost, begin
from daskcnn.cluster.run.workers import LOOK, RunWorkers
from daskcnn.cluster.worker.session import SessionGone

Name: TypeAlias = str | type
"""A worker or replica, else the kind of its work: users name workers, so that no name is free for anything else."""

K = TypeVar("K")


class Results:
    """Takes the results of a run's tasks. `ended` has tasks whose results are to be taken, each with a name.

    limit: seconds after which a worker whose result has not come counts as lost, where a call names no other.
    """

    def __init__(self, workers: RunWorkers, limit: float) -> None:
        self._workers, self._limit = workers, limit
        self.ended: queue.SimpleQueue[tuple[Name, Future] | None] = queue.SimpleQueue()
        # by task, where its result did not come in the first turn
        self._coming: dict[Any, tuple[Future, Pending[Any]]] = {}

    def next_ended(self) -> tuple[Name, Future] | None:
        """Wait a moment for the next of the tasks that have ended."""
        try:
            return self.ended.get(timeout=LOOK)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """End the wait for a task that is under way. May be called on any thread."""
        self.ended.put(None)

    def turn(self, futures: Iterable[Future]) -> set[Future]:
        """Wait a moment. Returns the tasks that have not ended. Raises WorkersLost where one was lost with its data."""
        waiting = set(futures)
        try:
            client = self._workers.connection.client  # `distributed.wait` asks the default one
            return set(client.sync(_wait, waiting, timeout=LOOK, return_when="FIRST_COMPLETED").not_done)
        except (TimeoutError, UnboundLocalError):  # for the latter see `fetch`
            return waiting
        except CancelledError as error:
            self._workers.explain(error)

    def gather(self, futures: Mapping[K, Future], *, within: float | None = None) -> dict[K, Any]:
        """Results by the same keys. Raises what the tasks raise, and what `RunWorkers.look_round` raises.

        After `within` seconds the keys count as workers, and those whose result has not come as lost.
        """
        deadline = time.monotonic() + (self._limit if within is None else within)
        waiting = set(futures.values())
        while waiting := self.turn(waiting):
            self._workers.look_round()
            if time.monotonic() > deadline:
                raise WorkersLost(str(key) for key, future in futures.items() if future in waiting)
        return {key: self.result(future, str(key), deadline) for key, future in futures.items()}

    def result(self, future: Future, worker: str = "", deadline: float = math.inf) -> Any:
        """The task's result. Raises as `fetch` and `RunWorkers.look_round` do, and WorkersLost after the deadline."""
        while True:
            try:
                return self.fetch(future)
            except NotYet:
                self._workers.look_round()
                if time.monotonic() > deadline:
                    raise WorkersLost([worker]) from None

    def fetch(self, future: Future) -> Any:
        """The task's result, if it comes in a moment: where it has ended, its worker may be lost or held up since.

        Raises NotYet, WorkersLost or ServerLost where that is why there is none, or what the task raises or refuses.
        A worker that was started anew at the same address counts as lost.
        """
        try:
            return self._fetched(future)
        except SessionGone as gone:
            if names := [
                name for name, member in self._workers.alive.items() if gone.value == f"worker {member.address}"
            ]:
                raise WorkersLost(names) from gone
            raise

    def _fetched(self, future: Future) -> Any:
        try:
            found = self._come(future)
        except (KilledWorker, CancelledError) as error:
            self._workers.explain(error)
        except RuntimeError as error:
            if "Actor was lost" in str(error):  # what the server's future has then
                self._workers.explain(error)
            raise
        except OSError as error:
            if future.status == "error":
                self._workers.explain(error)
            self._go_on_fetching(future)  # it was the timeout of this turn
            raise NotYet from None
        except UnboundLocalError:
            if future.status == "error":
                raise
            raise NotYet from None  # what Dask's `sync` raises where its own call was cancelled: it is asked again
        if isinstance(found, Refusal):
            raise found.error
        return found

    def _come(self, future: Future) -> Any:
        """The task's result. Raises TimeoutError where it does not come in a moment."""
        if future.key not in self._coming:
            return future.result(timeout=LOOK)
        _, call = self._coming[future.key]
        if not wait([call], LOOK).done:
            raise TimeoutError
        del self._coming[future.key]
        if call.cancelled():  # by Dask, with another's that it had joined it to
            raise TimeoutError
        return call.result()

    def _go_on_fetching(self, future: Future) -> None:
        """Let the transfer of a result go on between turns: one that begins anew at each may never end."""
        if future.key not in self._coming:
            self.drop_cancelled()
            client = self._workers.connection.client
            self._coming[future.key] = future, begin(client, client.gather(future, asynchronous=True))

    def drop_cancelled(self) -> None:
        """Give up the transfers of results whose tasks are cancelled: they are not waited for any more."""
        for key, (future, call) in [*self._coming.items()]:
            if future.cancelled():
                call.cancel()
                del self._coming[key]
