"""What a worker does with a part: read the samples, and let the network look at them."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize

import numpy as np

from daskcnn.arrays import Device, DeviceKind, keep_freed_memory, release_freed_memory
from daskcnn.trained.predictions.rows import Predicted
from daskcnn.trained.predictions.sources import Part, PredictedSource
from daskcnn.training.trained_network import Classifier, Predictor


@dataclass(frozen=True, eq=False)
class PredictionTask:
    """What every part's task needs; a worker gets it once."""

    classifier: Classifier
    source: PredictedSource


_UNKNOWN = "has NaN or infinities, which a network trained without data.nodata does not take"
_PREDICTORS: WeakKeyDictionary[PredictionTask, Predictor] = WeakKeyDictionary()
"""The predictors of this process: what depends on the weights alone is made once, not for every part."""


def predict_part(task: PredictionTask, part: Part, kind: DeviceKind, threads: int) -> Predicted:
    """Predict a part on this process's device. Raises DataError where its samples cannot be read."""
    samples = task.source.read(part)
    if (predictor := _PREDICTORS.get(task)) is None:
        # Dask's workers return freed memory at once: every part would take fresh pages, for a quarter of its time
        keep_freed_memory()
        finalize(task, release_freed_memory)
        train = task.classifier.job.train
        limit = train.workspace_mib << 20
        device = Device.of(kind, threads=threads, workspace_limit=limit, exact=train.exact)
        predictor = _PREDICTORS[task] = task.classifier.on(device)
    probabilities = predictor.probabilities(samples.images).astype(np.float32)
    probabilities[[place for place, _ in samples.bad]] = np.nan
    bad = dict(samples.bad)
    unknown = np.flatnonzero(np.isnan(probabilities).any(axis=1)).tolist()
    problems = tuple(bad.get(place) or f"{part.sample(place)}: {_UNKNOWN}" for place in unknown)
    return Predicted(probabilities, samples.labels, problems)
