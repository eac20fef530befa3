"""The sums of a replica's round while it goes on. Its report is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.partition.step_shares import StepSizes
from daskcnn.ps import NoiseScale
from daskcnn.training.cadence import TrainSteps
from daskcnn.training.judging import JudgedPart


@dataclass(slots=True)
class RoundTally:
    """Sums of a round so far.

    told: number of its stops that were reached. pushed: samples up to the last push. since: time when the last work
    ended. sizes: of its minibatches, if they may change. sent: time of the last exchange. hidden: seconds of exchanges
    while steps were made. cut: of a round that ends early, the part that the last push is of what it was to be.
    """

    round: Round
    center_part: JudgedPart | None
    own_part: JudgedPart | None
    stops: tuple[TrainSteps, ...]
    version: int
    base_version: int
    sizes: StepSizes | None = None
    told: int = 0
    score: Score | None = None
    lr: float | None = None
    busy: float = 0.0
    load: float = 0.0
    since: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    sent: float = 0.0
    evaluation: float = 0.0
    pushed: int = 0
    pushes: int = 0
    staleness: int = 0
    gamma: float = 1.0
    q: float | None = None
    q_samples: int = 0
    q_measured: int = 0
    judged: int = 0
    center: Score | None = None
    noise: NoiseScale | None = None
    cut: float | None = None  # part of the last push that was made, of a round that ends early
