"""The data set that a job names: a prepared one, or arrays that are used in place."""

from __future__ import annotations

from daskcnn.job.tables import Data
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.array_index import ArrayIndex
from daskcnn.store.foreign.in_place import Arrays, outline


def arrays_of(data: Data) -> Arrays:
    """The arrays in place that a resolved job names."""
    assert data.images is not None, "asked for arrays in place only"
    assert data.labels is not None, "checked with the job"
    return Arrays(
        images=data.images,
        labels=data.labels,
        test=data.test,
        test_images=data.test_images,
        test_labels=data.test_labels,
        layout=data.layout,
        nodata=data.nodata,
        seed=data.seed,
        validation=data.validation if "validation" in data.model_fields_set else None,
        limit=data.limit,
    )


def opened(data: Data, index: ArrayIndex | None = None) -> Dataset:
    """The data set of a resolved job. Only metadata are read, and the labels of arrays in place.

    Parameters
    ----------
    index : of arrays in place; without it they have no statistics, and are not checked as they are read

    Raises
    ------
    DataError : where it is missing or wrong
    """
    if data.in_place:
        return scaled(data, outline(arrays_of(data)).dataset(index))
    assert data.path is not None, "resolved"
    return scaled(data, open_dataset(data.path, limit=data.limit))


def scaled(data: Data, dataset: Dataset) -> Dataset:
    """The data set with the job's own mean and deviation, if it has any. Raises DataError where they do not fit."""
    return dataset if data.scale is None else dataset.scaled(data.scale.mean, data.scale.deviation)
