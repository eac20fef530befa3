"""Parts of a prediction: a worker predicts each, and the driver keeps it beside the output.

`OUT.parts/` holds `task.json`, which identifies network and data, a lock, and a file for each part. A second call with
the same network and data predicts the missing parts only. With others the folder is refused: hours of work are never
discarded silently.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Self
from weakref import finalize

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as encode

from daskcnn.arrays import Device, DeviceKind, keep_freed_memory, release_freed_memory
from daskcnn.documents import Bounds, parse_json
from daskcnn.errors import DataError
from daskcnn.files import open_regular, read_regular, replace_file
from daskcnn.runs.checkpoint import read_arrays, read_header
from daskcnn.trained.predictions.sources import Part, PredictedSource, Samples
from daskcnn.training.trained_network import Classifier, Predictor


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions of a part.

    Attributes
    ----------
    probabilities : (n, classes); NaN for a file that could not be read.
    labels : (n,) or (n, L), None where none are known.
    bad : messages about samples without a prediction.
    """

    probabilities: npt.NDArray[np.float32]
    labels: npt.NDArray[Any] | None
    bad: tuple[str, ...] = ()


_BOUNDS = Bounds(size=1 << 16, values=100, tables=10)
_TASK = "task.json"
_LOCK = "lock"
_OWN = {_TASK, f".{_TASK}.tmp", _LOCK}
"""Files of a folder without parts; one that was killed early, or begins now, may have the second and no first."""
_MOST_BAD = 20  # unreadable files of a part that are named


def identity(classifier: Classifier, source: PredictedSource) -> dict[str, Any]:
    """Return plain data that differ if the predictions of a network may differ."""
    digest = hashlib.sha256(repr(classifier.model).encode())
    digest.update(json.dumps(classifier.facts.to_dict(), sort_keys=True).encode())
    if classifier.views != "none":
        digest.update(classifier.views.encode())
    digest.update(np.ascontiguousarray(classifier.weights).view(np.uint8).data)
    return {"format": 1, "network": digest.hexdigest(), "data": source.fingerprint, "parts": len(source.parts)}


