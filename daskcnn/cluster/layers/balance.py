"""The measurements that a layer-sharded run's shares go by: calibration and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from daskcnn.cluster.run.context import RunContext
from daskcnn.job.network import network_of, training_samples
from daskcnn.job.tables import Job
from daskcnn.nn.layer import Shape
from daskcnn.sharded import ShareSearch, Stage, WorkerLinks, eq2_elements, stage_shapes, stages_of
from daskcnn.store import Dataset
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import LayerSettings
from daskcnn.training.guessing import guessing_on


class Timed(Protocol):
    """The measurements of a worker that its share depends on, in seconds a sample."""

    @property
    def conv_seconds(self) -> Mapping[str, float]:
        """Seconds of each convolution with all of its kernels, by name."""
        ...

    @property
    def conv_fixed(self) -> Mapping[str, float]:
        """Seconds of each convolution that do not depend on the number of kernels, by name."""
        ...

    @property
    def rest_seconds(self) -> float | None:
        """Seconds of the layers that are not sharded and of the loss; None where they were not measured."""
        ...


def settings_of(job: Job, dataset: Dataset) -> LayerSettings:
    """The settings of a layer-sharded run's coordinator. They follow from job and data alone."""
    stages, samples = stages_of(network_of(job, dataset)), training_samples(job, dataset)

    def balancing(home: str, workers: Mapping[str, Measured], links: WorkerLinks) -> ShareSearch:
        rows = {name: own.row for name, own in workers.items()}
        return share_search(job, dataset.shape, samples, stages, home, rows, links)

    eq2 = _numbers_by_eq2(stages, dataset.shape, job.train.batch_size)
    return LayerSettings.of(job, samples, balancing, eq2, guessing_on(job, dataset))


def _numbers_by_eq2(stages: Sequence[Stage], shape: Shape, batch: int) -> int:
    """Numbers that the papers' scheme would exchange in a step."""
    shaped = zip(stages, stage_shapes(stages, shape), strict=True)
    convs = [(stage.conv, H, W, C) for stage, (H, W, C) in shaped if stage.conv]
    return eq2_elements([conv.spec((H, W, batch, C), conv.kernels) for conv, H, W, C in convs])


def fastest(context: RunContext) -> str:
    """The worker that is home to what is not sharded."""
    return min(context.workers.alive, key=lambda name: context.calibrations[name].seconds_per_sample)


def balance_of(context: RunContext, stages: Sequence[Stage], home: str) -> ShareSearch:
    """The search for the best shares of the workers that are alive, by their latest measurements."""
    measured = {name: context.calibrations[name] for name in context.workers.alive}
    data = context.dataset.shape, context.samples
    return share_search(context.job, *data, stages, home, measured, context.links or WorkerLinks())


def share_search(
    job: Job,
    in_shape: Shape,
    samples: int,
    stages: Sequence[Stage],
    home: str,
    measured: Mapping[str, Timed],
    links: WorkerLinks,
) -> ShareSearch:
    """The search for the best shares of these workers.

    Parameters
    ----------
    in_shape : (H, W, C) of an image.
    samples : number of samples that are trained on.
    home : the worker that computes what is not sharded.
    """
    whole = np.dtype(job.model.dtype).itemsize
    search = ShareSearch(
        stages,
        in_shape,
        home,
        {name: own.conv_seconds for name, own in measured.items()},
        links.by_worker,
        samples=min(job.train.batch_size, samples),
        itemsize=whole if job.cluster.wire == "float32" else np.dtype(job.cluster.wire).itemsize,
        rest=measured[home].rest_seconds or 0.0,
        fixed={name: own.conv_fixed for name, own in measured.items()},
        task=links.task,
        parts=min(job.train.sub_batches, job.train.batch_size),
        weight_itemsize=whole,
    )
    return search.asked_for(job.train.kernel_shares, job.train.first_conv)
