"""Whether a run makes progress: a clock that begins anew with each result."""

from __future__ import annotations


class Silence:
    """The clock. It begins with the first tick after `restart`, for carrying orders out takes its time as well.

    Attributes
    ----------
    asked : whether it was asked for whom the run waits, and the answer is to come.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self.asked = False

    def restart(self) -> None:
        """The shell has something new to carry out."""
        self._since, self.asked = None, False

    def heard(self, now: float) -> None:
        """A result has come."""
        self._since = now

    def longer(self, now: float, limit: float) -> bool:
        """Whether nothing was heard for longer than `limit` seconds."""
        return self._since is not None and now - self._since > limit

    def overdue(self, now: float, limit: float) -> bool:
        """At a tick: whether it is time to ask for whom the run waits, which is asked once."""
        if self._since is None:
            self._since = now
        if self.asked or not self.longer(now, limit):
            return False
        self.asked = True
        return True
