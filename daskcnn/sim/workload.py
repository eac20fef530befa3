"""The workload of a simulation: the properties of a job that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from daskcnn.job.tables import Job
from daskcnn.ps.wire import Wire, bytes_of
from daskcnn.training.coordinator.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Settings):
    """A data-parallel job, with the settings of its coordinator.

    Its checkpoint_every, stall_timeout, lowers and guess matter to a recorded run that is played
    (`Simulation.play`). A simulated run does not go back.

    partition: the partitioner's name. numbers: in the vector that is pushed. wire: as in `[cluster]`.
    shards: workers that the server is split over. ema: as in `[train]`.
    """

    partition: str
    numbers: int
    wire: str = "float32"
    shards: int = 1
    ema: float | None = None

    @classmethod
    def of_job(cls, job: Job, *, samples: int, numbers: int) -> Workload:
        """Return the workload of a resolved job. samples: trained on. numbers: of the network's vector."""
        assert job.train.partition is not None, "resolved"
        assert job.rule is not None, "data-parallel"
        settings = Settings.of(job, samples)
        own: dict[str, Any] = {each.name: getattr(settings, each.name) for each in fields(Settings)}
        # all of the cluster's workers are of use, and no run goes back
        own |= {"wanted": {}, "measures_links": True, "lowers": False}
        of = job.cluster
        own |= {
            "wire": job.rule.wire(of.wire),
            "shards": of.ps_shards,
        }
        own["ema"] = job.train.ema
        return cls(partition=job.train.partition, numbers=numbers, **own)

    @property
    def way(self) -> Wire:
        """The way of vectors to the server and back."""
        return Wire.of(self.wire, self.rule)

    @property
    def coded(self) -> bool:
        """True if pushes lose something on their way, and it goes with the next one. Peers send weights as they are."""
        return self.way.coded and not self.rule.serverless

    @property
    def nbytes(self) -> int:
        """Bytes of a push."""
        return bytes_of(self.wire, self.numbers)

    @property
    def overlaps(self) -> bool:
        """True if replicas train on while they push and pull within a round (`training.replica_exchange`)."""
        return self.overlap and self.rule.overlaps
