"""Places of trained networks: every command and function that takes one finds it here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from daskcnn.errors import DataError, UserError
from daskcnn.export import FORMATS, read_model
from daskcnn.files import SEEN, local_path, output_file
from daskcnn.job.tables import CheckpointChoice, Job
from daskcnn.nn.network import Views, views_problem
from daskcnn.runs.checkpoint import Checkpoint, best, latest, load
from daskcnn.runs.directory import RunDirectory, kept_job, near
from daskcnn.runs.state import check_of, is_weight, parse_record
from daskcnn.show.renderers.terminal import say
from daskcnn.show.text import checkpoint_text
from daskcnn.training.trained_network import Classifier, to_classifier

_PLACES = (
    "give a run directory, one of its checkpoints (RUN/checkpoints/step-…), "
    "or a file of `daskcnn export --to safetensors`"
)


@dataclass(frozen=True, eq=False)
class FoundNetwork:
    """A trained network.

    Attributes
    ----------
    source : The checkpoint's folder, or the model file.
    run : The run directory; None for a model file.
    choice : The choice among the run's checkpoints; None where the place is one, or a model file.
    epoch : The epoch that the checkpoint is of; None for a model file.
    """

    classifier: Classifier
    source: Path
    run: Path | None = None
    choice: CheckpointChoice | None = None
    epoch: float | None = None

    @property
    def name(self) -> str:
        """The name of the run, or of the model file."""
        return os.path.basename(os.path.abspath(self.run or self.source))

    @property
    def weights(self) -> str:
        """The place of the weights, with the choice that was made among the run's."""
        return checkpoint_text(str(self.source), self.choice, self.epoch)


def find_network(
    place: str | Path,
    checkpoint: CheckpointChoice | None = None,
    say: Callable[[str], None] = say,
    *,
    views: Views | None = None,
) -> FoundNetwork:
    """Find the trained network at a place and load it.

    Parameters
    ----------
    place : a run directory, one of its checkpoints or a file of one, or a model that `daskcnn export` wrote.
    checkpoint : the choice among those of a run directory; None for what the run hands back (`Train.hands_back`).
    say : is told of damaged checkpoints that are passed over.
    views : of each image; None for those of the run's job. A model file has none of its own.

    Raises
    ------
    DataError : there is no trained network, or it is damaged.
    JobError : the run's job is damaged or of another version.
    UserError : its images do not have such views; there is no such choice.
    """
    if checkpoint not in (None, *get_args(CheckpointChoice)):
        raise UserError(f"checkpoint={checkpoint!r:.60}", "there is no such choice", "give 'best' or 'last'")
    try:
        found = _find(local_path(place), checkpoint, say)
    except OSError as error:
        raise DataError(place, error.strerror or error, SEEN) from error
    own = found.classifier
    if views is not None:
        if problem := views_problem(views, own.facts.shape, reconstructs=own.reconstructs):
            raise UserError(f"views = {problem}")
        own.views = views
    return found


def _find(place: Path, choice: CheckpointChoice | None, say: Callable[[str], None]) -> FoundNetwork:
    folder = place.parent if place.name in ("arrays.safetensors", "state.json") and place.is_file() else place
    run = Path(os.path.normpath(folder / ".." / ".."))
    if folder.absolute().parent.name == "checkpoints" and folder.is_dir() and (run / "job.json").exists():
        job = kept_job(RunDirectory.open(run))
        return _found(load(folder, check=check_of(job), wanted=is_weight), job, run)
    if place.exists() and not place.is_dir():
        return FoundNetwork(read_model(place), place)
    if not (place / "job.json").exists():
        raise DataError(place, "no trained network there", f"{_PLACES}{near(place)}")
    directory = RunDirectory.open(place)
    job, folder = kept_job(directory), directory.checkpoints
    how: dict[str, Any] = {"warn": say, "check": check_of(job), "wanted": is_weight}
    choice = choice or job.train.hands_back
    kept = best(folder, **how) if choice == "best" else None
    kept = kept or latest(folder, **how)
    if kept is None:
        raise DataError(place, "no checkpoint yet", "wait for the first epoch, or resume the run")
    return _found(kept, job, place, choice)


def _found(kept: Checkpoint, job: Job, run: Path, choice: CheckpointChoice | None = None) -> FoundNetwork:
    assert kept.path is not None, "loaded"
    return FoundNetwork(to_classifier(kept, job), kept.path, run, choice, parse_record(kept.state, kept.path).epoch)


def export(
    place: str | Path, to: str, *, out: str | None, checkpoint: CheckpointChoice | None, say: Callable[[str], None]
) -> tuple[Path, ...]:
    """Write the network at a place in one of `FORMATS` and return the files; those that are there are replaced.

    Without `out` the file is `model` with the format's suffix, in the run directory or beside the model file.
    Raises UserError.
    """
    if out is not None:
        output_file(out)
    kind, found = FORMATS[to], find_network(place, checkpoint, say)
    say(f"weights: {found.weights}")
    file = Path(out) if out else (found.run or found.source.parent) / f"model{kind.suffix}"
    if found.run is None and file.exists() and file.samefile(found.source):
        raise DataError(file, "this is the model itself", "give another file to write")
    try:
        return kind.write(found.classifier, found.name, file)
    except OSError as error:
        raise DataError(file, error.strerror or error, "give a file that can be written") from error
