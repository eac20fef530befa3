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
    members: tuple[GroupMember, ...] = ()

    def event(self, epoch: float) -> RoundEnded:
        """The report as it is logged, at this epoch of the run."""
        trained = self.trained
        return RoundEnded(
            worker=self.worker,
            round=self.number,
            epoch=epoch,
            samples=self.samples,
            samples_per_second=self.samples / self.busy if self.busy else 0.0,
            loss=trained and trained.loss,
            accuracy=trained and trained.accuracy,
            lr=self.lr,
            busy=self.busy,
            load=self.load,
            wait=self.wait,
            communication=self.communication,
            evaluation=self.evaluation,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            pushes=self.pushes,
            version=self.version,
            base_version=self.base_version,
            staleness=self.staleness,
            gamma=self.gamma,
            q=self.q,
            **({"members": list(self.members)} if self.members else {}),
        )
