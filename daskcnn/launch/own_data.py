"""A user's own images and labels as a data set for one run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client

from daskcnn.store.manifest import Source, describe
from daskcnn.store.split import shuffled_order, stratified
from daskcnn.store.writer import write

_CHUNK = 1000


@dataclass(frozen=True)
class OwnData:
    """Images and labels.

    Attributes
    ----------
    images : (N, H, W, C), NumPy or Dask.
    labels : (N,) places among the classes.
    classes : names of the classes.
    weights : (N,), or None.
    validation : samples that are not trained on.
    """

    images: Any
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    weights: npt.NDArray[np.float32] | None
    validation: int
    name: str = "synthetic"


@contextmanager
def stored(data: OwnData, folder: str, *, seed: int, client: Client | None) -> Iterator[str]:
    """The path of a data set of these samples, in this folder, as long as the context lasts."""
    path = str(Path(folder) / f"{uuid.uuid4().hex}.zarr")
    last = stratified(data.labels, data.validation, seed)
    order = shuffled_order(len(data.labels), seed, 0)
    order = np.concatenate([order[~last[order]], order[last[order]]])
    images, labels = np.asarray(data.images)[order], data.labels[order]
    weights = None if data.weights is None else data.weights[order]
    held = slice(len(order) - data.validation, None)
    source = Source(data.name, data.classes, (images, labels), (images[held], labels[held]), {}, weights)
    write(source, describe(source, chunk=min(_CHUNK, len(order)), order="shuffled", seed=seed), path, lambda _: None)
    yield path
