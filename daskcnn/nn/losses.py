"""Losses of a batch, with their gradients; and what a network's scores say.

A data set has one label a sample (`labels` is "classes"), or several: a row of 0 and 1, one for each class. The losses
say which of the two they are for. Networks with several labels a sample answer each by itself: a score above 0 is yes.
A network whose loss compares its output with the image that it was given has no accuracy: no answer is right or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import NUMPY, Array

LabelKind = Literal["classes", "several"]
Target = Literal["classes", "several", "image"]


class Loss(Protocol):
    """Scores (N, classes) and labels of one backend `xp` -> (mean loss, 0-d; dscores (N, classes)).

    weights (N,): the loss is the mean over N of weight times the sample's loss. None: every weight is 1.

    labels: "classes" (N,), "several" (N, classes) of 0 and 1, or "image": the images (H, W, N, C) as the network was
    given them. The scores are then (N, H·W·C) or a map (H, W, N, C).
    """

    labels: ClassVar[Target]

    def __call__(
        self, scores: Array, labels: Array, xp: Any = np, weights: Array | None = None
    ) -> tuple[Any, Array]: ...

    def probabilities(self, scores: Array) -> Array:
        """Return the probabilities that scores (N, classes) on the host mean; pixels where the labels are images."""


def softmax(scores: Array) -> Array:
    """Return the probability of each class, (N, classes), from scores (N, classes) on the host."""
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def sigmoid(scores: Array) -> Array:
    """Return 1 / (1 + exp(-score)) of each score on the host, without overflow."""
    small = np.exp(-np.abs(scores))
    return np.asarray(np.where(scores >= 0, 1, small) / (1 + small), scores.dtype)


@dataclass(frozen=True)
class SoftmaxCrossEntropy:
    """-log of the softmax of the right class's score, averaged over the batch, in nats.

    With `smoothing` that part of a sample's label is shared by all classes (Szegedy et al. 2016, section 7).
    """

    smoothing: float = 0.0
    labels: ClassVar[Target] = "classes"
    probabilities = staticmethod(softmax)

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing={self.smoothing}: the loss needs 0 <= smoothing <= 1")

    def __call__(self, scores: Array, labels: Array, xp: Any = np, weights: Array | None = None) -> tuple[Any, Array]:
        if xp is np:
            return _softmax_cross_entropy(scores, labels, weights, self.smoothing)
        rows, own, shared = xp.arange(len(scores)), 1 - self.smoothing, self.smoothing / scores.shape[1]
        shifted = scores - scores.max(axis=1, keepdims=True)
        dscores = xp.exp(shifted)
        total = dscores.sum(axis=1, keepdims=True)
        each = xp.log(total[:, 0]) - own * shifted[rows, labels] - shared * shifted.sum(axis=1)
        dscores /= total
        dscores -= shared
        dscores[rows, labels] -= own
        return _mean(each, dscores, weights)


@dataclass(frozen=True)
class SquaredError:
    """Half the squared distance of the scores from the right class's unit vector, averaged over the batch."""

    labels: ClassVar[Target] = "classes"
    probabilities = staticmethod(softmax)

    def __call__(self, scores: Array, labels: Array, xp: Any = np, weights: Array | None = None) -> tuple[Any, Array]:
        dscores = scores.copy()
        dscores[xp.arange(len(scores)), labels] -= 1
        return _mean((dscores * dscores).sum(axis=1) * 0.5, dscores, weights)


@dataclass(frozen=True)
class SigmoidCrossEntropy:
    """-log of the sigmoid's probability of the right answers, summed over the labels, averaged over the batch, in nats.

    The sum makes a score's gradient p - y, as with softmax, so the same learning rates suit any number of labels.
    """

    labels: ClassVar[Target] = "several"
    probabilities = staticmethod(sigmoid)

    def __call__(self, scores: Array, labels: Array, xp: Any = np, weights: Array | None = None) -> tuple[Any, Array]:
        yes = labels > 0
        margin = xp.where(yes, scores, -scores)
        small = xp.exp(-xp.abs(margin))  # never overflows, and keeps its digits where the answer is all but sure
        each = xp.log1p(small) + xp.maximum(-margin, 0)
        wrong = xp.where(margin >= 0, small, xp.ones_like(small)) / (1 + small)  # probability of the wrong answer
        return _mean(each.sum(axis=1), xp.where(yes, -wrong, wrong), weights)


@dataclass(frozen=True)
class Reconstruction:
    """Squared difference of output and image, averaged over pixels, channels and batch: PyTorch's MSELoss, times 1."""

    labels: ClassVar[Target] = "image"

    def __call__(self, scores: Array, labels: Array, xp: Any = np, weights: Array | None = None) -> tuple[Any, Array]:
        dscores = scores - _like(labels, scores)
        each = _mean_of_sample(dscores * dscores)
        dscores *= 2 * len(each) / dscores.size
        return _mean(each, dscores, weights)

    def probabilities(self, scores: Array) -> Array:
        """Return the scores: they are pixels."""
        return scores


