"""The time at which a run must begin to end, so that it is kept within its limit."""

from __future__ import annotations

from collections.abc import Iterable

from daskcnn.training.coordinator import facts, orders

ENDING = 10.0
"""Seconds for what follows the last save: the summary, the end of local workers and of the process."""
SAVING = 5.0
"""Seconds of a save, as long as none was measured."""
SAFE = 3.0
"""The last save may take this many times as long as the longest so far: others may write to the disk by then."""
_LOST = facts.ServerGone, facts.NotKept, facts.Rescued


class TimeLimit:
    """Measures what keeping the run takes. seconds: the limit as it was given. ends: the time when it is over."""

    def __init__(self, seconds: float, ends: float) -> None:
        self.seconds, self._ends = seconds, ends
        self._ordered: float | None = None  # when the oldest save under way was
        self._longest = SAVING

    def note(self, fact: facts.Fact, found: Iterable[orders.Order]) -> None:
        """Take the time of a save from its order to its answer. One whose center is lost meanwhile has no answer."""
        if isinstance(fact, _LOST):
            self._ordered = None
        if isinstance(fact, facts.Saved) and self._ordered is not None:
            self._longest, self._ordered = max(self._longest, fact.at - self._ordered), None
        if self._ordered is None and any(isinstance(order, orders.Save) for order in found):
            self._ordered = fact.at

    def near(self, now: float, before: float = 0.0) -> bool:
        """Return True once a save and the end would take the time that is left. At most half of the limit is kept.

        before: seconds until the save can begin.
        """
        return self._ends - now <= min(self.seconds / 2, before + ENDING + SAFE * self._longest)
