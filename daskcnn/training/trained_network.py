"""A trained network: what a run leaves behind, to look at images with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.errors import DataError
from daskcnn.job.tables import Job
from daskcnn.nn import Context, Params, State, predict
from daskcnn.nn.losses import softmax
from daskcnn.store import Described, normalise
from daskcnn.training.replica import evaluation_batch, initial_weights, network_of

BATCH = 500


@dataclass(frozen=True)
class Facts:
    """What the network must know of the images: as a `store.Described`, kept in the checkpoint."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: npt.NDArray[np.float64]
    deviation: float

    @classmethod
    def of(cls, images: Described) -> Facts:
        """The facts of a data set."""
        return cls(images.classes, images.shape, images.mean, images.deviation)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can keep it."""
        shape, mean = list(self.shape), [float(m) for m in self.mean]
        return {"classes": list(self.classes), "shape": shape, "mean": mean, "deviation": self.deviation}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Facts:
        """The inverse of `to_dict`. Raises DataError where the record is none."""
        try:
            H, W, C = map(int, record["shape"])
            mean, deviation = np.array([float(m) for m in record["mean"]]), float(record["deviation"])
            return cls(tuple(map(str, record["classes"])), (H, W, C), mean, deviation)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"checkpoint: its description of the images is damaged ({error})") from error


class Classifier:
    """A network with its weights (flat, host). Images are uint8 (N, H, W, C), as the data set has them."""

    def __init__(self, job: Job, facts: Facts, weights: Array) -> None:
        self.job, self.facts, self.weights = job, facts, weights
        self.model = network_of(job, facts)
        self.layout, _ = initial_weights(job, facts)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.facts.classes

    def predict(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Probability of each class, (N, classes). Raises ValueError for images of another shape or type."""
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
        return softmax(predict(self.model, params, state, x, ctx))
