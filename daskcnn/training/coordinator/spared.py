"""The workers that a run has left out, as it is sooner without them, and when they are measured again.

They are free for other jobs meanwhile. A worker is measured again at once, beside the first round: its measurement may
have been wrong. It may also get faster: it is measured again after one more round, two more, four more and so on. All
of them are measured again where those that train have got slower, or one of them is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daskcnn.events import SURER
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.roster import Roster


@dataclass(slots=True)
class _Absence:
    """The times that a worker was left out, and the rounds of all until it is measured again."""

    times: int = 0
    left: int = 1


class Spared:
    """Workers that were left out.

    Attributes
    ----------
    kinds : Of each of them, those that are measured again included.
    again : Those that are measured again, and not judged yet; an ordered set.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.again: dict[str, None] = {}
        self._absences: dict[str, _Absence] = {}
        self._seconds: float | None = None  # a sample of those that trained when these were measured last

    def add(self, worker: str, kind: str) -> None:
        """Note that the worker is left out, once more if it was measured again."""
        times = self._absences[worker].times + 1 if worker in self._absences else 0
        self.kinds[worker], self._absences[worker] = kind, _Absence(times, 1 << max(0, times - 1))
        self.again.pop(worker, None)

    def forget(self, worker: str) -> None:
        """Note that the worker trains, or is of no use any more."""
        self.kinds.pop(worker, None)
        self.again.pop(worker, None)

    def measure_again(self, seconds: float, roster: Roster, out: Outbox, now: float) -> None:
        """Order to measure those again whose turn it is: a round of all begins.

        seconds: a sample of those that train, as measured now.
        """
        self._seconds = self._seconds or seconds
        slower, due = seconds > SURER * self._seconds, list[str]()
        for worker, kind in self.kinds.items():
            absence = self._absences[worker]
            absence.left -= 1
            if (slower or absence.left <= 0) and not (roster.knows(worker) or roster.full(kind)):
                due.append(worker)
        if due:
            self._seconds = seconds
        self._measure(due, roster, out, now)
        self.again |= dict.fromkeys(due)

    def recall(self, lost: Iterable[str], roster: Roster, out: Outbox, now: float) -> None:
        """Order to measure all of them as newcomers, where one of the others is lost."""
        if not self.kinds or not any(worker in roster.alive for worker in lost):
            return
        self._measure([worker for worker in self.kinds if not roster.knows(worker)], roster, out, now)
        out.warn(f"a worker is lost: {', '.join(self.kinds)}, left out until now, may be used again")
        self.kinds, self.again = {}, {}

    def _measure(self, workers: Iterable[str], roster: Roster, out: Outbox, now: float) -> None:
        for worker in workers:
            roster.calibrate(worker, self.kinds[worker], now)
            out.put(orders.Calibrate(worker))
