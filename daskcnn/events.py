"""The events of a run, typed. A writer constructs one, the log keeps its JSON, and a reader parses that.

A line of the log is one JSON object: "event" names the kind, "at" is the time, and the rest are the event's fields.
Fields that a writer does not give are left out. Times are seconds, sizes bytes. The log's "at" is a date and time with
its zone, or seconds in a simulation; a parsed event has it in seconds. The text in a field's annotation is its meaning,
for docs/events.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import NonNegativeFloat, NonNegativeInt, ValidationError, model_validator

from daskcnn.documents import first_problem
from daskcnn.errors import told
from daskcnn.event_base import ALONE as ALONE
from daskcnn.event_base import SURE as SURE
from daskcnn.event_base import SURER as SURER
from daskcnn.event_base import CalibratedWorker as CalibratedWorker
from daskcnn.event_base import DamagedEvent as DamagedEvent
from daskcnn.event_base import Event as Event
from daskcnn.event_base import Fields as Fields
from daskcnn.event_base import Judged as Judged
from daskcnn.event_base import PricedStep as PricedStep
from daskcnn.event_base import Spent as Spent
from daskcnn.event_base import UnknownEvent as UnknownEvent
from daskcnn.event_base import WorkerGain as WorkerGain
from daskcnn.event_base import asked_of as asked_of
from daskcnn.event_base import step_time as step_time

_REMEDY = "remove that line to read the rest, or give the log of a run of this version"


# --- the run ---


class RunStarted(Event):
    """A run starts, or is started again by a resume."""

    kind = "start"
    run: Annotated[str, "The run directory."] = ""
    strategy: Annotated[str, 'The update rule, or "layer" for layer sharding (`train.strategy`).'] = ""
    partition: Annotated[str | None, "The partitioner (`train.partition`)."] = None
    increments: Annotated[int | None, "Parts in which samples are allocated (`train.increments`)."] = None
    replica_size: Annotated[int | None, "Workers per replica (`train.replica_size`)."] = None
    rule: Annotated[dict[str, Any], "The options of the update rule."] = {}
    dataset: Annotated[str | None, "The data set's name."] = None
    model: Annotated[str | None, "The network's name, or its number of layers."] = None
    epochs: Annotated[float | None, "Epochs to train."] = None
    batch_size: Annotated[int | None, "Samples in a minibatch."] = None
    largest_batch: Annotated[
        NonNegativeInt | None, "Samples that a step may grow to (`train.largest_batch`); 0: as memory allows."
    ] = None
    optimizer: Annotated[str | None, "The optimizer (`train.optimizer`)."] = None
    lr: Annotated[float | None, "The learning rate at the start (`train.lr`)."] = None
    replicas: Annotated[int | None, "Replicas that step together, or whose number scales the learning rate."] = None
    scaled_lr: Annotated[float | None, "The learning rate at the start with this number of replicas."] = None
    step_samples: Annotated[int | None, "Samples of a step of all that step together."] = None
    seed: Annotated[int | None, "The run's seed."] = None
    samples: Annotated[NonNegativeInt | None, "Training samples, without those for validation."] = None
    validation_samples: Annotated[NonNegativeInt | None, "Samples held back for validation."] = None
    parameters: Annotated[NonNegativeInt | None, "Parameters of the network."] = None
    wire: Annotated[str | None, "The dtype in which weights travel."] = None
    vector_bytes: Annotated[NonNegativeInt | None, "Bytes of the weights as they travel."] = None
    simulated: Annotated[bool, "Whether it is a simulation: seconds are predicted, and nothing is trained."] = False


class RunResumed(Event):
    """A run goes on from a checkpoint."""

    kind = "resume"
    path: Annotated[str, "The checkpoint."] = ""
    step: Annotated[int, "The step, or the server's version, that the checkpoint holds."]
    epoch: Annotated[float | None, "Epochs that the run had trained then."] = None
    best: Annotated[float | None, "Best accuracy on all validation samples; without accuracies, 1 / (1 + loss)."] = None


class RunEnded(Event):
    """A run has ended."""

    kind = "end"
    status: Annotated[
        str, '"done", "stopped" (by the user\'s function), "diverged", "interrupted", "lost" or "failed".'
    ]
    seconds: Annotated[float | None, "Seconds of training, those before a resume included."] = None
    test: Annotated[Judged | None, "The trained network on the test samples."] = None
    reason: Annotated[str | None, "Why it ended before its last epoch, where it was not an error."] = None


class CheckpointWritten(Event):
    """A checkpoint was written."""

    kind = "checkpoint"
    path: Annotated[str, "The checkpoint."] = ""
    step: Annotated[int, "The step, or the server's version, that it holds."]


class ClockSet(Event):
    """The driver's clock was set, or its computer slept: the times of the log go on from another one."""

    kind = "clock"
    seconds: Annotated[float, "Seconds that it was set forward; below 0: back."]


