"""A user's own images and labels as the data set of a run."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client

from daskcnn.datasets.job_dataset import is_missing, is_vacant
from daskcnn.datasets.prepare_arrays import prepare
from daskcnn.errors import ClusterError, DataError, DataUnseen, JobError
from daskcnn.job.data_table import Data
from daskcnn.job.tables import Job
from daskcnn.store import DATASETS
from daskcnn.store.making.writer import remove
from daskcnn.store.manifest import silent
from daskcnn.temporary import PREFIX, OwnFolder, inherit

NAME = "arrays"
"""Name of a data set that is made of arrays."""
_STORE = "arrays.zarr"
_SMALL = 1 << 20
"""Bytes of images that are one chunk: of a small data set most time would go into files."""
_READING = ("layout", "nodata", "labelling", "test")
"""Keys of a job's `data` that are options of `prepare`, and of arrays in place; `data.given` keeps them."""


@dataclass(frozen=True)
class OwnData:
    """Images (N, H, W, C), NumPy or Dask, of an estimator's fit, and labels (N,), places among the classes.

    `validation` is the number of samples that are not trained on, `nodata` the value that stands for no data.
    """

    images: Any
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    weights: npt.NDArray[np.float32] | None
    validation: int
    nodata: float | None = None


def check_kept(data: Data, run: str | Path) -> None:
    """Raise DataError if the run was given arrays, which were kept only as long as it went on.

    A folder that a killed run has left is there as long as this process goes on, or the next run removes it.
    """
    inherit(Path(data.path or "").parent)
    if _is_temporary(data) and is_missing(data):
        images = "data=(images, labels) again, the path of a data set of the same images"
        reason = "it was trained on arrays that were kept only while it went on"
        raise DataError(run, reason, f"give {images}, or data.path at the start")


def _is_temporary(data: Data) -> bool:
    """Return True if the data set is kept only while its run goes on."""
    place = Path(data.path or "")
    return place.name == _STORE and place.parent.name.startswith(PREFIX)


def new_path(folder: str) -> str:
    """Return the path of a data set that is not there yet, in this folder or at this URL."""
    return f"{folder.rstrip('/')}/{uuid.uuid4().hex}.zarr"


@contextmanager
def _seen_nowhere_else(place: str) -> Iterator[None]:
    """Name the remedy where a worker does not see samples that are kept while the context lasts. place: its key."""
    try:
        yield
    except DataUnseen as error:
        reason = "it does not see the folder of this machine that the samples are written to"
        worker = error.value.removesuffix(" does not see the data set")
        raise ClusterError(worker, reason, f"set {place} to a folder or URL that every worker sees") from error


@contextmanager
def stored(data: OwnData, path: str, *, seed: int, client: Client | None, place: str) -> Iterator[None]:
    """Write a data set of these samples to this path, and remove it again when the context ends.

    All samples are in its training part. A data set has a test part: here it is the first sample, once more.
    place: the name of what says where it is.
    """
    first = data.images[:1], data.labels[:1]
    try:
        chunk = len(data.labels) if data.images.nbytes <= _SMALL else None
        how: dict[str, Any] = {"classes": data.classes, "weights": data.weights, "name": NAME, "chunk": chunk}
        how["nodata"] = data.nodata
        with _seen_nowhere_else(place):
            # no warnings: an estimator takes what it is given
            prepare(data.images, data.labels, path, test=first, seed=seed, client=client, warn=silent, **how)
            yield
    finally:
        remove(path)


@contextmanager
def with_own_data(
    tables: Mapping[str, Any], data: tuple[Any, Any] | None, client: Client | None
) -> Iterator[tuple[dict[str, Any], Callable[..., Job]]]:
    """Yield the tables of a job on images and labels, and a function that writes these as its data set.

    The function takes the resolved job, and the job that a run has kept which goes on: its data set is not written
    again where it still is, and elsewhere is made of the arrays as at first. It returns the job with the place of the
    data set. That stays at the job's `data.path`. Without one it lies in a temporary folder as long as the context
    lasts.
    """
    section = tables.get("data") or {}
    if data is None or not isinstance(section, Mapping):  # what is no table is refused with the job
        yield dict(tables), lambda job, kept=None: job
        return
    images, labels = data
    reading = {key: section[key] for key in _READING if section.get(key) is not None}
    plain = {key: value for key, value in reading.items() if isinstance(value, str | int | float)}
    others = {key: value for key, value in reading.items() if key not in plain}  # such as arrays for testing
    with OwnFolder() as folder:
        own = {"path": f"{folder}/{_STORE}"} | {key: section[key] for key in section if key not in _READING}
        if isinstance(known := own.get("given") or {}, Mapping):
            own["given"] = {**plain, **known}  # the job of an earlier run has some

        def write(job: Job, kept: Job | None = None) -> Job:
            if job.data.name in DATASETS:
                reason = "is a data set of its own, and the images are given"
                raise JobError([f"data.name = {job.data.name!r}: {reason}; remove it, or give another name"])
            if kept is not None:
                before = job.data if "path" in section else kept.data
                if not _is_temporary(before) and not is_vacant(before):
                    return job.model_copy(update={"data": job.data.model_copy(update={"path": before.path})})
            assert job.data.path is not None, "resolved"
            first: Any = plain if job.data.given is None else job.data.given
            how = {**first, **others, "name": job.data.name or NAME, "order": job.data.order, "seed": job.train.seed}
            prepare(images, labels, job.data.path, client=client, **how)
            return job

        with nullcontext() if "path" in section else _seen_nowhere_else("data.path of the job"):
            yield {**tables, "data": own}, write
