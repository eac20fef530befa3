"""A job and its data set: found or made, checked, and whether the two fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from daskcnn.arrays import cpu_count
from daskcnn.datasets.job_dataset import outlined
from daskcnn.errors import DataError, JobError
from daskcnn.job import prepared as checks
from daskcnn.job.dataset import doubts, on_data
from daskcnn.job.network import layout_of, loss_of, network_of, training_samples
from daskcnn.job.prepared import Prepared
from daskcnn.job.tables import Job
from daskcnn.nn import walk
from daskcnn.nn.layers import Auxiliary, BatchNorm
from daskcnn.nn.losses import USUAL
from daskcnn.nn.metrics import measured
from daskcnn.ps.wire import Wire
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.stages import samples_first
from daskcnn.store import Dataset, verify
from daskcnn.store.augmentation import steps_of
from daskcnn.store.augmentation.steps import Mixup
from daskcnn.store.manifest import Progress, Warn
from daskcnn.trained.fine_tuning import names_network, network_to_start_from, start_of, with_network
from daskcnn.training.weighting import weighting_of


def prepare_job(job: Job, *, progress: Progress, warn: Warn, begins: bool = True) -> Prepared:
    """Make the data set if it is not there yet, check all of it, and that the network fits.

    Only metadata and labels are read where arrays are used in place. begins: whether the job starts anew, from the
    trained weights that it names if it does. Raises DataError or JobError naming what is wrong.
    """
    dataset = outlined(job, progress=progress, warn=warn)
    return checked_job(job, dataset, progress=progress, begins=begins)


def checked_job(
    job: Job, dataset: Dataset, *, progress: Progress, between: Callable[[], None] = lambda: None, begins: bool = True
) -> Prepared:
    """Check all of the data set, calling `between` between its chunks, and that the network fits."""
    progress("check", 0, 0)
    verify(dataset, between)
    return fitted(job, dataset, begins=begins)


def fitted(job: Job, dataset: Dataset, *, begins: bool = True) -> Prepared:
    """Check the job's numbers and network against the data set. Raises JobError with all problems.

    begins: as for `prepare_job`. The trained weights are read here: raises DataError where they cannot be.
    """
    given, job = job, on_data(job, dataset.name, dataset.shape, len(dataset.classes), len(dataset.train))
    trained = network_to_start_from(job) if begins or not names_network(job) else None
    if trained is not None:
        job = with_network(job, trained, dataset)
    problems = [
        *checks.too_few_samples(job, dataset),
        *_labels_misfit(job, dataset),
        *checks.images_misfit(job, dataset),
    ]
    problems += [*checks.unmet_rates(job, dataset), *_failing_metrics(job, dataset)]
    layout, start = None, None
    try:
        layout = layout_of(job, dataset)
        problems += [*_uncuttable(job, dataset, layout.size), *checks.too_little_workspace(job, dataset)]
        problems += [*checks.single_numbers(job, dataset), *checks.pixels_misfit(job, dataset)]
        problems += checks.steps_of_parts(job, dataset)
        start = start_of(job, trained, dataset) if trained is not None and begins else None
    except JobError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"model: {error}")
    except MemoryError as error:
        problems.append(f"model: {error}, more than this machine has; choose a smaller network")
    if problems or layout is None:
        raise JobError(problems)
    loss = job.train.loss or USUAL[dataset.labels]
    job = job.model_copy(update={"train": job.train.model_copy(update={"loss": loss})})
    return Prepared(job, dataset, layout, start, tuple(doubts(given, job.train)))


def _labels_misfit(job: Job, dataset: Dataset) -> Iterator[str]:
    """Loss and weights that are not for the data set's labels."""
    labelled = training_samples(job, dataset) > 0 and "labels" in dataset.train.source.arrays
    for check in (loss_of, *([weighting_of] if labelled else [])):
        try:
            check(job, dataset)
        except JobError as error:
            yield from error.problems


def _failing_metrics(job: Job, dataset: Dataset) -> Iterator[str]:
    """Metrics that fail on two samples of equal probabilities: better here than after an epoch."""
    classes = len(dataset.classes)
    labels = np.zeros(2 if dataset.labels == "classes" else (2, classes), np.int64)
    for name in job.train.metrics or ():
        try:
            measured([name], np.full((2, classes), 1 / classes, job.model.dtype), labels)
        except DataError as error:
            yield f"train.metrics = {name!r}: {error.reason}; {error.remedy}"


def _uncuttable(job: Job, dataset: Dataset, numbers: int) -> Iterator[str]:
    """Cuts that the network does not allow: of its numbers over shards, of a minibatch, of a layer's samples."""
    unit = 1 if job.rule is None else Wire.of(job.cluster.wire, job.rule).unit
    if (most := -(-numbers // unit)) < job.cluster.ps_shards:
        has = f"{numbers} numbers" if unit == 1 else f"{numbers} numbers, in int8 {most} blocks of {unit}"
        yield f"cluster.ps_shards = {job.cluster.ps_shards}: the network has {has}; lower it"
    network = network_of(job, dataset)
    inside = list(walk(network, dataset.shape, composite=True))
    if heads := [path for path, layer, _ in inside if job.train.shards_kernels and isinstance(layer, Auxiliary)]:
        yield (
            f"model: {', '.join(heads)}: a step that shards kernels trains by the last layer's scores alone; "
            "remove such heads, or train whole replicas"
        )
    layers = inside if job.train.sub_batches > 1 else ()
    if names := [path for path, layer, _ in layers if isinstance(layer, BatchNorm) and layer.mixes_samples]:
        yield (
            f"train.sub_batches = {job.train.sub_batches}: {', '.join(names)} takes the mean of a whole minibatch; "
            "use 1, or a network without batch normalising"
        )
    if job.train.sub_batches > 1 and any(isinstance(step, Mixup) for step in steps_of(job.data.augment or "none")):
        yield (
            f"train.sub_batches = {job.train.sub_batches}: mixup takes the next image of a whole minibatch; use 1, or "
            "data.augment without mixup"
        )
    if job.train.shards_kernels:
        try:
            stages_of(network)
        except ValueError as reason:
            remedy = "use another strategy without groups, or layers that are not tied"
            yield f"train.strategy = {job.train.strategy!r}: {reason}, so kernels cannot be sharded; {remedy}"
            return
    if job.train.first_conv == "samples":
        try:
            samples_first(stages_of(network))
        except ValueError as reason:
            yield f"train.first_conv = 'samples': {reason}; use 'kernels'"


def may_need_server(job: Job) -> bool:
    """Return False for one worker of a local cluster that exchanges nothing: no process is started for a server."""
    settings = job.cluster
    workers = sum(settings.workers.most.values()) if settings.workers.most else cpu_count()
    return workers > 1 or not (job.rule is not None and job.rule.chooses_workers and job.train.ema is None)
