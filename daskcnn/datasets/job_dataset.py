"""The data set of a job: found at its path or made there; of arrays in place, with the index that is read once."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
from distributed import Client

from daskcnn.cluster.link.calls import Check, no_check
from daskcnn.cluster.spread.spread import spread
from daskcnn.errors import DataError, nearest, similar
from daskcnn.files import local_path
from daskcnn.job.data_table import Data
from daskcnn.job.dataset import arrays_of, scaled
from daskcnn.job.resolve import resolved_data
from daskcnn.job.tables import Cluster, Job
from daskcnn.store import DATASETS, Dataset, Split, open_dataset, prepare
from daskcnn.store.array_index import ArrayIndex, drop_from_cache, keep_in_cache, kept_in_cache, read_index
from daskcnn.store.chunk_source import StoredChunks
from daskcnn.store.files import Files, is_url
from daskcnn.store.foreign.in_place import ChunkSeen, Outline, look, outline
from daskcnn.store.manifest import PARTS, PartManifest, Progress, Warn, draft_of, silent


def find_dataset(
    job: Job,
    *,
    progress: Progress,
    client: Client | None = None,
    beside: Path | None = None,
    check: Check = no_check,
    warn: Warn = silent,
) -> Dataset:
    """Return the job's data set, complete: made if it is not there yet, arrays in place with their index.

    The index is that of a run which goes on, in the file `beside` it, that of the cache, or a new one. Then the cluster
    of the client reads the arrays, or this process without one. Raises DataError where the data set is another one or
    cannot be made; where arrays are unfit, or others than the run began with.
    """
    if not job.data.in_place:
        return outlined(job, progress=progress, warn=warn)
    found = outline(arrays_of(job.data))
    index = read_index(beside) if beside is not None else None
    if index is None:
        index = kept_in_cache(found.cache_key) or _made(job.cluster, found, client, progress, check, warn)
    return scaled(job.data, found.dataset(index))


def _made(
    cluster: Cluster, found: Outline, client: Client | None, progress: Progress, check: Check, warn: Warn
) -> ArrayIndex:
    pieces = list(found.pieces())
    seen = list[ChunkSeen]()
    total = sum(len(piece.chunks) for piece in pieces)
    key = found.cache_key  # of before it is read: what changes meanwhile makes it another one
    for _, each in spread(client, look, pieces, cluster, check=check, warn=warn):
        seen += each
        progress(f"read {found.arrays.images} for its statistics", len(seen), total)
    index = found.index(seen)
    if missing := sum(each.missing for each in seen):
        numbers = sum(images.samples * int(np.prod(images.shape)) for images in found.opened)
        share = f"{missing:,} of {numbers:,} numbers ({missing / numbers:.2%})"
        warn(f"{found.arrays.images}: {share} are no data: they are left out of the statistics and count as the mean")
    keep_in_cache(key, index)
    return index


def forget(job: Job) -> None:
    """Drop the cached index of a job's arrays, which have turned out to be others by now."""
    drop_from_cache(outline(arrays_of(job.data)).cache_key)


def outlined(job: Job, *, progress: Progress, warn: Warn) -> Dataset:
    """Return the same as far as it is known before images are read: arrays in place may have no index yet."""
    data = job.data
    if data.in_place:
        found = outline(arrays_of(data))
        index = kept_in_cache(found.cache_key)
        for note in found.notes(listed=index is None):
            warn(note)
        return scaled(data, found.dataset(index))
    assert data.path is not None, "resolved"
    if is_missing(data) and not _may_be_made(data):
        raise no_data_set(data)
    if must_be_made(data):
        assert data.name is not None, "what may be made has a name"
        prepare(data.name, archive=data.archive, out=data.path, order=data.order, progress=progress, warn=warn)
    dataset = _opened(data, data.path)
    if data.name is not None and dataset.name != data.name:
        reason = f"{data.path} holds {dataset.name}, the job wants {data.name}"
        raise DataError(reason=reason, remedy="set data.name or data.path")
    if dataset.order != data.order:
        reason = f"{data.path} is stored in order {dataset.order!r}, the job wants {data.order!r}"
        remedy = f"set data.order, or prepare it anew with --order {data.order} --out another path"
        raise DataError(reason=reason, remedy=remedy)
    return scaled(data, dataset)


