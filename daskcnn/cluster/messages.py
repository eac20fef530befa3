"""Messages between driver and workers: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.cluster.server.actor import ServerAt
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round


@dataclass(frozen=True)
class RoundOrder:
    """Driver to worker: join (no round), or train this round and push it.

    run, epoch, session: which server and which life of the worker; server: where it is. score: the validation samples
    to judge the merged center on afterwards. optimizer: the state to start a session with. scale: of the learning rate.
    """

    run: str
    epoch: int
    worker: str
    session: int
    server: ServerAt
    round: Round | None = None
    score: tuple[int, int] | None = None
    optimizer: OptimizerState | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Calibration:
    """A worker's measurements of itself: seconds a sample for a whole step, and for each convolution layer.

    conv_fixed: of those, what a shard of its kernels takes however few they are. rest_seconds: seconds a sample of what
    home does alone where kernels are sharded, layers that are not divided and the loss; None where none are.
    """

    seconds_per_sample: float
    conv_seconds: dict[str, float]
    conv_fixed: dict[str, float]
    threads: int
    device: str
    memory: int
    rest_seconds: float | None = None