@dataclass(frozen=True)
class SigmoidReconstruction:
    """Cross-entropy of the sigmoid of the output and an image of pixels in [0, 1], averaged like `Reconstruction`.

    It is PyTorch's BCEWithLogitsLoss, in nats. The sigmoid belongs to the loss: the network ends in scores.
    """

    labels: ClassVar[Target] = "image"
    probabilities = staticmethod(sigmoid)

    def __call__(self, scores: Array, labels: Array, xp: Any = np, weights: Array | None = None) -> tuple[Any, Array]:
        pixels = _like(labels, scores)
        small = xp.exp(-xp.abs(scores))  # as in `SigmoidCrossEntropy`
        each = _mean_of_sample(xp.log1p(small) + xp.maximum(scores, 0) - scores * pixels)
        dscores = xp.where(scores >= 0, xp.ones_like(small), small) / (1 + small) - pixels
        dscores *= len(each) / dscores.size
        return _mean(each, dscores, weights)


LOSSES: dict[str, Loss] = {
    "softmax": SoftmaxCrossEntropy(),
    "squared": SquaredError(),
    "sigmoid": SigmoidCrossEntropy(),
    "reconstruction": Reconstruction(),
    "sigmoid-reconstruction": SigmoidReconstruction(),
}

USUAL: dict[LabelKind, str] = {"classes": "softmax", "several": "sigmoid"}
"""The loss for such labels where a job names none."""


Targets: TypeAlias = tuple[Array, Array | None]
"""Labels, and weights (N,) of the samples."""


def mixed_loss(loss: Loss, scores: Array, targets: Targets, partners: Targets | None, xp: Any) -> tuple[Any, Array]:
    """Return loss and gradient of scores whose samples have two labels each, both weighted; or the own ones alone.

    A sample's loss is the sum of both labels' (Zhang et al. 2018). With softmax and sigmoid this is the loss of the
    mixed label. With the squared error it differs from that by a number that has no gradient.
    """
    value, dscores = loss(scores, targets[0], xp, targets[1])
    if partners is None:
        return value, dscores
    more, dmore = loss(scores, partners[0], xp, partners[1])
    dscores += dmore
    return value + more, dscores


def _mean(each: Array, dscores: Array, weights: Array | None) -> tuple[Any, Array]:
    """Return the mean of each sample's loss (N,) times its weight, and its gradient, made of each sample's in place."""
    if weights is not None:
        weights = weights.astype(each.dtype, copy=False)
        each = each * weights
        dscores *= weights[:, None]
    dscores *= 1 / len(each)
    return each.mean(), dscores


def _like(images: Array, scores: Array) -> Array:
    """Return images (H, W, N, C) in the scores' dtype and shape: a map, or vectors in the order of `Flatten`."""
    images = images.astype(scores.dtype, copy=False)
    return images if scores.ndim == 4 else images.transpose(2, 0, 1, 3).reshape(images.shape[2], -1)


def _mean_of_sample(values: Array) -> Array:
    """Return the mean of each sample's values, (N,), of vectors (N, F) or of a map (H, W, N, C)."""
    return values.mean(axis=1 if values.ndim == 2 else (0, 1, 3))


def _softmax_cross_entropy(scores: Array, labels: Array, weights: Array | None, smoothing: float) -> tuple[Any, Array]:
    """Return the mean loss and its gradient from the compiled loop."""
    dscores = np.empty_like(scores)
    own = np.empty(0, scores.dtype) if weights is None else weights.astype(scores.dtype, copy=False)
    given, classes, own = (NUMPY.contiguous(a) for a in (scores, labels.astype(np.int64, copy=False), own))
    return scores.dtype.type(compiled.activations.cross_entropy(given, classes, own, smoothing, dscores)), dscores


def labels_for(loss: Loss, x: Array, labels: Array) -> Array:
    """Return what the loss takes for labels of a batch: its images x (H, W, N, C), or its labels."""
    return x if loss.labels == "image" else labels


def correct(scores: Array, labels: Array, xp: Any = np) -> Any | None:
    """Return the number of right answers: 0-d. None where the labels are images (H, W, N, C): there are no answers.

    An answer is a sample's highest score, which is to be at its label, or each score of several labels (N, L), which is
    to be above 0 where the label is 1. It is wrong where its probability is not a number.
    """
    if labels.ndim == 4:
        return None
    if labels.ndim == 2:
        return (((scores > 0) == (labels > 0)) & ~xp.isnan(scores)).sum()
    own = scores[xp.arange(len(labels)), labels]
    # argmax takes the first NaN for the highest score
    return ((scores.argmax(axis=1) == labels) & xp.isfinite(own)).sum()