def to_be_made(data: Data) -> bool:
    """Return True if `outlined` would write a data set."""
    return not data.in_place and must_be_made(data) and is_vacant(data)


def expected(data: Data) -> tuple[Dataset, str]:
    """Return the data set that would be written, as far as it is known before, and a sentence on how it is made.

    It has no samples, and class names that are numbers. Nothing is read or written. Raises DataError as `outlined`
    where it cannot be made, and where there is no archive at the place that the job names.
    """
    assert data.path is not None, "resolved"
    if data.name is None or not _may_be_made(data):
        raise no_data_set(data)
    known, how = DATASETS[data.name], "generated"
    if data.archive is not None and not local_path(data.archive).exists():
        raise DataError(data.archive, "there is no such file or folder", "correct data.archive (--archive)")
    if known.takes_archive:
        missing = [] if data.archive else known.to_fetch(local_path(data.path).parent)
        urls = ", ".join(f"{each.url} ({each.size:,} bytes)" for each in missing)
        how = f"downloaded from {urls}" if missing else f"read from {data.archive or 'the files beside it'}"
    parts = {}
    for name, samples in zip(PARTS, (known.training_samples, known.test_samples), strict=True):
        counts = tuple(len(each) for each in np.array_split(range(samples), known.classes))
        parts[name] = PartManifest(samples=samples, class_counts=counts, images=(), labels=())
    fields = {"name": data.name, "classes": tuple(map(str, range(known.classes))), "shape": known.shape, "chunk": 1}
    manifest = draft_of({**fields, "order": data.order, "seed": 0, "sources": {}}, parts)
    about = Files.at(data.path), manifest.fingerprint()
    train, test = (
        Split(name, min(part.samples, data.limit or part.samples), StoredChunks(name, 1, about[0], part, about[1], {}))
        for name, part in parts.items()
    )
    words = f"{data.name} is not at {data.path} yet: it will be {how} and written there when the run starts"
    return scaled(data, Dataset(data.path, manifest, train, test)), words


def must_be_made(data: Data) -> bool:
    """Return True if the data set is written before the job begins."""
    return data.archive is not None or is_missing(data)


def is_missing(data: Data) -> bool:
    """Return True if nothing is at the data set's path. A URL counts as present: it has to be read first."""
    return data.path is not None and "://" not in data.path and not Path(data.path).exists()


def is_vacant(data: Data) -> bool:
    """Return True if nothing is stored at the data set's path. A URL is looked at."""
    if data.path is None:
        return False
    try:
        return is_missing(data) or Files.at(data.path).is_empty()
    except NotADirectoryError:  # a file, which is refused in place of a data set
        return False


def _opened(data: Data, path: str) -> Dataset:
    """Open the data set at this path. Where a publisher's files lie there, the error says how to prepare them."""
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
    """Return the error for a path where there is nothing, with how a data set of this name is made there."""
    meant = similar(data.name, DATASETS) if data.name and data.name not in DATASETS else ""
    if data.name in DATASETS:
        how = f"make it there with `daskcnn data prepare {data.name} --out {data.path}`"
    else:
        how = f"make it there: `daskcnn data prepare folder IMAGES --size 32x32 --out {data.path}`"
        how += nearest(data.name, DATASETS) if data.name and not meant else ""
    return DataError(data.path, f"no data set here{meant}", f"correct data.path (--data), or {how}")


def _may_be_made(data: Data) -> bool:
    """Return True if a job may make its missing data set. Only the usual path is downloaded to: others may be typos."""
    if data.name not in DATASETS:
        return False
    made_without_download = data.archive or not DATASETS[data.name].takes_archive
    return bool(made_without_download) or data.path == resolved_data(Data(name=data.name)).path
