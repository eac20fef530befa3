"""What driver and workers tell each other: plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from daskcnn.arrays import Array
from daskcnn.cluster.server.actor import ServerAt
from daskcnn.cluster.server.split import SplitServerAt
from daskcnn.events import GroupMember, RoundEnded, RoundNumbers
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round

_AS_IT_IS = GetPydanticSchema(lambda *_: core_schema.any_schema())


@dataclass(frozen=True)
class RoundOrder:
    """Driver to worker: join (no round), or train this round and push it.

    run, epoch, session: which server and which life of the worker; server: where it is. score: the validation samples
    to judge the merged center on afterwards. velocity: the momentum to start a session with. replicas: how many train.
    """

    run: str
    epoch: int
    worker: str
    session: int
    server: ServerAt | SplitServerAt
    round: Round | None = None
    score: tuple[int, int] | None = None
    velocity: Array | None = None
    replicas: int = 1


class RoundReport(RoundNumbers):
    """Worker to driver: how the round went, in the numbers that the log has of it.

    center: what the worker's part of the validation samples says of the center, if it had one. velocity: its momentum.
    """

    loss: float
    accuracy: float
    lr: float
    version: int
    center: Annotated[Score | None, _AS_IT_IS]
    velocity: Annotated[Array, _AS_IT_IS]

    def event(self, epoch: float, members: Iterable[GroupMember] | None = None) -> RoundEnded:
        """The report as it is logged, at this epoch of the run. members: of a group."""
        numbers = {name: getattr(self, name) for name in RoundNumbers.model_fields}
        if members is not None:
            numbers["members"] = list(members)
        speed = self.samples / self.busy if self.busy else 0.0
        return RoundEnded(epoch=epoch, samples_per_second=speed, **numbers)


@dataclass(frozen=True)
class Calibration:
    """What a worker measured of itself: seconds a sample for a whole step, and for each convolution layer.

    conv_fixed: of those, what a shard of its kernels takes however few they are.
    """

    seconds_per_sample: float
    conv_seconds: dict[str, float]
    conv_fixed: dict[str, float]
    threads: int
    device: str
    memory: int
