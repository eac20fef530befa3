"""The workload of a simulation: the properties of a job that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskcnn.job.tables import Job
from daskcnn.nn import OPTIMIZERS
from daskcnn.partition import PARTITIONERS, Partitioner
from daskcnn.ps import UpdateRule
from daskcnn.training.coordinator.evaluations import Guessing
from daskcnn.training.coordinator.settings import Settings


@dataclass(frozen=True)
class Workload:
    """A data-parallel job. samples, validation: trained on, and judged by. numbers: in the vector that is pushed.

    wire: the dtype that it travels in. patience: evaluations without improvement after which it stops early.
    overlap: as in `[cluster]`. shards: workers that the server is split over. rate_power: as in `Settings`.
    checkpoint_every, stall_timeout, lowers, guess: as in `Settings`; they matter to a recorded run that is played
    (`Simulation.play`). A simulated run does not go back.
    """

    strategy: str
    rule: UpdateRule
    partition: str
    partitioner: Partitioner
    samples: int
    validation: int
    epochs: int
    batch_size: int
    numbers: int
    wire: str = "float32"
    patience: int | None = None
    overlap: bool = True
    shards: int = 1
    checkpoint_every: float = 1.0
    stall_timeout: float = 300.0
    rate_power: float = 1.0
    lowers: bool = False
    guess: Guessing | None = None

    @classmethod
    def of(cls, job: Job, *, samples: int, numbers: int) -> Workload:
        """The workload of a resolved job. samples: those that are trained on; numbers: in the network's vector."""
        train = job.train
        assert train.partition is not None, "resolved"
        assert job.rule is not None, "data-parallel"
        return cls(
            train.strategy,
            job.rule,
            train.partition,
            PARTITIONERS[train.partition](train.increments or 1),
            samples,
            job.data.validation,
            train.epochs,
            train.batch_size,
            numbers,
            job.rule.wire(job.cluster.wire),
            train.early_stopping,
            job.cluster.overlap,
            job.cluster.ps_shards,
            job.run.checkpoint_every,
            job.cluster.stall_timeout,
            OPTIMIZERS[job.train.optimizer.name].rate_power,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the vector on the wire."""
        return self.numbers * np.dtype(self.wire).itemsize

    @property
    def settings(self) -> Settings:
        """The settings for the coordinator."""
        return Settings(
            strategy=self.strategy,
            rule=self.rule,
            partitioner=self.partitioner,
            samples=self.samples,
            validation=self.validation,
            epochs=self.epochs,
            batch_size=self.batch_size,
            patience=self.patience,
            checkpoint_every=self.checkpoint_every,
            stall_timeout=self.stall_timeout,
            rate_power=self.rate_power,
            lowers=self.lowers,
            guess=self.guess,
        )

    @property
    def judged(self) -> tuple[int, int]:
        """The validation samples, as they lie in the training part."""
        return self.samples, self.samples + self.validation

    @property
    def judges_pushes(self) -> bool:
        """True if every push is weighed by its accuracy on the validation samples."""
        return self.rule.judges_pushes

    @property
    def overlaps(self) -> bool:
        """True if replicas train on while they push and pull within a round (`training.replica_exchange`)."""
        return self.overlap and self.rule.overlaps
