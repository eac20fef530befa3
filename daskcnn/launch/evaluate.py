"""How good a trained network is: `daskcnn evaluate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daskcnn.arrays import Device, cpu_count, single_threaded_blas
from daskcnn.errors import DataError
from daskcnn.job.dataset import opened
from daskcnn.launch.trained_run import Which, load_trained
from daskcnn.runs.state import to_state
from daskcnn.store import open_dataset
from daskcnn.store.array_index import INDEX, read_index
from daskcnn.training.replica import Replica
from daskcnn.training.trained_network import to_classifier


def evaluate(run: str, *, which: Which, path: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Accuracy, loss and AUC of a run's network on the test samples of its data set, or of another.

    AUC: of each class against the rest, the mean over the classes; None where there is only one.
    """
    job, checkpoint = load_trained(run, which, say)
    index = read_index(Path(run) / INDEX) if job.data.in_place else None
    dataset = open_dataset(path) if path else opened(job.data, index)
    classifier = to_classifier(checkpoint, job)
    if (dataset.shape, dataset.classes) != (classifier.facts.shape, classifier.classes):
        raise DataError(
            dataset.path, f"other images or classes than {run} was trained on", "give a data set like its own"
        )
    replica = Replica(job, dataset, Device.of("cpu", threads=cpu_count()), clock=time.perf_counter)
    replica.adopt(to_state(checkpoint, job).weights)
    samples = len(dataset.test)
    with single_threaded_blas():
        score = replica.evaluate(dataset.test, 0, samples, whole=samples)
    return {
        "run": run,
        "checkpoint": str(checkpoint.path),
        "data": dataset.path,
        "samples": score.samples,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "auc": score.judged.auc,
    }
