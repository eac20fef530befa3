"""A run that has trained: its job and one of its checkpoints.

A trained network for other programs: `daskcnn export`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from daskcnn.errors import DataError, UserError
from daskcnn.export import FORMATS, read_model
from daskcnn.job.tables import Job
from daskcnn.nn.network import Views, views_problem
from daskcnn.runs.checkpoint import Checkpoint, best, latest, load
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.runs.state import check_of
from daskcnn.training.trained_network import Classifier, to_classifier

Which = Literal["last", "best"]
"""The checkpoint of the last epoch, or of the best validation accuracy."""


def load_trained(run: str, which: Which, say: Callable[[str], None]) -> tuple[Job, Checkpoint]:
    """A run's job and its last or best checkpoint. Raises DataError where there is none."""
    directory = RunDirectory.open(run)
    job = kept_job(directory)
    check = check_of(job)
    found = (best if which == "best" else latest)(directory.checkpoints, warn=say, check=check)
    found = found or latest(directory.checkpoints, warn=say, check=check)
    if found is None:
        raise DataError(run, "no checkpoint yet", "wait for the first epoch, or resume the run")
    return job, found


def load_classifier(path: str, which: Which, say: Callable[[str], None], *, views: Views | None = None) -> Classifier:
    """Return the network of a run, of one of its checkpoints, or of a model file that `daskcnn export` wrote.

    `which` matters to a run only. views: that it looks at images by; None for those of the run's job, which an exported
    model does not have. Raises DataError where there is no network, UserError for views that its images do not have.
    """
    classifier = _classifier(path, which, say)
    classifier.views = views_of(classifier, views)
    return classifier


def views_of(classifier: Classifier, views: Views | None) -> Views:
    """Return these views, or those of the network's job. Raises UserError where it cannot look at them."""
    shape, reconstructs = classifier.facts.shape, classifier.reconstructs
    if views is not None and (problem := views_problem(views, shape, reconstructs=reconstructs)):
        raise UserError(f"views = {problem}")
    return classifier.views if views is None else views


def _classifier(path: str, which: Which, say: Callable[[str], None]) -> Classifier:
    place = Path(path)
    if place.is_file():
        return read_model(place)
    if (place / "state.json").exists() and place.parent.name == "checkpoints":
        job = kept_job(RunDirectory.open(place.parent.parent))
        return to_classifier(load(place, check=check_of(job)), job)
    job, checkpoint = load_trained(path, which, say)
    return to_classifier(checkpoint, job)


def run_name(path: str) -> str:
    """Return the name of the run that this path belongs to."""
    place = Path(path).absolute()
    return place.parent.parent.name if place.parent.name == "checkpoints" else place.name


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
