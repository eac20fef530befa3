"""A job whose data set is there, and the checks of its numbers and its network against that data set.

Every check yields its problems as lines for a `JobError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np

from daskcnn.arrays import Array, Device, Pool
from daskcnn.conv import ConvSpec, plan
from daskcnn.errors import JobError
from daskcnn.job.network import (
    center_descent_of,
    convolutions,
    layout_of,
    network_of,
    reconstructs,
    replica_bytes,
    training_samples,
)
from daskcnn.job.tables import Job
from daskcnn.nn import Layout, walk
from daskcnn.nn.layers import BatchNorm, Sigmoid
from daskcnn.nn.network import views_problem
from daskcnn.nn.optimizers.descent import layers_of, unmet
from daskcnn.store import Dataset
from daskcnn.store.augmentation import image_problems

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Start:
    """The weights that a run starts from: a flat host vector (parameters, then state).

    loaded : layers that have trained weights.
    new : layers that have initial weights, with the reason.
    """

    source: str
    weights: Array
    loaded: tuple[str, ...]
    new: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        new = "".join(f"; {name} is new: {reason}" for name, reason in self.new.items())
        return f"{', '.join(self.loaded)} from {self.source}{new}"


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


def too_few_samples(job: Job, dataset: Dataset) -> Iterator[str]:
    """Problems of a job with fewer training samples than it needs."""
    samples = training_samples(job, dataset)
    if samples < 1:
        total = len(dataset.train)
        lower = f"lower it, such as --set data.validation={max(1, total // 10)}"
        remedy = lower if total > 1 else "give two training samples or more"
        yield f"data.validation = {job.data.validation}: leaves nothing of {total} training samples; {remedy}"
    elif (job.train.increments or 1) > samples:
        yield f"train.increments = {job.train.increments}: more than {samples} training samples; lower it"


def images_misfit(job: Job, dataset: Dataset) -> Iterator[str]:
    """Steps of augmentation that the data set's images do not have, and views that the network cannot look at."""
    for problem in image_problems(job.data.augment or "none", dataset):
        yield f"data.augment.{problem}"
    if unfit := views_problem(job.data.views, dataset.shape, reconstructs=reconstructs(job)):
        yield f"data.views = {unfit}"


def unmet_rates(job: Job, dataset: Dataset) -> Iterator[str]:
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


def pixels_misfit(job: Job, dataset: Dataset) -> Iterator[str]:
    """Pixels that do not lie between 0 and 1, where the network or the loss wants that."""
    loss, (last, layer) = job.train.loss, network_of(job, dataset).layers[-1]
    if not reconstructs(job):
        return
    own = loss == "sigmoid-reconstruction"
    if own and isinstance(layer, Sigmoid):
        yield f"train.loss = {loss!r}: it takes the sigmoid itself; leave out {last}, or use 'reconstruction'"
    low, high = 0.0, 1.0  # real numbers may be any
    if dataset.dtype.kind in "iu":
        info = np.iinfo(dataset.dtype)
        edges = [(edge - dataset.mean) / dataset.deviation for edge in (info.min, info.max)]
        low, high = float(np.min(edges)), float(np.max(edges))
    if (own or isinstance(layer, Sigmoid)) and (low < -_ROUNDING or high > 1 + _ROUNDING):
        lies = f"{f'the loss {loss!r} wants' if own else f'layer {last} makes'} pixels between 0 and 1"
        C, most = dataset.shape[-1], np.iinfo(dataset.dtype).max
        remedy = f"set data.scale to mean = {[0.0] * C} and deviation = {[float(most)] * C}"
        yield f"train.loss = {loss!r}: {lies}, and those of the data set become {low:.3g} to {high:.3g}; {remedy}"


def steps_of_parts(job: Job, dataset: Dataset) -> Iterator[str]:
    """Steps of the optimizer that no part of a split server can make by itself."""
    steps = center_descent_of(job, layout_of(job, dataset)) if job.cluster.ps_shards > 1 else None
    if steps is not None and not steps.splits:
        clip, name = job.train.clip, job.train.optimizer.name
        asks = f"train.optimizer = {name!r}" if clip is None else f"train.clip = {clip:g}"
        yield (
            f"cluster.ps_shards = {job.cluster.ps_shards}: each part of the server steps by itself, and {asks} needs "
            'the norms of whole parameters; use 1, or rule.combine = "average"'
        )


def single_numbers(job: Job, dataset: Dataset) -> Iterator[str]:
    """Layers that would normalise a channel over a single number: of minibatches of one sample, behind the pixels."""
    inside = walk(network_of(job, dataset), dataset.shape) if job.train.batch_size == 1 else ()
    mixing = ((path, shape) for path, layer, shape in inside if isinstance(layer, BatchNorm) and layer.mixes_samples)
    if names := [path for path, shape in mixing if prod(shape[:-1]) == 1]:
        yield (
            f"train.batch_size = 1: {', '.join(names)} normalises each channel over a minibatch, which has one number "
            "of it there; use 2 or more, or a network without batch normalising behind its pixels"
        )


def too_little_workspace(job: Job, dataset: Dataset) -> Iterator[str]:
    """Convolutions that cannot be planned: each is, so that one that cannot fit is refused here."""
    for name, spec in conv_specs(job, dataset):
        try:
            plan(spec, planning_device(job))
        except ValueError as error:
            yield f"model: layer {name}: {error} (train.workspace_mib, train.batch_size)"


def planning_device(job: Job) -> Device:
    """This machine's processor, to plan with as a worker does."""
    pool, limit = Pool(job.train.threads or 1), job.train.workspace_mib << 20
    return Device(pool=pool, workspace_limit=limit, exact=job.train.exact, tuned=not job.train.reproducible)


_PASSES = 3
"""Copies of a network's outputs that a step holds: of the way forth, of the way back, and what layers keep for it."""


def largest_step(job: Job, dataset: Dataset, memory: int) -> int:
    """Return the samples of the largest step that a worker of this memory, in bytes, could make by itself.

    At least the job's own: that they fit is checked otherwise.
    """
    network, itemsize = network_of(job, dataset), np.dtype(job.model.dtype).itemsize
    each = _PASSES * itemsize * sum(prod(shape) for _, _, shape in walk(network, dataset.shape))
    return max(job.train.batch_size, (memory - replica_bytes(job, dataset)) // each)


def conv_specs(job: Job, dataset: Dataset) -> list[tuple[str, ConvSpec]]:
    """Every convolution of the network by name, as the problem it is at the job's batch size."""
    return convolutions(network_of(job, dataset), dataset.shape, job.train.batch_size, job.model.dtype)