# --- workers ---


class Calibrating(Event):
    """A worker is measuring itself; logged every few seconds where that takes longer."""

    kind = "calibrating"
    worker: Annotated[str, "The worker."]
    doing: Annotated[str, "What it is measuring, or compiling."]
    done: Annotated[NonNegativeInt, "Parts of that which are done."] = 0
    of: Annotated[NonNegativeInt, "Parts that it has; 0: it has none."] = 0


class WorkersCalibrated(Event):
    """Workers have measured themselves: those that the run begins with, or one that came later."""

    kind = "calibration"
    workers: Annotated[tuple[CalibratedWorker, ...], "A row per worker."]


class LinkSpeed(Fields):
    """A worker's link to home, the slower way, or to the server's host."""

    name: Annotated[str, "The worker."]
    bandwidth: Annotated[NonNegativeFloat | None, "Bytes per second; none: without limit."] = None
    latency: Annotated[NonNegativeFloat, "Seconds per message."] = 0.0
    handover: Annotated[NonNegativeFloat, "Seconds that a step needs in addition to go on there."] = 0.0


class LinkSpeeds(Event):
    """The links between the workers of a sharded network, or to the parameter server, were measured."""

    kind = "links"
    home: Annotated[str, "The worker to which the links lead."] = ""
    task: Annotated[NonNegativeFloat, "Seconds of the scheduler per task."] = 0.0
    workers: Annotated[tuple[LinkSpeed, ...], "A row per worker."]


class FormedGroup(Fields):
    """A group of workers that share one replica."""

    name: Annotated[str, "The group."]
    home: Annotated[str, "The member that holds the layers that are not sharded."] = ""
    members: Annotated[tuple[str, ...], "Its workers."] = ()
    device: Annotated[str, "What its members train on, counted."] = ""
    images_per_second: Annotated[
        NonNegativeFloat | None, "Images per second of its members together, by their calibration."
    ] = None


class GroupsFormed(Event):
    """Workers were grouped; from here on each group has rounds as a worker has."""

    kind = "groups"
    groups: Annotated[tuple[FormedGroup, ...], "A row per group."]
    left_out: Annotated[tuple[str, ...], "Workers in no group."] = ()


class KernelsSharded(Event):
    """The layers' kernels were cut over the workers."""

    kind = "shards"
    home: Annotated[str, "The worker that holds the layers that are not sharded; empty for groups."] = ""
    kernels: Annotated[dict[str, dict[str, int]], "Size of each shard, by worker and layer."]
    divided: Annotated[dict[str, dict[str, str]], 'What is cut, "kernels" (default) or "samples", of each shard.'] = {}
    of: Annotated[dict[str, int], "Kernels of each layer; shares of samples count in as many parts."] = {}
    eq2: Annotated[int | None, "Numbers that a step would exchange by Marques et al., eq. 2."] = None


