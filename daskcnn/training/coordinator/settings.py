"""A job's settings for the coordinator: numbers, the rule and the partitioner. Cluster and simulator make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from daskcnn.job.tables import Job
from daskcnn.nn import OPTIMIZERS
from daskcnn.partition import PARTITIONERS, Partitioner
from daskcnn.partition.proportions import proportional
from daskcnn.ps import UpdateRule
from daskcnn.sharded.balance import ShareSearch, WorkerLinks
from daskcnn.training.coordinator.evaluations import Guessing
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.sharded_prices import ShardedPrices

STEPS_AHEAD = 3
"""Steps of a group, or of strategy `layer`, that are submitted before the oldest has ended."""
PATIENCE = 5.0
"""Work whose length is known may take this many times as long, and the stall timeout on top."""

Balancing: TypeAlias = Callable[[str, Mapping[str, Measured], WorkerLinks], ShareSearch]
"""Makes the search for shares from home, the workers' calibrations, and the links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run of any strategy.

    Attributes
    ----------
    samples, validation : Samples that are trained on, and those behind them that the center is judged on.
    patience : Evaluations without a better center after which the run stops early; None: never.
    checkpoint_every : Epochs between two checkpoints.
    snapshot_every : Seconds after which the state is kept, so that no more is trained again after a loss.
    stall_timeout : Seconds without a sign of life, on top of what a round or a step should take.
    wanted : Workers of each kind that the job asks for at most; empty: all there are.
    least : Workers of each kind with fewer of which the run pauses; empty: it goes on with any. wait: seconds at most
        that it pauses.
    asks : Workers that the run may ask its cluster for, by what each brings; 0: it asks for none.
    measures_links : Links are measured, and kernels shared out by what transfers take too.
    lowers : A run that diverges goes back once, with a lower learning rate.
    guess : The guess on the validation samples; None: it has no accuracy.
    even : Shares do not go by measured speeds.
    sized : Evaluations may be of a part of the validation samples. keeps_best: those of the center may not.
    """

    samples: int
    validation: int
    epochs: int
    batch_size: int
    patience: int | None = None
    checkpoint_every: float = 1.0
    snapshot_every: float = math.inf
    stall_timeout: float = 300.0
    wanted: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    wait: float = 60.0
    asks: int = 0
    measures_links: bool = True
    lowers: bool = False
    guess: Guessing | None = None
    even: bool = False
    sized: bool = False
    keeps_best: bool = False


def _of_any(job: Job, samples: int, guess: Guessing | None) -> dict[str, Any]:
    return {
        "samples": samples,
        "validation": job.data.validation,
        "epochs": job.train.epochs,
        "batch_size": job.train.batch_size,
        "patience": job.train.early_stopping,
        "checkpoint_every": job.run.checkpoint_every,
        "snapshot_every": job.run.snapshot_every,
        "stall_timeout": job.cluster.stall_timeout,
        "wanted": job.cluster.workers.most,
        "least": job.cluster.workers.given if job.cluster.workers.ranged else {},
        "wait": job.cluster.wait,
        "measures_links": job.train.kernel_shares == "measured",
        "lowers": job.train.on_divergence == "lower",
        "guess": guess,
        "even": job.train.reproducible,
        "sized": job.train.evaluation == "sized",
        "keeps_best": job.train.early_stopping is not None or job.train.hands_back == "best",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunSettings):
    """A data-parallel run.

    replica_size: workers of a replica. rate_power: power of the replicas' number that the learning rate grows by, if
    the rule scales it. averages: an average follows the center. largest_step: samples that a step may grow to with the
    gradient noise scale, as far as memory has room for them; None: it stays as it is. parts_ways: replicas may make
    steps of their own, where the strategy is chosen. overlap: they may train on while they exchange. sharded: prices of
    sharded kernels, which may be chosen too; None: they may not.
    """

    strategy: str
    rule: UpdateRule
    partitioner: Partitioner
    replica_size: int = 1
    rate_power: float = 1.0
    averages: bool = False
    largest_step: int | None = None
    parts_ways: bool = True
    overlap: bool = True
    sharded: ShardedPrices | None = None

    @classmethod
    def of(cls, job: Job, samples: int, guess: Guessing | None = None) -> Settings:
        """Return the settings of a resolved job. samples: those that are trained on."""
        train = job.train
        assert train.partition is not None, "resolved before the run"
        assert job.rule is not None, "strategy layer has a driver of its own"
        allowed = train.largest_batch
        most = min(samples, allowed) if isinstance(allowed, int) else None if allowed is None else samples
        return cls(
            strategy=train.strategy,
            rule=job.rule,
            partitioner=PARTITIONERS[train.partition](train.increments or 1, even=train.reproducible),
            replica_size=train.replica_size,
            rate_power=OPTIMIZERS[train.optimizer.name].rate_power,
            averages=train.ema is not None,
            largest_step=most,
            parts_ways=train.parts_ways,
            overlap=job.cluster.overlap and not train.reproducible,
            **_of_any(job, samples, guess),
        )

    def rate_scale(self, replicas: int) -> float:
        """Return the factor of the learning rate if this number of replicas trains."""
        return self.rule.rate(replicas, self.rate_power)

    def pace(self, workers: int, lr: float) -> dict[str, Any]:
        """Return the fields of `RunStarted` on replicas that step together, or whose number scales the rate.

        workers, lr: those that are there at the start, and the job's learning rate.
        """
        replicas, together = max(1, workers // self.replica_size), self.steps_together
        if not together and self.rule.rate(2) == 1:
            return {}
        found = {"replicas": replicas, "scaled_lr": lr * self.rate_scale(replicas)}
        if together:
            found["step_samples"] = self.batch_size * (1 if self.rule.shares_steps else replicas)
        return found

    def step_parts(self, sizes: Mapping[str, int], step: int) -> dict[str, int]:
        """Return each replica's part of a step that all share, in proportion to these samples; else nothing."""
        if not (self.shares_steps and any(sizes.values())):
            return {}
        return dict(zip(sizes, proportional(step, list(sizes.values())), strict=True))

    @property
    def chooses(self) -> bool:
        """True if the run chooses its rule itself: a worker that is alone needs no server."""
        return self.rule.chooses_workers and self.replica_size == 1

    @property
    def chooses_workers(self) -> bool:
        """True if it chooses among workers by what they bring: where shares go by speed."""
        return self.chooses and self.partitioner.adapts

    @property
    def peers(self) -> bool:
        """True if replicas merge peer to peer, without a server."""
        return self.rule.serverless

    @property
    def may_be_alone(self) -> bool:
        """True if a replica without others exchanges at the end of its rounds only. An average follows every merge."""
        return self.meets_within_rounds and not self.averages

    @property
    def meets_within_rounds(self) -> bool:
        """True if all replicas meet every few steps, so that each must have its part of the steps between."""
        return self.rule.barrier and self.rule.period is not None

    @property
    def steps_together(self) -> bool:
        """True if they make the same number of steps between two meetings."""
        return self.meets_within_rounds and not self.rule.steps_by_speed

    @property
    def shares_steps(self) -> bool:
        """True if all replicas share the samples of each step."""
        return self.meets_within_rounds and self.rule.shares_steps

    @property
    def resizes_steps(self) -> bool:
        """True if the server changes the workers' minibatches within rounds, as their speeds change."""
        alone = self.replica_size == 1 and not self.peers
        return alone and self.steps_together and self.partitioner.adapts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings(RunSettings):
    """A layer-sharded run.

    Attributes
    ----------
    balancing : Makes the search for shares.
    eq2 : Numbers that a step would exchange by Marques et al., eq. 2.
    chain : Most steps between two snapshots.
    report_every : Steps between two reports.
    between_moves : Steps at least that shares stay as they are.
    """

    balancing: Balancing
    eq2: int = 0
    chain: int = 250
    report_every: int = 25
    between_moves: int = 25

    @classmethod
    def of(cls, job: Job, samples: int, balancing: Balancing, eq2: int, guess: Guessing | None = None) -> LayerSettings:
        """Return the settings of a resolved job. samples: those that are trained on."""
        return cls(
            balancing=balancing,
            eq2=eq2,
            chain=job.cluster.chain,
            report_every=job.run.report_every,
            **_of_any(job, samples, guess),
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
