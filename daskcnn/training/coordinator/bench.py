"""Workers that are there and not used for now; one that is lost again and again is left out for a growing while."""

from __future__ import annotations

from daskcnn.training.coordinator.roster import Refusal

FIRST, LONGEST = 15.0, 900.0
"""Seconds for which a worker is left out that was lost twice, and at most. Each loss doubles them."""
FORGIVEN = 600.0
"""Seconds that a worker stays after which its earlier losses are forgotten."""


class Bench:
    """Counts the losses of each worker by its name.

    waiting: the kinds of workers that are there and have no place, or are left out for a while, by name.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}
        self._losses: dict[str, int] = {}
        self._since: dict[str, float] = {}  # when each of those in use came
        self._until: dict[str, float] = {}  # when each that was lost may be used again

    def came(self, worker: str, now: float) -> None:
        """Note that the worker is used from now on."""
        self.waiting.pop(worker, None)
        self._since[worker] = now

    def lost(self, worker: str, now: float) -> None:
        """Note a loss. After the first one the worker is used as soon as it is back."""
        if now - self._since.pop(worker, now) > FORGIVEN:
            self._losses.pop(worker, None)
        before = self._losses.get(worker, 0)
        self._losses[worker] = before + 1
        self._until[worker] = now + (min(LONGEST, FIRST * 2 ** (before - 1)) if before else 0.0)

    def barred(self, worker: str, now: float) -> Refusal | None:
        """Return the refusal of a worker that is left out for a while."""
        left = self._until.get(worker, now) - now
        if left <= 0:
            return None
        reason = f"it was lost {self._losses[worker]} times in a short time, and is left out for {left:.0f} s"
        return reason, "look at its own log, and at its machine's memory"
