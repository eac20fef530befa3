"""A job's settings for the coordinator: numbers, the rule and the partitioner. Filled in by the cluster and by the
simulator alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from daskcnn.job.tables import Job, Train
from daskcnn.nn import OPTIMIZERS
from daskcnn.partition import PARTITIONERS, Partitioner
from daskcnn.ps import UpdateRule
from daskcnn.sharded.balance import ShareSearch, WorkerLinks
from daskcnn.training.coordinator.evaluations import Guessing
from daskcnn.training.coordinator.roster import Measured

STEPS_AHEAD = 3
"""Steps of a group, or of strategy `layer`, that are submitted before the oldest has ended."""
PATIENCE = 5.0
"""Work whose length is known may take this many times as long, and the stall timeout on top."""

Balancing: TypeAlias = Callable[[str, Mapping[str, Measured], WorkerLinks], ShareSearch]
"""What shares go by, from home, the workers' calibrations, and the links."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A data-parallel run.

    Attributes
    ----------
    samples, validation : samples that are trained on, and those behind them that the center is judged on.
    patience : looks at the center without a better one after which the run stops early; None: never.
    checkpoint_every : epochs between two checkpoints.
    stall_timeout : seconds without a sign of life, on top of what a round should take.
    replica_size : workers of a replica.
    wanted : workers of each kind that the job asks for; empty: all there are.
    measures_links : whether a group's shares go by what transfers take.
    rate_power : power of the replicas' number that the learning rate grows by, where the rule scales it.
    lowers : whether a run that diverges goes back once, with a lower learning rate.
    guess : what guessing comes to on the validation samples; None: it has no accuracy.
    """

    strategy: str
    rule: UpdateRule
    partitioner: Partitioner
    samples: int
    validation: int
    epochs: int
    batch_size: int
    patience: int | None = None
    checkpoint_every: float = 1.0
    stall_timeout: float = 300.0
    replica_size: int = 1
    wanted: Mapping[str, int] = field(default_factory=dict)
    measures_links: bool = True
    rate_power: float = 1.0
    lowers: bool = False
    guess: Guessing | None = None

    @classmethod
    def of(cls, job: Job, samples: int, guess: Guessing | None = None) -> Settings:
        """The settings of a resolved job. samples: those that are trained on."""
        train = job.train
        assert train.partition is not None, "resolved before the run"
        assert job.rule is not None, "strategy layer has a driver of its own"
        return cls(
            train.strategy,
            job.rule,
            PARTITIONERS[train.partition](train.increments or 1),
            samples,
            job.data.validation,
            train.epochs,
            train.batch_size,
            train.early_stopping,
            job.run.checkpoint_every,
            job.cluster.stall_timeout,
            train.replica_size,
            job.cluster.workers.given,
            measures_links=_by_transfers(train),
            rate_power=OPTIMIZERS[train.optimizer.name].rate_power,
            lowers=train.on_divergence == "lower",
            guess=guess,
        )

    def rate_scale(self, replicas: int) -> float:
        """Factor of the learning rate where this number of replicas trains."""
        return self.rule.rate(replicas) ** self.rate_power

    @property
    def peers(self) -> bool:
        """Whether replicas merge peer to peer, without a server."""
        return self.rule.serverless

    @property
    def meets_within_rounds(self) -> bool:
        """Whether all replicas meet every few steps, so that they must make the same number of them."""
        return self.rule.barrier and self.rule.period is not None


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """A layer-sharded run.

    Attributes
    ----------
    samples, validation : samples that are trained on, and those behind them that snapshots are judged on.
    balancing : computes what shares go by.
    eq2 : numbers that a step would exchange by Marques et al., eq. 2.
    patience : epochs without a better validation accuracy after which the run stops early; None: never.
    checkpoint_every : epochs between two checkpoints.
    stall_timeout : seconds without a sign of life.
    wanted : workers of each kind that the job asks for; empty: all there are.
    measures_links : whether shares go by what transfers take.
    snapshot_every : most steps between two snapshots.
    report_every : steps between two reports.
    between_moves : steps at least that shares stay as they are.
    lowers : whether a run that diverges goes back once, with a lower learning rate.
    guess : what guessing comes to on the validation samples; None: it has no accuracy.
    """

    samples: int
    validation: int
    epochs: int
    batch_size: int
    balancing: Balancing
    eq2: int = 0
    patience: int | None = None
    checkpoint_every: float = 1.0
    stall_timeout: float = 300.0
    wanted: Mapping[str, int] = field(default_factory=dict)
    measures_links: bool = True
    snapshot_every: int = 250
    report_every: int = 25
    between_moves: int = 25
    lowers: bool = False
    guess: Guessing | None = None

    @classmethod
    def of(cls, job: Job, samples: int, balancing: Balancing, eq2: int, guess: Guessing | None = None) -> LayerSettings:
        """The settings of a resolved job. samples: those that are trained on."""
        train = job.train
        return cls(
            samples,
            job.data.validation,
            train.epochs,
            train.batch_size,
            balancing,
            eq2,
            train.early_stopping,
            job.run.checkpoint_every,
            job.cluster.stall_timeout,
            job.cluster.workers.given,
            measures_links=_by_transfers(train),
            snapshot_every=job.cluster.chain,
            report_every=job.run.report_every,
            lowers=train.on_divergence == "lower",
            guess=guess,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Minibatches of an epoch, the last of which may be smaller."""
        return -(-self.samples // self.batch_size)

    @property
    def steps(self) -> int:
        """Minibatches of the whole run."""
        return self.steps_per_epoch * self.epochs

    @property
    def between_checkpoints(self) -> int:
        """Steps between two checkpoints."""
        return max(1, round(self.checkpoint_every * self.steps_per_epoch))


def _by_transfers(train: Train) -> bool:
    """Whether kernels are shared out by what transfers take, too."""
    return train.kernel_shares == "measured"
