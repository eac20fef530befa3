"""A job's network for a data set: layers, initial weights, convolutions, optimizer, loss and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import prod

import numpy as np
from psutil import virtual_memory

from daskcnn.arrays import Array
from daskcnn.conv import ConvSpec
from daskcnn.errors import ClusterError, JobError
from daskcnn.job.tables import LAYER, Job, Schedule, Train
from daskcnn.nn import (
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    Descent,
    Layout,
    Loss,
    Optimizer,
    OptimizerState,
    Sequential,
    StepPace,
    build_model,
    freeze,
    init_network,
    vector,
    walk,
)
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.losses import USUAL, SoftmaxCrossEntropy
from daskcnn.nn.network import SAMPLES, patch_moments, whitened_layer, whitening_kernels
from daskcnn.nn.optimizers import Averaged, CenterDescent, Lookahead
from daskcnn.nn.schedule import RateSchedule, WarmUp
from daskcnn.store import BatchPlan, Dataset, Described, batches

VECTORS = 5
"""Vectors as long as the weights that a replica holds besides its optimizer's: gradients, and what it exchanges."""


def network_of(job: Job, dataset: Described) -> Sequential:
    """Return the job's network for a data set. Raises ValueError where they do not fit, JobError for wrong `freeze`."""
    given = job.model.name, job.model.layers, dataset.shape, len(dataset.classes), job.model.relu
    model = build_model(*given, reconstructs=reconstructs(job))
    try:
        return freeze(model, job.model.freeze or (), dataset.shape)
    except ValueError as error:
        raise JobError([f"model.{error}"]) from error


def reconstructs(job: Job) -> bool:
    """Return True if the network is to answer an image with an image."""
    return job.train.loss is not None and LOSSES[job.train.loss].labels == "image"


def frozen_spans(job: Job, dataset: Described) -> tuple[slice, ...]:
    """Return the places in the flat vector of the layers that are not trained: parameters and state."""
    return layout_of(job, dataset).spans(network_of(job, dataset).frozen) if job.model.freeze else ()


def layout_of(job: Job, images: Described) -> Layout:
    """Return the layout of the job's weights without drawing them. Raises as `initial_weights` does."""
    return vector.layout_of(_checked_network(job, images), images.shape, job.model.dtype)


def initial_weights(job: Job, images: Described) -> tuple[Layout, Array]:
    """Return the layout and the flat host vector (parameters, then state) of a run without trained weights.

    Raises ValueError where the network does not fit the images, JobError where this machine has too little memory.
    """
    network = _checked_network(job, images)
    params, state = init_network(network, job.train.seed, images.shape, job.model.dtype)
    layout = Layout.of(params, state)
    return layout, layout.flatten(params, state)


def _checked_network(job: Job, images: Described) -> Sequential:
    """Return the network. Raise JobError if its weights, or its maps of one image, exceed this machine's memory."""
    network = network_of(job, images)
    memory, itemsize = virtual_memory().total, np.dtype(job.model.dtype).itemsize
    numbers = network.numbers(images.shape)
    problem = None
    if numbers * (8 + 2 * itemsize) > memory:  # they are drawn in float64, rounded, and copied into one vector
        problem = f"{numbers:.4g} weights take {numbers * (8 + 2 * itemsize) / 1e9:,.1f} GB"
    for name, _, shape in walk(network, images.shape):
        if problem is None and (nbytes := prod(shape) * itemsize) > memory:
            problem = f"an image in front of layer {name} takes {nbytes / 1e9:,.1f} GB"
    if problem is not None:
        raise JobError([f"model: {problem}, more than this machine has; choose a smaller network"])
    return network


def convolutions(model: Sequential, in_shape: Sequence[int], N: int, dtype: str) -> list[tuple[str, ConvSpec]]:
    """Return every convolution of a network by path, as the problem that it is for N images (H, W, C)."""
    return [
        (name, layer.spec((*shape[:2], N, shape[2]), layer.kernels, dtype))
        for name, layer, shape in walk(model, tuple(in_shape))
        if isinstance(layer, Conv)
    ]


def optimizer_of(job: Job) -> Optimizer:
    """Return the job's optimizer with its own keys, and what the job puts around it."""
    train, kind = job.train, OPTIMIZERS[job.train.optimizer.name]
    tables = {**dict(train), "nesterov": train.nesterov and train.momentum > 0, **dict(train.optimizer)}
    optimizer = kind(**{field.name: tables[field.name] for field in fields(kind)})  # type: ignore[arg-type] # every optimizer is a dataclass
    if train.lookahead is not None:
        ahead = train.lookahead
        optimizer = Lookahead(optimizer, ahead.steps, ahead.alpha, ahead.last)
    # elsewhere the server averages the center
    return Averaged(optimizer, train.ema) if train.ema is not None and train.strategy == LAYER else optimizer


def descent_of(job: Job, frozen: frozenset[str]) -> Descent:
    """Return the job's optimizer, and how it steps each parameter of the network. frozen: paths of its layers."""
    train = job.train
    return Descent(optimizer_of(job), frozen, tuple((train.rates or {}).items()), train.decay_all, train.clip)