class KeptParts:
    """The folder of parts of an output. One process has it at a time, until it is closed or removed."""

    def __init__(self, out: Path, task: dict[str, Any], classes: int) -> None:
        """Make the folder, or continue with the one that is there.

        Raises DataError where it is of another task, or another process has it.
        """
        self._folder, self._classes = out.with_name(f"{out.name}.parts"), classes
        self._lock: int | None = None
        try:
            self._begin(task)
        except OSError as error:
            self.close()
            raise DataError(self._folder, error.strerror or error, "give another path") from error
        except DataError:
            self.close()
            raise

    def _begin(self, task: dict[str, Any]) -> None:
        file, again = self._folder / _TASK, f"remove {self._folder} to start anew, or give another path"
        self._folder.mkdir(exist_ok=True)
        if not os.path.lexists(file) and self._names() - _OWN:
            raise DataError(self._folder, "a folder with other files", "give another path")
        self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for its end, or give another path"
            raise DataError(self._folder, "another process writes it", remedy) from None
        except OSError:  # a disk without locks
            pass
        if not os.path.lexists(file):
            replace_file(file, json.dumps(task, indent=1).encode())
        found = parse_json(read_regular(file, _BOUNDS.size), file, remedy=again, bounds=_BOUNDS)
        if not isinstance(found, dict) or found.get("format") != task["format"]:
            raise DataError(self._folder, "parts of another version of daskcnn", again)
        if found.get("network") != task["network"]:
            raise DataError(self._folder, "parts that another network has predicted", again)
        if found != task:
            raise DataError(self._folder, "parts of other data", again)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the folder to others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def has(self, part: Part) -> bool:
        """Return True if a part is done and whole."""
        return self._file(part).exists() and self._read(part) is not None

    def keep(self, part: Part, found: Predicted) -> None:
        """Keep a part. Raises DataError where it cannot be written."""
        arrays = {"probabilities": np.ascontiguousarray(found.probabilities)}
        arrays |= {} if found.labels is None else {"labels": np.ascontiguousarray(found.labels)}
        bad = {f"bad {i}": problem[:500] for i, problem in enumerate(found.bad[:_MOST_BAD])}
        try:
            replace_file(self._file(part), encode(arrays, bad or None))
        except OSError as error:
            raise DataError(self._file(part), error.strerror or error, "make room; the same command goes on") from error

    def read(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Predicted]]:
        """Yield all parts in order, one at a time in memory. Raises DataError for one that is damaged meanwhile."""
        for part in parts:
            if (found := self._read(part)) is None:
                raise DataError(self._file(part), "damaged", "give the same command again: the part is predicted anew")
            yield part, found

    def remove(self) -> None:
        """Remove the folder, once the output is whole."""
        self.close()  # first: NFS keeps the name of an open file
        shutil.rmtree(self._folder, ignore_errors=True)

    def remove_empty(self) -> None:
        """Remove the folder where no part was kept."""
        if self._names() <= _OWN:
            self.remove()

    def _names(self) -> set[str]:
        return {file.name for file in self._folder.iterdir()}

    def _file(self, part: Part) -> Path:
        return self._folder / f"part-{part.index:06d}.safetensors"

    def _read(self, part: Part) -> Predicted | None:
        """Return a part, None where its file is damaged."""
        file = self._file(part)
        try:
            with open_regular(file) as source:
                size = os.fstat(source.fileno()).st_size
                header, bad = read_header(source, file, size)
                arrays = read_arrays(source, header, size)
        except (OSError, DataError):
            return None
        probabilities, labels = arrays.get("probabilities"), arrays.get("labels")
        if probabilities is None or probabilities.shape != (len(part), self._classes):
            return None
        if probabilities.dtype != np.float32 or (labels is not None and len(labels) != len(part)):
            return None
        return Predicted(probabilities, labels, tuple(bad.values()))


_UNKNOWN = "has NaN or infinities, which a network trained without data.nodata does not take"


@dataclass(eq=False)
class PredictionTask:
    """The work on every part. A worker gets it once, and keeps in it all that depends on the weights alone.

    Threads may predict parts at once, as those of a worker do whose tasks no resource limits. They read at once, and
    compute one after the other, because a predictor has one scratch memory.
    """

    classifier: Classifier
    read: Callable[[Part], Samples]
    _predictor: Predictor | None = field(default=None, init=False)
    _turn: Lock = field(default_factory=Lock, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.classifier, self.read)

    def predict(self, part: Part, kind: DeviceKind, threads: int) -> Predicted:
        """Predict a part on this process's device. Raises DataError where its samples cannot be read."""
        samples = self.read(part)
        images = self.classifier.taken(samples.images)
        with self._turn:
            probabilities = self._predictor_on(kind, threads).probabilities(images).astype(np.float32)
        probabilities[[place for place, _ in samples.bad]] = np.nan
        bad = dict(samples.bad)
        unknown = np.flatnonzero(np.isnan(probabilities).any(axis=1)).tolist()
        problems = tuple(bad.get(place) or f"{part.sample(place)}: {_UNKNOWN}" for place in unknown)
        return Predicted(probabilities, samples.labels, problems)

    def _predictor_on(self, kind: DeviceKind, threads: int) -> Predictor:
        if self._predictor is None:
            # Dask's workers return freed memory at once: every part would take fresh pages, for a quarter of its time
            keep_freed_memory()
            finalize(self, release_freed_memory)
            train = self.classifier.job.train
            limit = train.workspace_mib << 20
            device = Device.of(kind, threads=threads, workspace_limit=limit, exact=train.exact)
            self._predictor = self.classifier.on(device)
        return self._predictor
