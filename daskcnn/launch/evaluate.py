"""How good a trained network is: `daskcnn evaluate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device, cpu_count, single_threaded_blas
from daskcnn.errors import DataError
from daskcnn.launch.trained_run import Which, load_trained
from daskcnn.nn.auc import area_under_curve
from daskcnn.nn.losses import softmax
from daskcnn.runs.state import to_state
from daskcnn.store import open_dataset
from daskcnn.training.replica import Replica
from daskcnn.training.trained_network import to_classifier


def evaluate(run: str, *, which: Which, path: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Accuracy, loss and AUC of a run's network on the test samples of its data set, or of another.

    AUC: of each class against the rest, the mean over the classes; None where there is only one.
    """
    job, checkpoint = load_trained(run, which, say)
    dataset = open_dataset(path or job.data.path or "", limit=None if path else job.data.limit)
    classifier = to_classifier(checkpoint, job)
    if (dataset.shape, dataset.classes) != (classifier.facts.shape, classifier.classes):
        raise DataError(
            f"{dataset.path}: other images or classes than {run} was trained on; give a data set like its own"
        )
    replica = Replica(job, dataset, Device.of("cpu", threads=cpu_count()), clock=time.perf_counter)
    replica.adopt(to_state(checkpoint, job).weights)
    answers: list[tuple[Array, Array]] = []
    with single_threaded_blas():
        score = replica.evaluate(
            dataset.test, 0, len(dataset.test), seen=lambda scores, labels: answers.append((scores.copy(), labels))
        )
    scores, labels = map(np.concatenate, zip(*answers, strict=True))
    return {
        "run": run,
        "checkpoint": str(checkpoint.path),
        "data": dataset.path,
        "samples": score.samples,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "auc": area_under_curve(softmax(scores), labels),
    }
