"""How a round went, as a replica tells the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.events import GroupMember, RoundEnded
from daskcnn.nn.score import Score


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A replica's round.

    Attributes
    ----------
    trained : loss and right answers while training; None: a simulation in which nothing is learnt.
    busy, load, wait, communication, evaluation : seconds, as in `RoundEnded`.
    center : the center's score on the samples that the replica was asked to judge.
    velocity : the replica's momentum, on the host.
    """

    worker: str
    number: int
    samples: int
    trained: Score | None
    lr: float | None
    busy: float
    load: float
    wait: float
    communication: float
    evaluation: float
    bytes_up: int
    bytes_down: int
    pushes: int
    version: int
    base_version: int
    staleness: int
    gamma: float
    q: float | None
    center: Score | None = None
    velocity: Array | None = None

    def event(self, epoch: float, members: list[GroupMember] | None = None) -> RoundEnded:
        """The report as it is logged, at this epoch of the run."""
        return RoundEnded(
            worker=self.worker,
            round=self.number,
            samples=self.samples,
            busy=self.busy,
            wait=self.wait,
            communication=self.communication,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            epoch=epoch,
        )
