"""A trained network that classifies or reconstructs images."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.errors import DataError
from daskcnn.job.network import layout_of, loss_of, network_of
from daskcnn.job.tables import Job
from daskcnn.nn import Context
from daskcnn.nn.network import Views, predict_views
from daskcnn.runs.checkpoint import Checkpoint
from daskcnn.runs.state import facts_of, weights_of
from daskcnn.store import normalise
from daskcnn.store.chunk_facts import mark_of
from daskcnn.store.image_facts import Facts
from daskcnn.store.manifest import is_like
from daskcnn.training.replica import evaluation_batch

BATCH = 500


class Classifier:
    """A network with its weights (flat, host). Images are (N, H, W, C), as the data set has them.

    views: of each image, whose scores are averaged; at first those of the job.
    """

    def __init__(self, job: Job, facts: Facts, weights: Array) -> None:
        self.job, self.facts, self.weights = job, facts, weights
        self.model, self.loss = network_of(job, facts), loss_of(job, facts)
        self.layout = layout_of(job, facts)
        self.views: Views = job.data.views

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.facts.classes

    @property
    def reconstructs(self) -> bool:
        """True if it reconstructs images; else it classifies them."""
        return self.loss.labels == "image"

    @property
    def predicted_dtype(self) -> np.dtype[Any]:
        """Number type of the predictions: the network's, and float64 for images that are made in that type."""
        wide = self.reconstructs and self.facts.dtype == np.float64
        return np.dtype(np.float64 if wide else self.job.model.dtype)

    def predict(self, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the probability of each class, (N, classes). Raises DataError for images that `taken` refuses.

        A network that reconstructs images gives images (N, H, W, C), in the scale of those that it is given.
        An image with NaN gives NaN, unless the network was trained with a value that stands for no data.
        """
        images, train = self.taken(images), self.job.train
        return self.on(Device(workspace_limit=train.workspace_mib << 20, exact=train.exact)).probabilities(images)

    def losses(self, images: npt.NDArray[Any]) -> list[float]:
        """Return the loss of each image (N, H, W, C), of a network that reconstructs images."""
        return self.on(Device(exact=self.job.train.exact)).losses(self.taken(images))

    def check_images(self, images: Any) -> None:
        """Raise DataError if an array of any kind does not hold images that the network takes."""
        shape, dtype = self.facts.shape, self.facts.dtype
        given = (*images.shape[1:], 1) if images.ndim == 3 else images.shape[1:]
        if images.ndim in (3, 4) and given == shape and is_like(images.dtype, dtype):
            return
        wanted = f"the network wants {dtype} (N, {', '.join(map(str, shape))})"
        raise DataError(f"images {images.dtype} {images.shape}", wanted, _remedy(images.shape, shape))

    def taken(self, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return images as the network knows them: (N, H, W, C) in its number type. Raises DataError for others.

        Those of one channel may lack its axis. Booleans and int8 are widened, as in a data set, and float32 and float64
        become each other.
        """
        self.check_images(images)
        images = images[..., None] if images.ndim == 3 else images
        dtype, nodata = self.facts.dtype, self.facts.nodata
        if images.dtype == dtype:
            return images
        with np.errstate(over="ignore"):
            found: npt.NDArray[Any] = images.astype(dtype)
        if nodata is not None and dtype.kind == "f":  # the other type has rounded it in its own way
            found[(np.ma.getdata(images) == mark_of(nodata, images.dtype)) & ~np.ma.getmaskarray(images)] = nodata
        return found

    def on(self, device: Device) -> Predictor:
        """Return the network on a device, for many calls."""
        return Predictor(self, device)


class Predictor:
    """A network with its weights on a device. What depends on the weights alone is kept from call to call."""

    def __init__(self, classifier: Classifier, device: Device) -> None:
        device.warm(classifier.job.model.dtype)
        self._classifier, self._ctx = classifier, Context(device, kept={})
        self._params, self._state = classifier.layout.views(device.backend.from_host(classifier.weights))

    def probabilities(self, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the probability of each class, (N, classes), for images that the network takes.

        Where a sample may have several labels, it is the probability of each label by itself. A network that
        reconstructs images gives images (N, H, W, C), in the scale of those that it takes.
        """
        job, facts = self._classifier.job, self._classifier.facts
        size = evaluation_batch(self._classifier.model, facts.shape, job.model.dtype, self._ctx.device, BATCH)
        cuts = range(0, len(images), size)
        of_one = facts.shape if self._classifier.reconstructs else (len(facts.classes),)
        none = np.zeros((0, *of_one), self._classifier.predicted_dtype)
        with single_threaded_blas():
            return np.concatenate([none, *(self._probabilities(images[i : i + size]) for i in cuts)])

    def _probabilities(self, images: npt.NDArray[Any]) -> Array:
        classifier, facts = self._classifier, self._classifier.facts
        found = classifier.loss.probabilities(self._scores(normalise(facts, images, classifier.job.model.dtype)))
        if not classifier.reconstructs:
            return found
        # maps (H, W, N, C) or vectors (N, H·W·C), to the scale of images at rest
        made = found.transpose(2, 0, 1, 3) if found.ndim == 4 else found.reshape(-1, *facts.shape)
        wide = classifier.predicted_dtype
        scaled: Array = made * facts.deviation.astype(wide) + facts.mean.astype(wide)
        return scaled

    def _scores(self, x: Array) -> Array:
        """Return the scores of a batch x (H, W, N, C) on the host."""
        network = self._classifier.model, self._params, self._state
        return self._ctx.device.backend.to_host(predict_views(*network, x, self._ctx, self._classifier.views))

    def losses(self, images: npt.NDArray[Any]) -> list[float]:
        """Return the loss of each image, where the network reconstructs images."""
        classifier, found = self._classifier, list[float]()
        with single_threaded_blas():
            for i in range(len(images)):
                x = normalise(classifier.facts, images[i : i + 1], classifier.job.model.dtype)
                found.append(float(classifier.loss(self._scores(x), x)[0]))
        return found


def _remedy(given: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return the remedy for images of another shape or, where these are alike, type."""
    H, W, C = wanted
    if given == wanted:
        return "give several, images[None]"
    if given[1:] == (C, H, W) and given[1:] != wanted:
        return "put the channels last, numpy.moveaxis(images, 1, -1)"
    if len(given) == 4 and given[3] != C:
        return f"give the {C} channels that it was trained on, in their order"
    if given[1:] != wanted:
        return "give images of the size that it was trained on"
    return "give the numbers that it was trained on, in the same type and scale"


def to_classifier(checkpoint: Checkpoint, job: Job) -> Classifier:
    """Return the checkpoint's network. Raises DataError if the weights are not those of the job's network."""
    facts = facts_of(checkpoint)
    return Classifier(job, facts, weights_of(checkpoint, job, facts))
