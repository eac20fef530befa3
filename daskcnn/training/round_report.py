"""A worker's report of a round, in a cluster and in the simulator."""

from __future__ import annotations

from typing import NamedTuple

from daskcnn.events import GroupMember, RoundEnded, RoundNumbers
from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.partition.step_shares import StepSizes
from daskcnn.ps import NoiseScale, Vector

_OF_ROUND = ("worker", "round")


class RoundReport(NamedTuple):
    """A worker's round. A simulation that learns nothing does not know score, lr and q: they are None.

    A named tuple, because a simulation makes millions: a frozen dataclass of this length takes seven times as long.

    Attributes
    ----------
    score : Over the round's samples, each before the step that it was part of.
    lr : Learning rate of the last step.
    busy, load : Seconds of loading and computing; of these, the seconds of waiting for minibatches.
    wait, communication : Seconds that the replica waited for other workers; seconds of its exchanges besides.
    evaluation : Seconds of judging the weights on validation samples.
    pushes : Pushes that were answered.
    version : Version of the last reply.
    base_version, gamma, q : The last push's base version, attenuation γ and accuracy Q.
    staleness : The largest staleness of the round's pushes, in versions.
    q_samples, q_measured : Validation samples that each Q was measured on, 0 if it was not; times that it was.
    judged, center : Number of validation samples that the center was judged on; the center's score on them.
    optimizer : The optimizer's state on the host.
    members : Costs of each worker of a group.
    sizes : Minibatches of a round in which they may have changed; None: as it began.
    noise : The gradients' noise scale, by the last reply that knew it; of a replica alone by its own measurements.
    norms : These measurements, to go on from.
    rest : What the replica's pushes in int8 have lost so far, coded; None: nothing, or they are not in int8.
    hidden : Seconds of exchanges during which steps were made.
    cut : Samples presented in a round that ended early; None: it did not.
    """

    round: Round
    score: Score | None
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
    q_samples: int
    judged: int
    center: Score | None
    optimizer: OptimizerState | None
    members: tuple[GroupMember, ...] = ()
    sizes: StepSizes | None = None
    noise: NoiseScale | None = None
    cut: int | None = None
    norms: tuple[float, ...] = ()
    hidden: float = 0.0
    q_measured: int = 0
    rest: Vector | None = None

    @property
    def worker(self) -> str:
        """The round's worker."""
        return self.round.worker

    @property
    def samples(self) -> int:
        """Samples presented in the round."""
        if self.cut is not None:
            return self.cut
        return self.round.samples if self.sizes is None else self.sizes.until(self.sizes.steps)

    @property
    def loss(self) -> float | None:
        """Mean loss of a sample."""
        return None if self.score is None else self.score.loss

    @property
    def accuracy(self) -> float | None:
        """Share of right answers."""
        return None if self.score is None else self.score.accuracy

    def event(self, epoch: float) -> RoundEnded:
        """Return the report as it is logged, at this epoch of the run."""
        numbers = {name: getattr(self, name) for name in RoundNumbers.model_fields if name not in _OF_ROUND}
        return RoundEnded(
            worker=self.worker,
            round=self.round.number,
            epoch=epoch,
            samples_per_second=self.samples / self.busy if self.busy else 0.0,
            **numbers,
            **({"members": list(self.members)} if self.members else {}),
        )
