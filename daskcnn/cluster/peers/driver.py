"""BSP without a server: replicas exchange their weights peer to peer (`asa`, `asa16`), meeting after meeting.

The driver submits a round's meetings ahead (`peer_graph`) and takes the center from a worker when it judges or saves
it. When a worker is lost, the round under way is begun again by those that are left, from the last center that one of
them has: their training since the last meeting is dropped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.data_parallel import PATIENCE, DataParallel
from daskcnn.cluster.peers.graph import Meeting, PeerGraph
from daskcnn.cluster.peers.tasks import OutOfTurn, Peers, Rescued, RoundStart, Stepped, begin_life, center_of, rescue
from daskcnn.cluster.run_context import NotYet, WorkersLost
from daskcnn.errors import Lost
from daskcnn.partition.rounds import Round
from daskcnn.ps import Snapshot
from daskcnn.runs.state import TrainingState
from daskcnn.training.reports import RoundReport

AHEAD = 2  # meetings submitted before the oldest has ended
SEGMENT = 200  # meetings after which the chain of tasks is cut, which the scheduler has to remember


class Stalled(WorkersLost):
    """Workers of the run are there, and do nothing."""


class PeerToPeer(DataParallel):
    """Drives one run of BSP, without a server, over the workers of a context."""

    serverless: ClassVar[bool] = True

    # --- in place of a server ---

    def _start_server(self) -> None:
        self.context.needs_server = False
        self._version = self.state.step
        self._flight: deque[Meeting] = deque()
        self._peers = Peers(self.context.name, self._epoch, (), self.state.weights.size)
        self._holders: tuple[str, ...] = ()  # of the present center
        self._limit = self.job.cluster.stall_timeout  # seconds without progress

    def _snapshot(self) -> Snapshot:
        """The center of the last meeting. Raises WorkersLost."""
        return Snapshot(self._center(), version=self._version, epoch=self._epoch)

    def _center(self) -> Array:
        if not self._holders:
            return self.state.weights
        first = self._holders[0]
        future = self.context.submit("center", center_of, self._peers, worker=first)
        center: Array = self.context.gather({first: future}, within=self.job.cluster.stall_timeout)[first]
        return center

    def _save_interrupted(self) -> None:
        """Nothing interrupts any more; what the last meeting came to is kept, if those who know it can be asked."""
        self.context.ignore_signals()
        self._cancel_all()
        with suppress(WorkersLost, Lost):
            if found := self._rescue():
                self._version = max(rescued.version for rescued in found.values())
                self._holders = tuple(w for w, rescued in found.items() if rescued.version == self._version)
                self._save()

    def _count(self, snapshot: Snapshot) -> None:
        """There is no server that would count."""

    def _count_refusals(self) -> None:
        """Nor one that would refuse."""

    def _cancel_all(self) -> None:
        """Training stops at its next step once cancelled."""
        for meeting in self._flight:
            meeting.cancel()
        self._flight.clear()

    # --- the rounds ---

    def _run(self) -> None:
        while True:
            try:
                while due := self._due():
                    for report in self._meet(due):
                        self.rounds.finished(report.worker, report.busy / report.samples)
                        self._record(report)
                return
            except WorkersLost as lost:
                self._go_back(lost)

    def _meet(self, due: list[Round]) -> list[RoundReport]:
        """The meetings of one round of these workers, who all make the same number of steps."""
        self._bring_in(sorted(round_.worker for round_ in due))
        graph, scored = PeerGraph(self.context, self._peers), self._to_score(due)
        starts = {r.worker: RoundStart(r, scored.get(r.worker)) for r in due}
        steps, period = due[0].steps, self.rule.period
        count = math.ceil(steps / period) if steps and period else 1
        slowest = max(r.samples * self.rounds.seconds[r.worker] for r in due) / count
        self._limit = self.job.cluster.stall_timeout + PATIENCE * slowest
        self._waits = dict.fromkeys(self._peers.names, 0.0)
        last: Meeting | None = None
        for number in range(count):
            if number and number % SEGMENT == 0 and last is not None:
                self._drain(0)
                self._gather(graph.adopt(last))
                last = None
            last = graph.meet(self._version + number, starts if number == 0 else {}, last)
            self._flight.append(last)
            self._drain(AHEAD)
        self._drain(0)
        assert last is not None
        reports: dict[str, RoundReport] = self._gather(graph.end(last))
        self._version += count
        return [self._with_wait(report) for report in reports.values()]

    def _bring_in(self, workers: list[str]) -> None:
        """These meet from now on: who has not the present center is given it."""
        new = [worker for worker in workers if worker not in self._holders]
        center = self._center() if new else None
        self._peers = replace(self._peers, names=tuple(workers))
        if new:
            held = self.context.send(center, new)
            self._gather(
                {
                    worker: self.context.submit(
                        "begin",
                        begin_life,
                        self._peers,
                        worker,
                        self._velocities.get(worker),
                        self._version,
                        held,
                        worker=worker,
                    )
                    for worker in new
                }
            )
        self._holders = tuple(workers)

    def _drain(self, ahead: int) -> None:
        """Wait until training for no more than so many meetings is under way; note who waited for whom."""
        while len(self._flight) > ahead:
            stepped: dict[str, Stepped] = self._gather(self._flight[0].steps)
            longest = max(each.seconds for each in stepped.values())
            for worker, each in stepped.items():
                self._waits[worker] += longest - each.seconds
            self._flight.popleft()

    def _with_wait(self, report: RoundReport) -> RoundReport:
        """What a worker does not train for is waiting for the slowest one (eq. 8), and communication."""
        wait = min(report.communication, self._waits[report.worker])
        return report._replace(wait=wait, communication=report.communication - wait)

    # --- results, and who is gone ---

    def _gather(self, futures: Mapping[str, Future]) -> dict[str, Any]:
        """Results by worker. Raises WorkersLost, also of those that stall, Lost where nobody knows who does."""
        deadline = time.monotonic() + self._limit
        try:
            self.context.settle(futures.values(), within=self._limit)
        except TimeoutError:
            raise self._stalled(futures) from None
        return {worker: self._result_of(worker, future, deadline) for worker, future in futures.items()}

    def _result_of(self, worker: str, future: Future, deadline: float) -> Any:
        while True:
            try:
                return self.context.fetch(future)
            except NotYet:
                self.context.look_round()
                if time.monotonic() > deadline:
                    raise Stalled([worker]) from None
            except OutOfTurn as error:
                self.context.explain(error)

    def _stalled(self, futures: Mapping[str, Future]) -> Exception:
        """Who holds the others up: workers that give no sign of life, or else who has not ended as others have."""
        late = [worker for worker, future in futures.items() if not future.done()]
        silent = self.context.silent(self.job.cluster.stall_timeout)
        if silent or len(late) < len(futures):
            return Stalled(silent or late)
        return Lost(f"no progress for {self._limit:.0f} s, waiting for {', '.join(late)}")

    def _go_back(self, lost: WorkersLost) -> None:
        """Go on without these workers."""
        self._cancel_all()
        book = {**self.state.book, "best": self.best, "worse": self.worse, "server_epoch": self._epoch}
        book["rounds"] = self.rounds.to_dict()
        while True:
            try:
                self._drop(lost)
                self.state = self._rescued_state(book)
                self._begin()
                return
            except WorkersLost as more:
                lost = more

    def _drop(self, lost: WorkersLost) -> None:
        stalled = isinstance(lost, Stalled)
        reason = f"no report for {self._limit:.0f} s" if stalled else "connection lost"
        for worker in set(lost.names) & self.context.alive.keys():
            self.context.lose(worker, reason, self.rounds.allocation.size(worker))

    def _rescued_state(self, book: Mapping[str, Any]) -> TrainingState:
        """From the last center that a worker has; the last saved state where none has any."""
        found = self._rescue()
        if not found:
            return self.state
        self._version = max(found.values(), key=lambda rescued: rescued.version).version
        self._holders = tuple(worker for worker, rescued in found.items() if rescued.version == self._version)
        message = f"the round is begun again from version {self._version}, by {len(self.context.alive)} workers"
        self.context.emit({"event": "warning", "message": message})
        center, velocities = self._center(), {w: v for w, v in self._velocities.items() if w in self.context.alive}
        return TrainingState(self._version, self._epochs_done(), center, velocities, book)

    def _rescue(self) -> dict[str, Rescued]:
        """What those have that are left. Raises WorkersLost where one of them does not answer."""
        left = [worker for worker in self._holders if worker in self.context.alive]
        asked = {worker: self.context.submit("rescue", rescue, self._peers, worker=worker) for worker in left}
        found: dict[str, Rescued] = self.context.gather(asked, within=self.job.cluster.stall_timeout)
        self._velocities |= {worker: rescued.velocity for worker, rescued in found.items()}
        return found
