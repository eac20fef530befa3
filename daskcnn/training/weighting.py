"""Weights of training samples in the loss: a sample's own weight times that of its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array
from daskcnn.errors import DataError, JobError, nearest
from daskcnn.job.network import training_samples
from daskcnn.job.tables import Job
from daskcnn.store import Batch, Dataset

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Weighting:
    """Weights of the samples of a batch.

    factors: of a sample's own weight, (classes,), by the label, or () for all samples alike. They make the mean weight
    of the training samples 1.
    """

    factors: Numbers

    def of(self, batch: Batch, dtype: npt.DTypeLike) -> Array:
        """Return the weights (N,) of a batch."""
        factors = self.factors[batch.labels] if self.factors.ndim else np.broadcast_to(self.factors, len(batch.labels))
        return (factors if batch.weights is None else factors * batch.weights).astype(dtype)


def weights_of(weighting: Weighting | None, batch: Batch, shares: Numbers | None, dtype: npt.DTypeLike) -> Array | None:
    """Return the weights (N,) of a batch, each times the share that its label has of the sample; None: all are 1."""
    if shares is None:
        return None if weighting is None else weighting.of(batch, dtype)
    return (shares if weighting is None else shares * weighting.of(batch, shares.dtype)).astype(dtype)


def weighting_of(job: Job, dataset: Dataset) -> Weighting | None:
    """Return the job's weighting of the data set's training samples; None: all count alike.

    It depends on job and data set alone, so every worker finds the same. Raises JobError for class weights that do not
    fit the data set, DataError for weights of which none is above 0.
    """
    samples, given = training_samples(job, dataset), job.train.class_weights
    own = dataset.train.weights(np.arange(samples))
    if own is None and given is None:
        return None
    weights = np.ones(samples) if own is None else own.astype(np.float64)
    if not (np.isfinite(weights).all() and weights.min(initial=0) >= 0 and weights.sum() > 0):
        reason = "its sample weights are not numbers of 0 or more, one at least above 0"
        raise DataError(dataset.path, reason, "prepare the data set again with other weights")
    if given is None:
        return Weighting(np.asarray(samples / weights.sum()))
    if dataset.labels == "several":
        raise JobError([f"train.class_weights = {given!r:.60}: {_SEVERAL}"])
    labels = dataset.train.labels()[:samples]
    sums = np.bincount(labels, weights, minlength=len(dataset.classes)).astype(np.float64)
    if given == "balanced":  # N / (classes · N of the class), with samples counted by their weights
        mean = sums.sum() / max(1, np.count_nonzero(sums))
        factors = np.divide(mean, sums, out=np.zeros_like(sums), where=sums > 0)
    else:
        factors = _given(given, dataset.classes)
    if not (total := (factors * sums).sum()) > 0:
        raise JobError(["train.class_weights: no training sample has a weight above 0; raise some"])
    return Weighting(factors * (samples / total))


_SEVERAL = (
    "a sample has several labels, so it belongs to no one class whose weight is its own; remove it, and give weights, "
    "one a sample, where the data set is prepared"
)


def _given(given: Sequence[float] | Mapping[str, float] | Any, classes: Sequence[str]) -> Numbers:
    """Return the job's numbers in the order of the classes. Raises JobError if they are for others."""
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in classes]:
            raise JobError([f"train.class_weights.{name}: no such class{nearest(name, classes)}" for name in unknown])
        return np.array([given.get(name, 1.0) for name in classes])
    if len(given) != len(classes):
        reason = f"{len(given)} numbers for {len(classes)} classes"
        remedy = "give one for each, in the order of the data set's classes, or a table by name"
        raise JobError([f"train.class_weights: {reason}; {remedy}"])
    return np.array(given, np.float64)