class StrategyChosen(Event):
    """Strategies were compared by their expected seconds, and one was chosen: at the start, or between two rounds."""

    kind = "strategy"
    before: Annotated[
        PricedStep | None, "What is changed by what was measured since, at its present price; none: the run begins."
    ] = None
    candidates: Annotated[tuple[PricedStep, ...], "What was compared, the chosen one first."]
    parts: Annotated[tuple[WorkerGain, ...], "A row per worker, where steps are shared."] = ()
    faster_link: Annotated[float | None, "Factor of faster links at which another choice would be sooner."] = None
    linked: Annotated[PricedStep | None, "That choice."] = None
    more: Annotated[PricedStep | None, "The choice with another worker like the fastest, if it is sooner."] = None


class SamplesAllocated(Event):
    """Samples were allocated to the workers."""

    kind = "allocation"
    sizes: Annotated[dict[str, NonNegativeInt], "Samples of each worker, or group."]
    step: Annotated[dict[str, NonNegativeInt], "Those of a step that all share, by worker."] = {}
    alike: Annotated[bool, "True if those of a step are nearly as before: no line is shown."] = False


class WorkerJoined(Event):
    """A worker came in while the run was going on."""

    kind = "worker-joined"
    worker: Annotated[str, "The worker."]
    samples: Annotated[NonNegativeInt, "Samples that it took over."] = 0


class WorkerLeftOut(Event):
    """A worker was left out before it trained."""

    kind = "worker-left-out"
    worker: Annotated[str, "The worker."]
    reason: Annotated[str, "Why."]
    remedy: Annotated[str, "What to do about it."] = ""


class WorkerIgnored(Event):
    """A worker came while the run was going on, and takes no part."""

    kind = "worker-ignored"
    address: Annotated[str, "Its name, or its Dask address."]
    reason: Annotated[str, "Why."] = ""
    remedy: Annotated[str, "What to do about it."] = ""


class WorkerLost(Event):
    """A worker, or a group, was lost; training goes on without it."""

    kind = "worker-lost"
    worker: Annotated[str, "The worker or group."]
    reason: Annotated[str, "Why."] = ""
    samples_moved: Annotated[int, "Samples that went to the others."] = 0


class WorkerLeft(Event):
    """A worker left in good order, as it was asked to end; training goes on without it."""

    kind = "worker-left"
    worker: Annotated[str, "The worker."]
    reason: Annotated[str, "Why."] = ""
    samples_done: Annotated[NonNegativeInt, "Samples of its last round that it trained on, and that count."] = 0
    samples_moved: Annotated[NonNegativeInt, "Samples that went to the others."] = 0


class WorkersAsked(Event):
    """The run asks its cluster for more workers, as another one would shorten it."""

    kind = "workers-asked"
    workers: Annotated[NonNegativeInt, "Workers that the run has."]
    wanted: Annotated[NonNegativeInt, "Workers that it asks for in all."]
    gain: Annotated[float, "The part by which the next one shortens what is left of the run."]


class RunPaused(Event):
    """Fewer workers are there than the job's least: no more work is given out until others come."""

    kind = "paused"
    workers: Annotated[NonNegativeInt, "Workers that are there."]
    missing: Annotated[dict[str, NonNegativeInt], 'Workers that are missing, by kind, "cpu" or "gpu".']
    wait: Annotated[NonNegativeFloat, "Seconds after which the run ends if none comes."]


class RunContinued(Event):
    """Enough workers are there again after a pause."""

    kind = "continued"
    workers: Annotated[NonNegativeInt, "Workers that are there."]
    seconds: Annotated[NonNegativeFloat, "Seconds of the pause."]


# --- training ---


