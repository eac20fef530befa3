"""Messages between driver and workers: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.cluster.server.actor import ServerAt
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round
from daskcnn.ps import UpdateRule, Vector
from daskcnn.training.judging import JudgedPart


@dataclass(frozen=True)
class RoundOrder:
    """Driver to worker: join (no round), or train this round and push it.

    Attributes
    ----------
    life, session : the server's number in the run; the number of the worker's session
    score : validation samples to judge the merged center on afterwards
    q : those to judge the own weights on before a push
    optimizer : the optimizer's state to begin with; of a round None: the replica's own
    scale : factor of the learning rate
    rule : by which it trains, where that is not the job's own
    rest : what the replica's pushes in int8 have lost so far, coded
    """

    run: str
    life: int
    worker: str
    session: int
    server: ServerAt
    round: Round | None = None
    score: JudgedPart | None = None
    q: JudgedPart | None = None
    optimizer: OptimizerState | None = None
    scale: float = 1.0
    rule: UpdateRule | None = None
    rest: Vector | None = None


@dataclass(frozen=True)
class Calibration:
    """A worker's measurements of itself, in seconds a sample; of convolutions by layer.

    Attributes
    ----------
    conv_fixed : of `conv_seconds`, those that a shard takes however few its kernels are
    rest_seconds : of the layers that are not divided and the loss; None where kernels are not sharded
    step_fixed : seconds of a step, however few its samples are; None where workers do not share a step's samples
    planned_step : samples of a step whose convolutions its workspace has room for; None where steps do not grow
    cores : of its computer, that it may use
    """

    seconds_per_sample: float
    conv_seconds: dict[str, float]
    conv_fixed: dict[str, float]
    threads: int
    device: str
    memory: int
    rest_seconds: float | None = None
    step_fixed: float | None = None
    planned_step: int | None = None
    cores: int | None = None
