"""What every shell of a coordinator does alike: exceptions of the cluster, and a look round, become facts."""

from __future__ import annotations

from daskcnn.cluster.members import Member
from daskcnn.cluster.protocol import Calibration
from daskcnn.cluster.run_context import RunContext, WorkersLost
from daskcnn.errors import Interrupted, Lost
from daskcnn.events import CalibratedWorker
from daskcnn.training.coordinator import facts
from daskcnn.training.coordinator.roster import Measured

BROKEN = (WorkersLost, Interrupted, Lost)
"""What any call to the cluster may raise in place of its result."""


def fact_of(context: RunContext, broken: WorkersLost | Interrupted | Lost, at: float) -> facts.Fact:
    """The exception as a fact. A signal is told once: what is under way then is the coordinator's to end."""
    if isinstance(broken, WorkersLost):
        return facts.WorkerGone(broken.names, "connection lost", at)
    if isinstance(broken, Interrupted):
        context.ignore_signals()
        return facts.Interrupted(broken.signum, at)
    return facts.SchedulerGone(broken, at)


def look_round(context: RunContext, at: float) -> list[facts.Fact]:
    """What has become of workers and scheduler since the last look."""
    try:
        context.look_round()
    except BROKEN as broken:
        return [fact_of(context, broken, at)]
    return []


def measured(member: Member, found: Calibration) -> Measured:
    """A worker's calibration as a coordinator knows it."""
    row = CalibratedWorker(
        name=member.name,
        address=member.address,
        host=member.host,
        device=member.kind,
        processor=found.device,
        threads=found.threads,
        memory=found.memory,
        images_per_second=1 / found.seconds_per_sample,
        conv_seconds=found.conv_seconds,
        conv_fixed=found.conv_fixed,
    )
    return Measured(found.seconds_per_sample, row)
