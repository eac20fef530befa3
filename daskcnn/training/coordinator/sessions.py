"""The replicas that take part in a life of a data-parallel run, and their rounds under way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from daskcnn.partition.rounds import Round
from daskcnn.training.coordinator import facts
from daskcnn.training.coordinator.settings import PATIENCE


@dataclass(slots=True)
class Running:
    """A round under way.

    heard: the time of the last sign of life. expected: seconds until the next should come. ends: the time when the
    round should end. ends_early: the replica was asked to end it behind the step at hand.
    """

    round: Round
    session: int
    heard: float
    expected: float
    ends: float
    ends_early: bool = False


class Sessions:
    """The replicas that take part in a life, and their rounds under way.

    Attributes
    ----------
    numbers : The number of each replica's last session.
    left : That of each replica's last session which has left the server with a push that counts.
    joined : Replicas that hold the center and count in the barrier; an ordered set.
    joining : Replicas that were asked to join, and since when.
    due : Rounds that start once all who join have joined.
    held : Reports that came meanwhile.
    running : Rounds under way, by replica.
    asked : True if an answer is to come to who waits for whom.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.joined: dict[str, None] = {}
        self.joining: dict[str, float] = {}
        self.due: list[Round] = []
        self.held: list[facts.RoundDone] = []
        self.running: dict[str, Running] = {}
        self.asked = False

    def begin(self, replica: str, now: float) -> int:
        """Let the replica join; return the number of its session."""
        self.numbers[replica] = session = self.numbers.get(replica, 0) + 1
        self.joining[replica] = now
        return session

    def has_joined(self, replica: str, session: int) -> bool:
        """Take the replica in; return True if it was waited for."""
        if replica not in self.joining or session != self.numbers[replica]:
            return False
        del self.joining[replica]
        self.joined[replica] = None
        return True

    def take_held(self, replica: str) -> facts.RoundDone | None:
        """Return the replica's report that was put off, which is put off no longer; None: there is none."""
        found = next((report for report in self.held if report.replica == replica), None)
        if found is not None:
            self.held.remove(found)
        return found

    # --- signs of life ---

    def heard(self, replica: str, session: int, now: float) -> None:
        """Note that the replica's round goes on."""
        running = self.running.get(replica)
        if running is not None and running.session == session:
            running.heard = now

    def heard_before(self, seconds: Mapping[str, float], now: float) -> None:
        """Note the last sign of life of these replicas, in seconds before now, if none came later."""
        for replica, running in self.running.items():
            running.heard = max(running.heard, now - seconds.get(replica, math.inf))

    def limit(self, stall_timeout: float) -> float:
        """Return the seconds without a sign of life after which a replica is overdue."""
        return stall_timeout + PATIENCE * max((running.expected for running in self.running.values()), default=0.0)

    def silent(self, now: float, limit: float) -> list[str]:
        """Return the replicas whose rounds have not been heard of for longer than `limit` seconds."""
        return [replica for replica, running in self.running.items() if now - running.heard > limit]

    def validate(self) -> None:
        """Assert the invariants between two facts."""
        assert self.running.keys() <= self.joined.keys(), "a round of a replica that has not joined"
        assert not self.joined.keys() & self.joining.keys()
        assert self.joined.keys() | self.joining.keys() <= self.numbers.keys()
