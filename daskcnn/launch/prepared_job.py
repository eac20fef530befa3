"""A job and its data set: found or made, checked, and whether the two fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from daskcnn.arrays import Device, Pool
from daskcnn.conv import ConvSpec, plan
from daskcnn.datasets.job_dataset import outlined
from daskcnn.errors import JobError
from daskcnn.job.dataset import doubts, on_data
from daskcnn.job.network import convolutions, layout_of, loss_of, network_of, reconstructs, training_samples
from daskcnn.job.tables import LAYER, Job
from daskcnn.nn import Layout, walk
from daskcnn.nn.layers import Auxiliary, BatchNorm, Sigmoid
from daskcnn.nn.losses import USUAL
from daskcnn.nn.network import views_problem
from daskcnn.nn.optimizers.descent import layers_of, unmet
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.stages import samples_first
from daskcnn.store import Dataset, verify
from daskcnn.store.augmentation import image_problems
from daskcnn.trained.fine_tuning import Start, names_network, start_of, with_network
from daskcnn.trained.place import FoundNetwork, find_network
from daskcnn.training.weighting import weighting_of

Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Prepared:
    """A job whose data set is there, checked, and fits the network.

    start : trained weights that it starts from; None where it starts from initial ones, or goes on with a run.
    doubts : what the user may not have meant.
    """

    job: Job
    dataset: Dataset
    layout: Layout
    start: Start | None = None
    doubts: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples that are trained on."""
        return training_samples(self.job, self.dataset)


def prepare_job(job: Job, *, progress: Progress, warn: Warn, begins: bool = True) -> Prepared:
    """Make the data set if it is not there yet, check all of it, and that the network fits.

    Only metadata and labels are read where arrays are used in place. begins: whether the job starts anew, from the
    trained weights that it names if it does. Raises DataError or JobError naming what is wrong.
    """
    dataset = outlined(job, progress=progress, warn=warn)
    return checked_job(job, dataset, progress=progress, begins=begins)


def checked_job(
    job: Job,
    dataset: Dataset,
    *,
    progress: Progress,
    between: Callable[[], None] = lambda: None,
    begins: bool = True,
) -> Prepared:
    """Check all of the data set, calling `between` between its chunks, and that the network fits."""
    progress("check", 0, 0)
    verify(dataset, between)
    return fitted(job, dataset, begins=begins)


def fitted(job: Job, dataset: Dataset, *, begins: bool = True) -> Prepared:
    """Check the job's numbers and network against the data set. Raises JobError with all problems.

    begins: as for `prepare_job`; the trained weights are read here. Raises DataError where they cannot be.
    """
    given, job = job, on_data(job, dataset.name, dataset.shape, len(dataset.classes), len(dataset.train))
    job, trained = _with_trained(job, dataset, begins=begins)
    problems = [*_too_few_samples(job, dataset), *_labels_misfit(job, dataset), *_images_misfit(job, dataset)]
    problems += _unmet_rates(job, dataset)
    layout, start = None, None
    try:
        layout = layout_of(job, dataset)
        problems += [*_uncuttable(job, dataset, layout.size), *_too_little_workspace(job, dataset)]
        problems += _pixels_misfit(job, dataset)
        start = start_of(job, trained, dataset) if trained is not None and begins else None
    except JobError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"model: {error}")
    except MemoryError as error:
        problems.append(f"model: {error}, more than this machine has; choose a smaller network")
    if problems or layout is None:
        raise JobError(problems)
    return Prepared(_with_loss(job, dataset), dataset, layout, start, tuple(doubts(given, job.train)))


def _with_trained(job: Job, dataset: Dataset, *, begins: bool) -> tuple[Job, FoundNetwork | None]:
    """The trained weights that the job names, if they are needed, and the job with their network if it names none."""
    if job.model.from_ is None or not (begins or not names_network(job)):
        return job, None
    trained = find_network(job.model.from_, "best")
    return with_network(job, trained, dataset), trained


def _with_loss(job: Job, dataset: Dataset) -> Job:
    """The job with the usual loss of the data set's labels where it names none."""
    loss = job.train.loss or USUAL[dataset.labels]
    return job.model_copy(update={"train": job.train.model_copy(update={"loss": loss})})


def _too_few_samples(job: Job, dataset: Dataset) -> Iterator[str]:
    """Problems of a job with fewer training samples than it needs."""
    samples = training_samples(job, dataset)
    if samples < 1:
        total = len(dataset.train)
        lower = f"lower it, such as --set data.validation={max(1, total // 10)}"
        remedy = lower if total > 1 else "give two training samples or more"
        yield f"data.validation = {job.data.validation}: leaves nothing of {total} training samples; {remedy}"
    elif (job.train.increments or 1) > samples:
        yield f"train.increments = {job.train.increments}: more than {samples} training samples; lower it"


