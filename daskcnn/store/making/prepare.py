"""From an archive to a prepared data set: `daskcnn data prepare`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from daskcnn.errors import DataError
from daskcnn.files import local_path
from daskcnn.store.dataset import Dataset, open_dataset, verify
from daskcnn.store.datasets import DATASETS
from daskcnn.store.datasets.synthetic import Importer
from daskcnn.store.files import Files, is_url
from daskcnn.store.making.writer import Occupied, write
from daskcnn.store.manifest import Manifest, Order, Progress, Source, Warn, describe, silent
from daskcnn.store.split import shuffled_order

_CHUNK = 1000
_CHUNK_BYTES = 32 << 20
_CHUNKS_AT_LEAST = 20


def prepare(
    name: str,
    *,
    archive: str | Path | None = None,
    out: str | Path,
    order: Order = "shuffled",
    seed: int = 0,
    progress: Progress = silent,
    warn: Warn = silent,
) -> str:
    """Import a data set to `out` (local path or fsspec URL) and return a sentence that says what was done.

    `progress(stage, done, total)` and `warn(message)` are called on the way. An `out` that already holds the same data
    is left as it is. Raises DataError if the archive is wrong or `out` holds something else.
    """
    out = str(out)
    if name not in DATASETS:
        own = f", or `daskcnn data prepare folder {name}` for images of your own" if Path(name).is_dir() else ""
        raise DataError(reason=f"data set {name!r} is unknown", remedy=f"one of: {', '.join(sorted(DATASETS))}{own}")
    importer = DATASETS[name]
    if order not in ("shuffled", "stored"):
        raise DataError(f"order={order!r}: use 'shuffled' or 'stored'")
    if archive is not None and not importer.takes_archive:
        reason = f"{name} is built in and takes no archive ({archive} given)"
        raise DataError(reason=reason, remedy="leave --archive out")
    existing = _existing(out)
    if existing is not None and (existing.name, existing.order, existing.seed) != (name, order, seed):
        raise _refusal(existing)
    if existing is not None and archive is None:
        return _already(existing, progress)
    source = _ordered(importer.load(_archive(importer, archive, out, progress), progress, warn), order, seed)
    chunk = chunk_for(len(source.train[0]), source.train[0][0].nbytes)
    manifest = describe(source, chunk=chunk, order=order, seed=seed, warn=warn)
    return _settle(source, manifest, out, existing, progress)


def _settle(source: Source, manifest: Manifest, out: str, existing: Dataset | None, progress: Progress) -> str:
    """Write the data set, unless the same is there already, possibly from a faster process."""
    if existing is None:
        try:
            write(source, manifest, out, lambda part: progress(f"write {part} to {out}", 0, 0))
        except Occupied:
            existing = _existing(out)
            if existing is None:
                raise taken(out) from None
    if existing is None:
        return f"wrote {out}: {summary_of(open_dataset(out))}"
    if existing.manifest.content() != manifest.content():
        raise _refusal(existing)
    return _already(existing, progress)


def taken(out: str) -> DataError:
    """Return the error for a place that was free when the work began. Raises DataError naming what is there now."""
    refuse_occupied(out)
    return DataError(out, "was written to meanwhile", "choose another place (--out)")


def _archive(importer: Importer, archive: str | Path | None, out: str, progress: Progress) -> Path | None:
    """Return the archive's path; without one, the importer's own download, next to `out`."""
    if archive is not None or not importer.takes_archive:
        return None if archive is None else local_path(archive)
    if is_url(out):
        raise DataError(out, "an archive is downloaded next to local paths only", "get it first and give --archive")
    return importer.fetch(local_path(out).parent, progress)


def _existing(out: str) -> Dataset | None:
    """Return the data set at `out`, None if nothing is there. Raises DataError for anything else."""
    try:
        if not is_url(out) and not local_path(out).is_dir():
            if local_path(out).exists():
                raise DataError(out, "is a file, not a folder", "choose another place (--out)")
            return None
    except OSError as error:
        raise DataError(out, error.strerror or error, "choose another place (--out)") from error
    if Files.at(out).is_empty():
        return None
    try:
        return open_dataset(out)
    except DataError as error:
        reason = f"is not empty, and holds no whole data set ({error.reason or error})"
        raise DataError(out, reason, "choose another place (--out), or remove it") from error


def refuse_occupied(out: str) -> None:
    """Raise DataError if something is at this path or URL."""
    if (existing := _existing(out)) is not None:
        raise _refusal(existing)


def _already(existing: Dataset, progress: Progress) -> str:
    progress("verify", 0, 0)
    verify(existing)
    return f"{existing.path} already holds it, checked and left as it is: {summary_of(existing)}"


def _refusal(existing: Dataset) -> DataError:
    reason = f"already holds a data set ({summary_of(existing)})"
    return DataError(existing.path, reason, "use it as it is (--data), remove it, or choose another place (--out)")


def summary_of(dataset: Dataset) -> str:
    """Return in a line what is in a data set."""
    h, w, c = dataset.shape
    images = f"{len(dataset.train)} training and {len(dataset.test)} test images of {h}x{w}x{c}"
    how = f"order {dataset.order}, seed {dataset.seed}, fingerprint {dataset.fingerprint[:12]}"
    return f"{dataset.name}, {images}, {len(dataset.classes)} classes, {how}"


def chunk_for(samples: int, sample_bytes: int) -> int:
    """Return the samples per chunk: 1000, or fewer for large images and where too few chunks would be left to share."""
    return max(1, min(_CHUNK, samples // _CHUNKS_AT_LEAST, _CHUNK_BYTES // sample_bytes))


def _ordered(source: Source, order: Order, seed: int) -> Source:
    if order == "stored":
        return source
    orders = [shuffled_order(len(labels), seed, salt) for salt, (_, labels) in enumerate((source.train, source.test))]
    train, test = ((x[at], y[at]) for (x, y), at in zip((source.train, source.test), orders, strict=True))
    weights = None if source.weights is None else source.weights[orders[0]]
    return replace(source, train=train, test=test, weights=weights)
