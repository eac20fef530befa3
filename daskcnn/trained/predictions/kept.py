"""The parts that are done, beside the output: a second call with the same network and data goes on with them.

`OUT.parts/` holds `task.json`, which says what is predicted by which network, and a file a part. With another network
or other data the folder is refused: hours of work are not thrown away without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as encode

from daskcnn.documents import Bounds, parse_json
from daskcnn.errors import DataError
from daskcnn.files import open_regular, read_regular, replace_file
from daskcnn.runs.arrays_file import read_arrays, read_header
from daskcnn.trained.predictions.rows import Predicted
from daskcnn.trained.predictions.sources import Part, PredictedSource
from daskcnn.training.trained_network import Classifier

_BOUNDS = Bounds(size=1 << 16, values=100, tables=10)
_TASK = "task.json"
_MOST_BAD = 20  # unreadable files of a part that are named


def identity(classifier: Classifier, source: PredictedSource) -> dict[str, Any]:
    """Return what a network's predictions of these samples depend on."""
    digest = hashlib.sha256(repr(classifier.model).encode())
    digest.update(json.dumps(classifier.facts.to_dict(), sort_keys=True).encode())
    if classifier.views != "none":
        digest.update(classifier.views.encode())
    digest.update(np.ascontiguousarray(classifier.weights).view(np.uint8).data)
    return {"format": 1, "network": digest.hexdigest(), "data": source.fingerprint(), "parts": len(source.parts())}


class KeptParts:
    """The folder of parts of an output."""

    def __init__(self, out: Path, task: dict[str, Any], classes: int) -> None:
        """Make the folder, or go on with the one that is there. Raises DataError where it is of another task."""
        self._folder, self._classes = out.with_name(f"{out.name}.parts"), classes
        try:
            self._folder.mkdir(exist_ok=True)
            self._check(task)
        except OSError as error:
            raise DataError(self._folder, error.strerror or error, "give another path") from error

    def _check(self, task: dict[str, Any]) -> None:
        file, again = self._folder / _TASK, f"remove {self._folder} to start anew, or give another path"
        if not os.path.lexists(file):
            if any(self._folder.iterdir()):
                raise DataError(self._folder, "a folder with other files", "give another path")
            replace_file(file, json.dumps(task, indent=1).encode())
            return
        found = parse_json(read_regular(file, _BOUNDS.size), file, remedy=again, bounds=_BOUNDS)
        if not isinstance(found, dict) or found.get("format") != task["format"]:
            raise DataError(self._folder, "parts of another version of daskcnn", again)
        if found.get("network") != task["network"]:
            raise DataError(self._folder, "parts that another network has predicted", again)
        if found != task:
            raise DataError(self._folder, "parts of other data", again)

    def has(self, part: Part) -> bool:
        """Whether a part is done and whole."""
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def remove_empty(self) -> None:
        """Remove the folder where no part was kept."""
        if [file.name for file in self._folder.iterdir()] == [_TASK]:
            self.remove()

    def _file(self, part: Part) -> Path:
        return self._folder / f"part-{part.index:06d}.safetensors"

    def _read(self, part: Part) -> Predicted | None:
        """A part, None where its file is damaged."""
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
