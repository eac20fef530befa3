"""What a layer-sharded run's shares go by: calibration and links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daskcnn.cluster.run_context import RunContext
from daskcnn.sharded import ShareSearch, Stage, WorkerLinks


def fastest(context: RunContext) -> str:
    """The worker that is home to what is not sharded."""
    return min(context.alive, key=lambda name: context.calibrations[name].seconds_per_sample)


def balance_of(context: RunContext, stages: Sequence[Stage], home: str) -> ShareSearch:
    """For the workers that are alive, by what is known of them now."""
    job, measured = context.job, {name: context.calibrations[name] for name in context.alive}
    whole = np.dtype(job.model.dtype).itemsize
    links = context.links or WorkerLinks()
    balance = ShareSearch(
        stages,
        context.dataset.shape,
        home,
        {name: own.conv_seconds for name, own in measured.items()},
        links.by_worker,
        samples=min(job.train.batch_size, context.samples),
        itemsize=whole if job.cluster.wire == "float32" else np.dtype(job.cluster.wire).itemsize,
        rest=measured[home].rest_seconds or 0.0,
        fixed={name: own.conv_fixed for name, own in measured.items()},
        task=links.task,
        parts=min(job.train.sub_batches, job.train.batch_size),
        weight_itemsize=whole,
    )
    if job.train.kernel_shares == "speeds":
        balance = balance.by_speeds_alone()
    return balance.divided_by(job.train.first_conv)
