"""The data set of a job: found at its path, or made there."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from daskcnn.datasets.indexing import indexed
from daskcnn.errors import DataError, nearest
from daskcnn.files import local_path
from daskcnn.job.dataset import scaled
from daskcnn.job.resolve import resolved_data
from daskcnn.job.tables import Data, Job
from daskcnn.store import DATASETS, Dataset, open_dataset, prepare
from daskcnn.store.files import is_url

Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]


def find_dataset(job: Job, *, progress: Progress, warn: Warn) -> Dataset:
    """The job's data set, made if it is not there yet. Raises DataError where it is another one, or cannot be made."""
    data = job.data
    if data.in_place:
        return indexed(job, progress=progress)
    assert data.path is not None, "resolved"
    if is_missing(data) and not _may_be_made(data):
        raise no_data_set(data)
    if must_be_made(data):
        assert data.name is not None, "what may be made has a name"
        prepare(data.name, archive=data.archive, out=data.path, order=data.order, progress=progress, warn=warn)
    dataset = _opened(data, data.path)
    if data.name is not None and dataset.name != data.name:
        raise DataError(
            reason=f"{data.path} holds {dataset.name}, the job wants {data.name}", remedy="set data.name or data.path"
        )
    if dataset.order != data.order:
        raise DataError(
            reason=f"{data.path} is stored in order {dataset.order!r}, the job wants {data.order!r}",
            remedy=f"set data.order, or prepare it anew with --order {data.order} --out another path",
        )
    return scaled(data, dataset)


def must_be_made(data: Data) -> bool:
    """Return True if the data set is written before the job begins."""
    return not data.in_place and (data.archive is not None or is_missing(data))


def is_missing(data: Data) -> bool:
    """Return True if nothing is at the data set's path. A URL counts as present: it has to be read first."""
    return data.path is not None and "://" not in data.path and not Path(data.path).exists()


def _opened(data: Data, path: str) -> Dataset:
    """The data set at this path. Where a publisher's files lie there, the error says how to prepare them."""
    try:
        return open_dataset(path, limit=data.limit)
    except DataError as error:
        names = [name for name in DATASETS if name == data.name] or [*DATASETS]
        archives = {} if is_url(path) else {name: DATASETS[name].archive_at(local_path(path)) for name in names}
        for name, archive in archives.items():
            if archive is not None:
                reason = f"the files of {name} as they are published, not a prepared data set"
                command = f"daskcnn data prepare {name} --archive {shlex.quote(str(archive))}"
                raise DataError(path, reason, f"prepare them with `{command}`, and leave --data out") from error
        raise


def no_data_set(data: Data) -> DataError:
    """The error for a path where there is nothing: how a data set of this name, known or not, is made there."""
    if data.name in DATASETS:
        how = f"make it there with `daskcnn data prepare {data.name} --out {data.path}`"
    else:
        how = f"make it there: `daskcnn data prepare folder IMAGES --out {data.path}`"
        how += nearest(data.name, DATASETS) if data.name else ""
    return DataError(data.path, "no data set here", f"correct data.path (--data), or {how}")


def _may_be_made(data: Data) -> bool:
    """Return True if a job may make its missing data set. Only the usual path is downloaded to: others may be typos."""
    if data.name not in DATASETS:
        return False
    made_without_download = data.archive or not DATASETS[data.name].takes_archive
    return bool(made_without_download) or data.path == resolved_data(Data(name=data.name)).path
