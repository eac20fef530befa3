"""A trained network: what a run leaves behind, to look at images with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.job.network import initial_weights, loss_of, network_of
from daskcnn.job.tables import Job
from daskcnn.nn import Context, Params, State, predict
from daskcnn.runs.checkpoint import Checkpoint
from daskcnn.runs.state import facts_of, weights_of
from daskcnn.store import normalise
from daskcnn.store.facts import Facts
from daskcnn.training.replica import evaluation_batch

BATCH = 500


class Classifier:
    """A network with its weights (flat, host). Images are uint8 (N, H, W, C), as the data set has them."""

    def __init__(self, job: Job, facts: Facts, weights: Array) -> None:
        self.job, self.facts, self.weights = job, facts, weights
        self.model, self.loss = network_of(job, facts), loss_of(job, facts)
        self.layout, _ = initial_weights(job, facts)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.facts.classes

    def predict(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Probability of each class, (N, classes); where a sample has several labels, of each label by itself.

        Raises ValueError for images of another shape or type.
        """
        if images.ndim != 4 or images.shape[1:] != self.facts.shape or images.dtype != np.uint8:
            wanted = ", ".join(map(str, self.facts.shape))
            raise ValueError(f"images {images.dtype}{images.shape}: the network wants uint8 (N, {wanted})")
        device = Device(workspace_limit=self.job.train.workspace_mib << 20)
        size = evaluation_batch(self.model, self.facts.shape, self.job.model.dtype, device, BATCH)
        cuts = range(0, len(images), size)
        none = np.zeros((0, len(self.classes)), self.job.model.dtype)
        weights, ctx = self.layout.views(self.weights), Context(device, kept={})
        with single_threaded_blas():
            return np.concatenate([none, *(self._probabilities(images[i : i + size], *weights, ctx) for i in cuts)])

    def _probabilities(self, images: npt.NDArray[np.uint8], params: Params, state: State, ctx: Context) -> Array:
        x = normalise(self.facts, images, self.job.model.dtype)
        return self.loss.probabilities(predict(self.model, params, state, x, ctx))


def to_classifier(checkpoint: Checkpoint, job: Job) -> Classifier:
    """The checkpoint's network. Raises DataError where the weights are not those of the job's network."""
    facts = facts_of(checkpoint)
    return Classifier(job, facts, weights_of(checkpoint, job, facts))
