"""A trained network for other programs: `daskcnn export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from daskcnn.errors import DataError
from daskcnn.export import FORMATS
from daskcnn.trained.trained_run import Which, load_classifier, run_name


def export(run: str, to: str, *, out: str | None, which: Which, say: Callable[[str], None]) -> tuple[Path, ...]:
    """Write a run's network in one of `FORMATS` and return the files; those that are there already are replaced.

    Without `out` the file is `model` with the format's suffix, in the run's directory or beside the model's file.
    Raises UserError.
    """
    kind = FORMATS[to]
    classifier = load_classifier(run, which, say)
    place = Path(run)
    file = Path(out) if out else (place.parent if place.is_file() else place) / f"model{kind.suffix}"
    if place.is_file() and file.exists() and file.samefile(place):
        raise DataError(file, "this is the model itself", "give another file to write")
    try:
        return kind.write(classifier, run_name(run), file)
    except OSError as error:
        raise DataError(file, error.strerror or error, "give a file that can be written") from error
