"""Arrays that are used in place, as the data set of a job: their index is read once, on the cluster, and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed import Client

from daskcnn.cluster.link.calls import Check, no_check
from daskcnn.cluster.spread.spread import spread
from daskcnn.job.dataset import arrays_of, scaled
from daskcnn.job.tables import Cluster, Job
from daskcnn.store import Dataset
from daskcnn.store.array_index import ArrayIndex, drop_from_cache, keep_in_cache, kept_in_cache, read_index
from daskcnn.store.foreign.in_place import ChunkSeen, Outline, look, outline

Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]


def outlined(job: Job) -> Dataset:
    """The data set of a job on arrays in place, as far as it is known without reading images."""
    found = outline(arrays_of(job.data))
    return scaled(job.data, found.dataset(kept_in_cache(found.cache_key)))


def indexed(
    job: Job,
    *,
    progress: Progress,
    client: Client | None = None,
    beside: Path | None = None,
    check: Check = no_check,
    warn: Warn = lambda _: None,
) -> Dataset:
    """The data set of a job on arrays in place, with its index: that of the run, that of the cache, or a new one.

    Parameters
    ----------
    client : of the cluster that reads the arrays where there is no index; None to read them in this process
    beside : the file that keeps the index of a run which goes on
    check, warn : called now and then; and with a warning

    Raises
    ------
    DataError : where the arrays are unfit, or others than the run began with
    """
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
    keep_in_cache(key, index)
    return index


def forget(job: Job) -> None:
    """Drop the cached index of a job's arrays, which have turned out to be others by now."""
    drop_from_cache(outline(arrays_of(job.data)).cache_key)