def center_descent_of(job: Job, layout: Layout, frozen: frozenset[str] = frozenset()) -> CenterDescent | None:
    """Return the optimizer's steps on the server; None: replicas make them."""
    merged = job.rule is not None and job.rule.merges_gradients
    return CenterDescent.of(descent_of(job, frozen), layout) if merged else None


def at_rest(job: Job, layout: Layout, weights: Array) -> OptimizerState:
    """Return the state of the job's optimizer before the first step from these host weights (size,)."""
    return optimizer_of(job).init(weights[: layout.parameter_size])


def loss_of(job: Job, images: Described) -> Loss:
    """Return the job's loss, or the usual one for the data set's labels. Raises JobError for one of other labels."""
    kind = images.labels
    name = job.train.loss or USUAL[kind]
    if LOSSES[name].labels not in (kind, "image"):
        has = "has one class a sample" if kind == "classes" else "has several labels a sample"
        fitting = " or ".join(repr(other) for other, loss in LOSSES.items() if loss.labels == kind)
        raise JobError([f"train.loss = {name!r}: the data set {has}; remove it, or use {fitting}"])
    if job.train.label_smoothing and name != "softmax":
        given = f"train.label_smoothing = {job.train.label_smoothing:g}"
        raise JobError([f"{given}: it is for the loss 'softmax', and this one is {name!r}; remove it"])
    return LOSSES[name]


def training_loss_of(job: Job, images: Described) -> Loss:
    """Return the loss that gradients are of: `loss_of`, its labels smoothed where the job asks for that."""
    smoothing = job.train.label_smoothing
    loss = loss_of(job, images)
    return SoftmaxCrossEntropy(smoothing) if smoothing else loss


def rate_of(schedule: Schedule) -> RateSchedule:
    """Return the job's learning-rate schedule with its own keys."""
    kind = SCHEDULES[schedule.name]
    curve = kind(**{field.name: getattr(schedule, field.name) for field in fields(kind)})
    return WarmUp(curve, schedule.warmup) if schedule.warmup else curve


def pace_at(train: Train, rate: RateSchedule, progress: float, scale: float = 1.0) -> StepPace:
    """Return the pace of a step at this part (0…1) of the run. scale: of the learning rate."""
    return StepPace(scale * rate.rate(train.lr, progress, progress * train.epochs), progress)


def training_samples(job: Job, dataset: Dataset) -> int:
    """Return the number of samples that are trained on: those in front of the validation slice."""
    return len(dataset.train) - job.data.validation


def vector_bytes(job: Job, dataset: Described) -> int:
    """Memory that a replica needs for its vectors alone: weights, gradients, the optimizer's, and what it exchanges."""
    vectors = VECTORS + len(optimizer_of(job).vectors)
    return vectors * network_of(job, dataset).numbers(dataset.shape) * np.dtype(job.model.dtype).itemsize


def server_bytes(job: Job, dataset: Described) -> tuple[int, int]:
    """Memory that a parameter server needs: for itself, and for each worker.

    It has the center and the optimizer's vectors twice while it merges, and a push and an answer of each worker.
    """
    vector = network_of(job, dataset).numbers(dataset.shape) * np.dtype(job.model.dtype).itemsize
    return 2 * (1 + len(optimizer_of(job).vectors)) * vector, 2 * vector


def check_vectors(job: Job, dataset: Described, memory: int) -> None:
    """Raise ClusterError where a replica's vectors are more than a worker's memory, in bytes."""
    if (needs := vector_bytes(job, dataset)) > memory:
        reason = (
            f"weights, gradients and optimizer take {needs / 1e9:,.1f} GB, and the worker has {memory / 1e9:,.1f} GB"
        )
        raise ClusterError("model", reason, "choose a smaller network, or give the worker more memory")


def replica_bytes(job: Job, dataset: Dataset) -> int:
    """Memory that a worker needs for one replica: its vectors, samples and a layer's workspace."""
    H, W, C = dataset.shape
    return vector_bytes(job, dataset) + len(dataset.train) * H * W * C + (job.train.workspace_mib << 20)


_PATCH_NUMBERS = 1 << 24
"""Numbers of patches that are held at once."""


def whitened(job: Job, dataset: Dataset, weights: Array | None = None) -> Array | None:
    """Return the initial weights, or these, with a first convolution that whitens; None if the job asks for none.

    Its kernels are made of the first images, normalised and not augmented, that a single replica would be shown: up to
    5000 training samples. They depend on job and data set alone. One process, the driver, makes them for all workers.
    Raises DataError where the images cannot be read.
    """
    found = whitened_layer(network_of(job, dataset))
    if found is None:
        return None
    name, size = found[0], found[1].size
    assert isinstance(size, int), "checked where the network was made"
    layout = layout_of(job, dataset)
    made = initial_weights(job, dataset)[1] if weights is None else weights.copy()
    H, W, C = dataset.shape
    several = max(1, _PATCH_NUMBERS // (H * W * size**2 * C))
    plan = BatchPlan(((0, training_samples(job, dataset)),), several, job.train.seed, limit=SAMPLES)
    total, count = np.zeros((size**2 * C, size**2 * C)), 0
    with batches(dataset, dataset.train, plan, job.model.dtype) as stream:
        for batch in stream:
            moments, patches = patch_moments(batch.x, size)
            total += moments
            count += patches
    layout.views(made)[0][name]["w"][...] = whitening_kernels(total / count, size)
    return made
