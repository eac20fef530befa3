"""The choice of the workers that train, and the memory of those that were left out.

They are asked again where one of the others is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from daskcnn.events import StrategyChosen
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.facts import ServerProbed
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.strategy_choice import choose, measured_problem

REMEDY = "it is free for another job; to use it anyway, train by strategy bsp"


class Choosing:
    """The links of a run's workers so far, and its choices. spared: workers that were left out, with their kinds."""

    def __init__(self, settings: Settings) -> None:
        self._batch = settings.batch_size
        self._links: dict[str, WorkerLink] = {}
        self.spared: dict[str, str] = {}

    def decide(self, fact: ServerProbed, roster: Roster) -> tuple[StrategyChosen, dict[str, str]]:
        """Return the choice among all calibrated workers, and why which of those that were asked are left out."""
        self._links.update(fact.links)
        measured = {name: (own.row, own.seconds) for name, own in roster.alive.items()}
        server = {"bandwidth": fact.bandwidth, "merge": fact.merge, "overhead": fact.overhead}
        found = choose(measured_problem(measured, self._batch, self._links, fact.nbytes, **server))
        left_out = {part.worker: part.why_left_out for part in found.left_out if part.worker in fact.workers}
        self.spared |= {worker: roster.kind(worker) for worker in left_out}
        return found.event(), left_out

    def recall(self, lost: Iterable[str], roster: Roster, out: Outbox, now: float) -> None:
        """Let those that were left out measure themselves again, where one of the others is lost."""
        if not self.spared or not any(worker in roster.alive for worker in lost):
            return
        for worker, kind in self.spared.items():
            roster.calibrate(worker, kind, now)
            out.put(orders.Calibrate(worker))
        out.warn(f"a worker is lost: {', '.join(self.spared)}, left out until now, may be used again")
        self.spared = {}
