"""Initial weights that depend on the training images: those of a first convolution that whitens."""

from __future__ import annotations

import numpy as np

from daskcnn.arrays import Array
from daskcnn.job.network import initial_weights, network_of, training_samples
from daskcnn.job.tables import Job
from daskcnn.nn.whitening import SAMPLES, patch_moments, whitened_layer, whitening_kernels
from daskcnn.store import BatchPlan, Dataset, batches

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
    layout, initial = initial_weights(job, dataset)
    vector = initial if weights is None else weights.copy()
    H, W, C = dataset.shape
    several = max(1, _PATCH_NUMBERS // (H * W * size**2 * C))
    plan = BatchPlan(((0, training_samples(job, dataset)),), several, job.train.seed, limit=SAMPLES)
    total, count = np.zeros((size**2 * C, size**2 * C)), 0
    with batches(dataset, dataset.train, plan, job.model.dtype) as stream:
        for batch in stream:
            moments, patches = patch_moments(batch.x, size)
            total += moments
            count += patches
    layout.views(vector)[0][name]["w"][...] = whitening_kernels(total / count, size)
    return vector
