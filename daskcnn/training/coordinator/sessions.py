"""The sessions of a life's replicas: who has joined, who joins, and whose rounds wait or are under way."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.partition.rounds import Round
from daskcnn.training.coordinator import facts
from daskcnn.training.coordinator.settings import PATIENCE


@dataclass(slots=True)
class Running:
    """A round under way. Not frozen: it is made once a round, and a sign of life renews it.

    Attributes
    ----------
    heard : when there was the last sign of life.
    expected : seconds within which the next one should come.
    """

    round: Round
    session: int
    heard: float
    expected: float


class Sessions:
    """The replicas that take part in a life, and their rounds under way.

    Attributes
    ----------
    joined : replicas that hold the center and count in the barrier; an ordered set.
    joining : replicas that were asked to join, and since when.
    due : rounds that start once all who join have joined.
    held : reports that came meanwhile.
    running : rounds under way, by replica.
    asked : whether an answer is to come to who waits for whom.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.joined: dict[str, None] = {}
        self.joining: dict[str, float] = {}
        self.due: list[Round] = []
        self.held: list[facts.RoundDone] = []
        self.running: dict[str, Running] = {}
        self.asked = False

    def begin(self, replica: str, now: float) -> int:
        """The replica is to join; returns the number of its session."""
        self._numbers[replica] = session = self._numbers.get(replica, 0) + 1
        self.joining[replica] = now
        return session

    def has_joined(self, replica: str, session: int) -> bool:
        """The replica says that it has joined; returns whether it was waited for."""
        if replica not in self.joining or session != self._numbers[replica]:
            return False
        del self.joining[replica]
        self.joined[replica] = None
        return True

    def number(self, replica: str) -> int | None:
        """The number of the replica's session; None: it was never asked to join."""
        return self._numbers.get(replica)

    def waiting(self) -> tuple[list[Round], list[facts.RoundDone]]:
        """Rounds and reports that have waited for others to join; they wait no longer."""
        due, self.due = self.due, []
        held, self.held = self.held, []
        return due, held

    def start(self, round_: Round, now: float, expected: float) -> int:
        """The round is under way; returns the number of its replica's session."""
        session = self._numbers[round_.worker]
        self.running[round_.worker] = Running(round_, session, now, expected)
        return session

    def leave(self, replica: str) -> int:
        """The replica takes part no longer, until it joins again; returns the number of its session."""
        self.joined.pop(replica, None)
        return self._numbers[replica]

    def drop(self, replica: str) -> bool:
        """The replica is lost; returns whether it had something under way."""
        joining, running = self.joining.pop(replica, None), self.running.pop(replica, None)
        self.joined.pop(replica, None)
        self.due = [round_ for round_ in self.due if round_.worker != replica]
        return joining is not None or running is not None

    # --- signs of life ---

    def heard(self, replica: str, session: int, now: float) -> None:
        """The replica's round goes on."""
        running = self.running.get(replica)
        if running is not None and running.session == session:
            running.heard = now

    def heard_of_all(self, now: float) -> None:
        """Nobody is to blame for the silence up to now."""
        for running in self.running.values():
            running.heard = now

    def limit(self, stall_timeout: float) -> float:
        """Seconds without a sign of life after which a replica is overdue."""
        return stall_timeout + PATIENCE * max((running.expected for running in self.running.values()), default=0.0)

    def silent(self, now: float, limit: float) -> list[str]:
        """Replicas whose rounds have not been heard of for longer than `limit` seconds."""
        return [replica for replica, running in self.running.items() if now - running.heard > limit]

    def not_joined(self, now: float, limit: float) -> list[str]:
        """Replicas that have been joining for longer than `limit` seconds."""
        return [replica for replica, since in self.joining.items() if now - since > limit]

    def validate(self) -> None:
        """Assert what holds between two facts."""
        assert self.running.keys() <= self.joined.keys(), "a round of a replica that has not joined"
        assert not self.joined.keys() & self.joining.keys()
        assert self.joined.keys() | self.joining.keys() <= self._numbers.keys()
