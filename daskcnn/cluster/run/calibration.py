"""How fast is each worker? They measure themselves before they train, through the code of training."""

from __future__ import annotations

from dask.utils import format_bytes
from distributed import Future

from daskcnn.cluster.link.lost import NotYet, ServerLost, WorkersLost
from daskcnn.cluster.link.members import Member
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.worker.tasks import calibrate
from daskcnn.errors import Interrupted, Lost, UserError, told
from daskcnn.events import CalibratedWorker, Warned
from daskcnn.job.network import replica_bytes
from daskcnn.store.array_index import ArrayChanged
from daskcnn.training.coordinator.facts import Calibrated, CalibrationFailed, Fact


def submit_calibration(context: RunContext, worker: str) -> Future:
    """Let a worker of the run look whether it fits, and measure itself."""
    member = context.workers.alive[worker]
    _warn_of_two_kinds(context, worker)
    order = context.name, context.job, member.kind, context.dataset.fingerprint, context.dataset.index
    return context.dispatch.submit("calibrate", calibrate, *order, worker=worker)


def calibrated(context: RunContext, worker: str, future: Future, at: float) -> Fact:
    """Take the result of a worker's calibration; the context knows it from then on.

    Raises NotYet, and WorkersLost, ServerLost, Lost, Interrupted or ArrayChanged where that is found meanwhile.
    """
    try:
        found = context.results.fetch(future)
        context.workers.tell_news()
    except (NotYet, WorkersLost, ServerLost, Lost, Interrupted, ArrayChanged):
        raise
    except UserError as error:
        return CalibrationFailed(worker, told(error.value, error.reason, ""), error.remedy, at)
    except Exception as error:
        reason = f"calibration failed: {type(error).__name__}: {error}"
        return CalibrationFailed(worker, reason, "mend that on the worker, and start it again", at)
    context.calibrations[worker] = found
    return Calibrated(worker, found.seconds_per_sample, calibration_row(context.workers.alive[worker], found), at)


def lost_while_calibrated(context: RunContext, worker: str, at: float) -> CalibrationFailed:
    """A worker is left out with what it needed and had: most often it ran out of memory."""
    needs = replica_bytes(context.job, context.dataset)
    has = context.workers.alive[worker].memory_limit
    reason = f"lost while it was calibrated: it needs about {format_bytes(needs)} and has {format_bytes(has)}"
    remedy = "give it more memory (--memory-limit), or lower train.batch_size or train.workspace_mib"
    return CalibrationFailed(worker, reason, remedy, at)


def _warn_of_two_kinds(context: RunContext, worker: str) -> None:
    member = context.workers.alive[worker]
    if member.also:
        reason = f"advertises {member.declared}, and trains as {member.kind}"
        value, remedy = f"worker {worker} ({member.address})", "restart it with one of them"
        context.emit(Warned(value=value, reason=reason, remedy=remedy))


def calibration_row(member: Member, measured: Calibration) -> CalibratedWorker:
    """A calibrated worker as the log has it."""
    return CalibratedWorker(
        name=member.name,
        address=member.address,
        host=member.host,
        device=member.kind,
        processor=measured.device,
        threads=measured.threads,
        memory=measured.memory,
        images_per_second=1 / measured.seconds_per_sample,
        conv_seconds=measured.conv_seconds,
        conv_fixed=measured.conv_fixed,
        rest_seconds=measured.rest_seconds,
    )
