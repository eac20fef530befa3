"""A store that is sorted by label trains as well as a shuffled copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.datasets.job_dataset import find_dataset
from daskcnn.job.resolve import resolve
from daskcnn.sim.learners import LAYERS, clusters_of_points
from daskcnn.store import loader
from daskcnn.store.chunk_source import CACHE
from daskcnn.training.replica import Replica
from tests.store.arrays_in_place import write_array

SAMPLES, TEST, CHUNK, EPOCHS = 6000, 4000, 50, 6
WINDOW = 12 * CHUNK * 16
"""Bytes of 12 of the 120 chunks: at rest each of them has one class, so that a window lacks some."""


def accuracy(folder: Path, order: Any, seed: int) -> float:
    """Right answers after a few epochs on the samples in this order."""
    points: Any = clusters_of_points(SAMPLES, TEST)
    folder.mkdir()
    paths = {
        "images": write_array(folder / "x", points.train.images[order], CHUNK),
        "labels": write_array(folder / "y", points.train.labels[order], CHUNK),
        "test_images": write_array(folder / "u", points.test.images, CHUNK),
        "test_labels": write_array(folder / "v", points.test.labels, CHUNK),
    }
    train = {"batch_size": 50, "lr": 0.02, "epochs": EPOCHS, "seed": seed}
    job = resolve({"data": paths | {"validation": 100, "seed": seed}, "model": {"layers": LAYERS}, "train": train})
    data = find_dataset(job, progress=lambda *_: None)
    CACHE.clear()
    replica = Replica(job, data, Device(), clock=lambda: 0.0)
    samples = len(data.train) - 100
    with single_threaded_blas():
        for epoch in range(EPOCHS):
            progress = epoch / EPOCHS, (epoch + 1) / EPOCHS
            replica.train(((0, samples),), samples, presentation=epoch, progress=progress)
        return replica.evaluate(data.test, 0, TEST, whole=TEST).quality


@pytest.mark.slow
def test_a_sorted_store_trains_within_two_points_of_a_shuffled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "IN_PLACE_WINDOW_BYTES", WINDOW)
    labels = np.arange(SAMPLES) % 10
    in_order, shuffled = np.argsort(labels, kind="stable"), np.random.default_rng(0).permutation(SAMPLES)
    found = [
        (accuracy(tmp_path / f"sorted-{seed}", in_order, seed), accuracy(tmp_path / f"mixed-{seed}", shuffled, seed))
        for seed in range(2)
    ]
    ours, theirs = np.mean(found, axis=0)
    assert theirs > 0.8, found
    assert ours > theirs - 0.02, found