class RoundNumbers(Fields):
    """Measurements of a worker in a round, from the weights that it gets to the push that ends it."""

    worker: Annotated[str, "The worker or group."]
    round: Annotated[NonNegativeInt, "The worker's round, from 0."]
    samples: Annotated[NonNegativeInt, "Samples it trained on."]
    busy: Annotated[NonNegativeFloat, "Seconds it loaded and computed."]
    load: Annotated[NonNegativeFloat, "Of `busy`, the seconds it waited for data."] = 0.0
    wait: Annotated[NonNegativeFloat, "Seconds it waited for the other workers."]
    communication: Annotated[NonNegativeFloat, "Seconds of exchanges, without `wait`."]
    evaluation: Annotated[NonNegativeFloat, "Seconds it judged weights on validation samples."] = 0.0
    q_samples: Annotated[NonNegativeInt | None, "Validation samples on which it measured each Q."] = None
    q_measured: Annotated[
        NonNegativeInt | None, "Times that it measured Q: not for every push, where many are made."
    ] = None
    judged: Annotated[NonNegativeInt | None, "Validation samples on which it judged the center."] = None
    bytes_up: Annotated[NonNegativeInt, "Bytes it sent."]
    bytes_down: Annotated[NonNegativeInt, "Bytes it received."]
    pushes: Annotated[NonNegativeInt, "Its pushes."] = 1
    base_version: Annotated[int | None, "The server's version that its last push was trained from."] = None
    version: Annotated[int | None, "The server's version after its last push."] = None
    staleness: Annotated[int | None, "The largest staleness of its pushes, in merges between base and push."] = None
    gamma: Annotated[float | None, "The attenuation γ of its last push, 0 to 1."] = None
    q: Annotated[float | None, "The Q that weighed its last push: accuracy, or 1 / (1 + loss), 0 to 1."] = None
    accuracy: Annotated[float | None, "Share of its training samples classified correctly, 0 to 1."] = None
    loss: Annotated[float | None, "Mean loss per training sample."] = None
    lr: Annotated[float | None, "The learning rate of its last step."] = None


class GroupMember(Spent):
    """Time and traffic of a worker in a round of its group."""


class RoundEnded(Event, RoundNumbers):
    """A worker, or a group, has ended a round."""

    kind = "round"
    epoch: Annotated[float, "Epochs that the run has trained so far."]
    samples_per_second: Annotated[NonNegativeFloat | None, "Samples per busy second."] = None
    members: Annotated[tuple[GroupMember, ...], "A row per worker of a group."] = ()


class StepWorker(Fields):
    """A worker's shards."""

    name: Annotated[str, "The worker."]
    kernels: Annotated[dict[str, int], "Size of each shard, by layer."] = {}
    conv_seconds: Annotated[float | None, "Seconds in convolution layers."] = None


class StepsEnded(Event):
    """Steps of a layer-sharded run have ended; logged every few steps."""

    kind = "steps"
    step: Annotated[int, "Steps that the run has trained so far."]
    epoch: Annotated[float, "Epochs that the run has trained so far."]
    loss: Annotated[float | None, "Mean loss per sample of the last step."] = None
    lr: Annotated[float | None, "The learning rate of the last step."] = None
    seconds_per_step: Annotated[NonNegativeFloat, "Seconds of a step, the mean since the last such event."]
    workers: Annotated[tuple[StepWorker, ...], "A row per worker."] = ()


class EpochWorker(Spent):
    """Time and traffic of a worker in an epoch of a layer-sharded run."""

    samples: Annotated[NonNegativeInt, "Samples of the epoch, which all workers share."]
    wait: Annotated[NonNegativeFloat, "Seconds it did not compute."]
    communication: Annotated[NonNegativeFloat, "Seconds of exchanges; 0 where they count as waiting."] = 0.0


class EpochEnded(Event):
    """The center was judged on the validation samples: after a synchronous round, or once an epoch."""

    kind = "epoch"
    epoch: Annotated[float, "Epochs that the run has trained so far."]
    epochs: Annotated[float | None, "Epochs to train."] = None
    step: Annotated[int, "Steps, or merges of the server, so far."]
    loss: Annotated[float | None, "Mean loss per training sample since the last such event."] = None
    accuracy: Annotated[float | None, "Share of training samples classified correctly since then, 0 to 1."] = None
    validation: Annotated[Judged | None, "The center on the validation samples."] = None
    samples_per_second: Annotated[NonNegativeFloat | None, "Samples trained on per second since then."] = None
    lr: Annotated[float | None, "The learning rate of the last step."] = None
    noise_scale: Annotated[NonNegativeFloat | None, "Gradient noise scale in samples; none where unknown."] = None
    noise_error: Annotated[NonNegativeFloat | None, "Standard error of `noise_scale`."] = None
    noise_within_error: Annotated[
        bool, "True where the noise scale was measured, and is unknown because the gradient is within its error."
    ] = False
    step_samples: Annotated[NonNegativeInt | None, "Samples of a step since then, where they may grow."] = None
    seconds: Annotated[NonNegativeFloat, "Seconds since the last such event."] = 0.0
    workers: Annotated[tuple[EpochWorker, ...], "A row per worker of a layer-sharded run."] = ()