def _labels_misfit(job: Job, dataset: Dataset) -> Sequence[str]:
    """Loss and weights that are not for the data set's labels."""
    problems: list[str] = []
    try:
        loss_of(job, dataset)
    except JobError as error:
        problems += error.problems
    try:
        if training_samples(job, dataset) > 0:
            weighting_of(job, dataset)
    except JobError as error:
        problems += error.problems
    return problems


def _images_misfit(job: Job, dataset: Dataset) -> Iterator[str]:
    """Steps of augmentation that the data set's images do not have, and views that the network cannot look at."""
    for problem in image_problems(job.data.augment or "none", dataset):
        yield f"data.augment.{problem}"
    if unfit := views_problem(job.data.views, dataset.shape, reconstructs=reconstructs(job)):
        yield f"data.views = {unfit}"


def _unmet_rates(job: Job, dataset: Dataset) -> Iterator[str]:
    """Patterns of `train.rates` that no layer with weights has, unless the network itself is wrong."""
    if not job.train.rates:
        return
    try:
        thawed = job.model_copy(update={"model": job.model.model_copy(update={"freeze": None})})
        layout = layout_of(thawed, dataset)
    except (JobError, ValueError, MemoryError):
        return
    layers = ", ".join(dict.fromkeys(layers_of(path)[-1] for path, _ in layout.places()))
    for pattern in unmet(job.train.rates, layout):
        yield f"train.rates: {pattern!r} matches no layer with weights; there are {layers}"


def _pixels_misfit(job: Job, dataset: Dataset) -> Iterator[str]:
    """Pixels that do not lie between 0 and 1, where the network or the loss wants that."""
    loss, (last, layer) = job.train.loss, network_of(job, dataset).layers[-1]
    if not reconstructs(job):
        return
    own = loss == "sigmoid-reconstruction"
    if own and isinstance(layer, Sigmoid):
        yield f"train.loss = {loss!r}: it takes the sigmoid itself; leave out {last}, or use 'reconstruction'"
    low, high = _span_of_pixels(dataset)
    if (own or isinstance(layer, Sigmoid)) and (low < -_ROUNDING or high > 1 + _ROUNDING):
        lies = f"{f'the loss {loss!r} wants' if own else f'layer {last} makes'} pixels between 0 and 1"
        C, most = dataset.shape[-1], np.iinfo(dataset.dtype).max
        remedy = f"set data.scale to mean = {[0.0] * C} and deviation = {[float(most)] * C}"
        yield f"train.loss = {loss!r}: {lies}, and those of the data set become {low:.3g} to {high:.3g}; {remedy}"


def _span_of_pixels(dataset: Dataset) -> tuple[float, float]:
    """The least and the greatest pixel that the network may be given. Of real numbers, which may be any: 0 and 1."""
    if dataset.dtype.kind not in "iu":
        return 0.0, 1.0
    info = np.iinfo(dataset.dtype)
    edges = [(edge - dataset.mean) / dataset.deviation for edge in (info.min, info.max)]
    return float(np.min(edges)), float(np.max(edges))


def _uncuttable(job: Job, dataset: Dataset, numbers: int) -> Iterator[str]:
    """Cuts that the network does not allow: of its numbers over shards, of a minibatch, of a layer's samples."""
    if numbers < job.cluster.ps_shards:
        yield f"cluster.ps_shards = {job.cluster.ps_shards}: the network has {numbers} numbers; lower it"
    network = network_of(job, dataset)
    sharded = job.train.strategy == LAYER or job.train.replica_size > 1
    inside = list(walk(network, dataset.shape, composite=True))
    if heads := [path for path, layer, _ in inside if sharded and isinstance(layer, Auxiliary)]:
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
    if job.train.strategy == LAYER or job.train.replica_size > 1:
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


def _too_little_workspace(job: Job, dataset: Dataset) -> Iterator[str]:
    """Convolutions that cannot be planned: each is, so that one that cannot fit is refused here."""
    for name, spec in conv_specs(job, dataset):
        try:
            plan(spec, planning_device(job))
        except ValueError as error:
            yield f"model: layer {name}: {error} (train.workspace_mib, train.batch_size)"


def planning_device(job: Job) -> Device:
    """This machine's processor, to plan with as a worker does."""
    pool, limit = Pool(job.train.threads or 1), job.train.workspace_mib << 20
    return Device(pool=pool, workspace_limit=limit, exact=job.train.exact)


def conv_specs(job: Job, dataset: Dataset) -> list[tuple[str, ConvSpec]]:
    """Every convolution of the network by name, as the problem it is at the job's batch size."""
    return convolutions(network_of(job, dataset), dataset.shape, job.train.batch_size, job.model.dtype)
