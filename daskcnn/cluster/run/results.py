"""The results of a run's tasks: waiting for them, finding lost workers meanwhile, and weights judged on all workers."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from distributed import Future, KilledWorker
from distributed.client import _wait

from daskcnn.arrays import Array
from daskcnn.cluster.link.calls import NotYet, Refusal, ServerLost, WorkersLost
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.dispatch import Dispatch
from daskcnn.cluster.run.workers import LOOK, RunWorkers
from daskcnn.cluster.worker.tasks import score_weights
from daskcnn.nn.score import Score
from daskcnn.partition.proportions import proportional
from daskcnn.training.coordinator.settings import PATIENCE

LONGEST_TURN = 16.0  # seconds for which a late result is waited for without a look at who is there
K = TypeVar("K")


class Results:
    """Takes the results of a run's tasks. `ended` has tasks whose results are to be taken, each with a name.

    limit: seconds after which a worker whose result has not come counts as lost, where a call names no other.
    """

    def __init__(self, workers: RunWorkers, limit: float) -> None:
        self._workers, self._limit = workers, limit
        self.ended: queue.SimpleQueue[tuple[str, Future]] = queue.SimpleQueue()
        self._turns: dict[Any, float] = {}  # by task, where its result did not come in the first turn

    def next_ended(self) -> tuple[str, Future] | None:
        """Wait a moment for the next of the tasks that have ended."""
        try:
            return self.ended.get(timeout=LOOK)
        except queue.Empty:
            return None

    def turn(self, futures: Iterable[Future]) -> set[Future]:
        """Wait a moment. Returns the tasks that have not ended. Raises WorkersLost where one was lost with its data."""
        waiting = set(futures)
        try:
            client = self._workers.connection.client  # `distributed.wait` asks the default one
            return set(client.sync(_wait, waiting, timeout=LOOK, return_when="FIRST_COMPLETED").not_done)
        except TimeoutError:
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
        """
        turn = self._turns.pop(future.key, LOOK)
        try:
            found = future.result(timeout=turn)
        except (KilledWorker, CancelledError) as error:
            self._workers.explain(error)
        except RuntimeError as error:
            if "Actor was lost" in str(error):  # what the server's future has then
                self._workers.explain(error)
            raise
        except OSError as error:
            if future.status == "error":
                self._workers.explain(error)
            # it was the timeout of this turn: the next one gives the transfer, which begins anew, twice as long
            self._turns[future.key] = min(2 * turn, LONGEST_TURN)
            raise NotYet from None
        if isinstance(found, Refusal):
            raise found.error
        return found


class Scoring:
    """Has weights judged by the workers that are calibrated, of whom others may come later.

    limit: seconds that judging may take beyond what calibration lets expect.
    """

    def __init__(
        self, run: str, dispatch: Dispatch, results: Results, limit: float, calibrations: Mapping[str, Calibration]
    ) -> None:
        self._run, self._dispatch, self._results = run, dispatch, results
        self._limit, self._calibrations = limit, calibrations

    def score(self, weights: Array, split: str, lo: int, hi: int) -> Score:
        """Judge weights on samples lo…hi of a split, and again where a worker is lost meanwhile."""
        workers = self._dispatch.workers
        while True:
            try:
                return self._score(weights, split, lo, hi)
            except WorkersLost as lost:
                for name in lost.names:
                    workers.lose(name, "connection lost")
            except ServerLost:
                workers.needs_server = False  # scoring does not need it; a later call to it finds out

    def _score(self, weights: Array, split: str, lo: int, hi: int) -> Score:
        futures, known = self.submit(weights, split, lo, hi), self._calibrations
        each = ((end - begin) * known[name].seconds_per_sample for name, begin, end in self.parts(lo, hi))
        slowest = max(each, default=0.0)
        found = self._results.gather(futures, within=self._limit + PATIENCE * slowest)
        return sum(found.values(), Score(0.0, 0, 0))

    def submit(self, weights: Array, split: str, lo: int, hi: int) -> dict[str, Future]:
        """Let every worker judge its part. Returns the scores to come, by worker."""
        vector = self._dispatch.send(weights)
        return {
            name: self._dispatch.submit("score", score_weights, self._run, vector, split, begin, end, worker=name)
            for name, begin, end in self.parts(lo, hi)
        }

    def parts(self, lo: int, hi: int) -> list[tuple[str, int, int]]:
        """lo…hi cut over the workers in proportion to their calibrated speed."""
        names = [name for name in self._dispatch.workers.alive if name in self._calibrations]
        speeds = [1 / self._calibrations[name].seconds_per_sample for name in names]
        cut, begin = [], lo
        for name, size in zip(names, proportional(hi - lo, speeds), strict=True):
            if size:
                cut.append((name, begin, begin + size))
            begin += size
        return cut