class StepResized(Event):
    """Steps have other samples from here on, by the gradient noise scale (`train.batch_size = "auto"`)."""

    kind = "step-samples"
    samples: Annotated[NonNegativeInt, "Samples of a step of all workers."]
    before: Annotated[NonNegativeInt, "Those of a step until now."]
    rate: Annotated[NonNegativeFloat, "Factor of the learning rate, which is that of the job's first samples."]
    fixed: Annotated[NonNegativeFloat, "Seconds of a step that do not depend on its samples."]
    noise_scale: Annotated[NonNegativeFloat | None, "Gradient noise scale in samples; none where unknown."] = None
    noise_error: Annotated[NonNegativeFloat | None, "Standard error of `noise_scale`."] = None


class ServerCounted(Event):
    """Counts of a parameter server so far."""

    kind = "server"
    server: Annotated[int, "The server's number in the run, from 1."]
    merged: Annotated[NonNegativeInt, "Pushes merged."]
    repeated: Annotated[NonNegativeInt, "Pushes that came again and were not merged twice."]
    refused: Annotated[dict[str, int], "Pushes refused, by reason."]


class Warned(Event):
    """Something out of the ordinary, for people to read: value, reason and remedy, or a message."""

    kind = "warning"
    value: Annotated[str, "What the warning is about."] = ""
    reason: Annotated[str, "What is out of the ordinary."] = ""
    remedy: Annotated[str, "What to do about it."] = ""
    message: Annotated[str, "The whole warning, where it has no parts."] = ""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not (self.reason or self.message):
            raise ValueError("field required: message, or reason")
        return self

    @property
    def text(self) -> str:
        """The warning in one line or a few: "value: reason; remedy", or the message."""
        return self.message or told(self.value, self.reason, self.remedy)


EVENTS: dict[str, type[Event]] = {
    model.kind: model
    for model in (
        *(RunStarted, RunResumed, ClockSet, Calibrating, WorkersCalibrated, LinkSpeeds, GroupsFormed, KernelsSharded),
        *(StrategyChosen, SamplesAllocated),
        *(RoundEnded, StepsEnded, EpochEnded, StepResized, ServerCounted, CheckpointWritten, Warned),
        *(WorkerLost, WorkerLeft, WorkerIgnored, WorkerJoined, WorkerLeftOut, WorkersAsked, RunPaused, RunContinued),
        RunEnded,
    )
}
"""Every event by its kind, in the order in which a reader meets them."""


def parse(record: Mapping[str, Any], where: str = "event") -> Event:
    """Return the event of a log's record; an `UnknownEvent` for a kind that this version does not know.

    Raises DamagedEvent naming the record and its first wrong field.
    """
    fields = dict(record)
    kind = fields.pop("event", None)
    if not isinstance(kind, str):
        raise DamagedEvent(where, f"says of no event what it is (event = {kind!r})", _REMEDY)
    if (model := EVENTS.get(kind)) is None:
        return UnknownEvent(name=kind)
    try:
        return model.model_validate(fields, extra="ignore")
    except ValidationError as error:
        problem = first_problem(error)
        place = f"{where} ({kind}): {problem.where} = {problem.value}"
        raise DamagedEvent(place, problem.reason, _REMEDY) from error


def parsed(records: Iterable[Mapping[str, Any]], first: int = 1) -> Iterator[Event]:
    """Yield the events of a log, in order, without kinds that this version does not know. Raises as `parse`.

    first: number of the first line.
    """
    for line, record in enumerate(records, start=first):
        event = parse(record, f"line {line}")
        if not isinstance(event, UnknownEvent):
            yield event
