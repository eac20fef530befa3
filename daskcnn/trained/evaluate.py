"""How good a trained network is: `daskcnn evaluate`."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Device, cpu_count, single_threaded_blas
from daskcnn.datasets.job_dataset import is_missing
from daskcnn.datasets.own_data import arrays_gone, was_given
from daskcnn.errors import DataError, UserError
from daskcnn.job.dataset import opened
from daskcnn.nn.network import Views
from daskcnn.nn.score import MOST_CONFUSED, TOP, ClassAnswers, ClassScores, LabelAnswers, shares
from daskcnn.runs.state import to_state
from daskcnn.runs.summary import keep_evaluation
from daskcnn.show.renderers.pictures import draw_confusion, need_matplotlib
from daskcnn.store import Dataset, Described, Split, open_dataset
from daskcnn.store.array_index import INDEX, read_index
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.image_facts import Facts
from daskcnn.store.manifest import MAX_CHUNK_BYTES
from daskcnn.trained.trained_run import Which, load_trained, views_of
from daskcnn.training.replica import Replica
from daskcnn.training.trained_network import to_classifier

ONE_PASS = 2 * MAX_CHUNK_BYTES
"""Bytes of chunks that are kept while all are read in their order."""
COLUMNS = ("class", "samples", "precision", "recall", "auc")
_NO_CLASSES: dict[str, Any] = {f"top{TOP}": None, "auc_samples": 0, "classes": [], "confusion": None}


def evaluate(
    run: str,
    *,
    which: Which,
    path: str | None,
    say: Callable[[str], None],
    picture: str | None = None,
    keep: bool = False,
    views: Views | None = None,
) -> dict[str, Any]:
    """Accuracy, loss and AUC of a run's network on the test samples of its data set, or of another; and by class.

    The samples are read batch by batch. AUC: of each class against the rest, the mean over the classes; None where
    there is only one. With more than a million class scores it is that of every n-th sample; `auc_samples` says how
    many that are. A network that reconstructs images has a loss alone: `labels` is "image" then. picture: a file for
    the confusion matrix to be drawn into, SVG or PNG. views: of each image, whose scores are averaged; None for those
    of the job. keep: write the result into the run directory too, for the page of its report. Raises UserError without
    matplotlib, for another ending, where there is no such matrix (several labels a sample, too many classes, or none),
    and for views that the images do not have; DataError where the result cannot be kept.
    """
    if picture is not None:
        _check_picture(picture)
    job, checkpoint = load_trained(run, which, say)
    index = read_index(Path(run) / INDEX) if job.data.in_place else None
    if not path and was_given(job.data.path) and is_missing(job.data):
        raise arrays_gone(run)
    dataset = open_dataset(path) if path else opened(job.data, index)
    classifier = to_classifier(checkpoint, job)
    of_image = classifier.reconstructs
    if dataset.shape != classifier.facts.shape or (not of_image and _kind(dataset) != _kind(classifier.facts)):
        raise DataError(
            dataset.path, f"other images or classes than {run} was trained on", "give a data set like its own"
        )
    answers = None if of_image else _answers(dataset)
    if picture is not None and not _confuses(answers):
        reason = f"{dataset.path} has several labels a sample, or more than {MOST_CONFUSED:,} classes"
        reason = f"{run} reconstructs images" if of_image else reason
        raise UserError(picture, f"{reason}, so there is no confusion matrix", "leave --picture out")
    device = Device.of("cpu", threads=cpu_count(), exact=job.train.exact)
    replica = Replica(job, _as_trained(dataset, classifier.facts), device, clock=time.perf_counter)
    replica.adopt(to_state(checkpoint, job).weights)
    samples, seen = len(dataset.test), views_of(classifier, views)
    with single_threaded_blas(), _small_cache():
        look = None if answers is None else answers.add
        score = replica.evaluate(dataset.test, 0, samples, whole=samples, look=look, views=seen)
    result = {
        "run": run,
        "checkpoint": str(checkpoint.path),
        "data": dataset.path,
        "samples": score.samples,
        "views": seen,
        "labels": "image" if of_image else dataset.labels,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "auc": score.judged.auc,
        **(_by_class(dataset.classes, answers, score.classes, score.samples) if answers else _NO_CLASSES),
    }
    if picture is not None:
        draw_confusion(dataset.classes, result["confusion"], Path(picture), title=f"{run}: {dataset.name}")
    if keep:
        keep_evaluation(Path(run), result)
    return result


@contextmanager
def _small_cache() -> Iterator[None]:
    """Keep few chunks: each is read once."""
    before, CACHE.limit = CACHE.limit, ONE_PASS
    try:
        yield
    finally:
        CACHE.limit = before


def _kind(images: Described) -> tuple[Any, ...]:
    return images.classes, images.labels


@dataclass(frozen=True)
class _AsTrained:
    """The part of a `store.Dataset` that a replica judges on, with the means and deviations of the training samples."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]
    labels: Literal["classes", "several"]
    nodata: float | None
    sample_bytes: int


def _as_trained(dataset: Dataset, facts: Facts) -> Dataset:
    """The data set in the eyes of a network: other data are not shifted and scaled by their own statistics."""
    seen = dataset.train, dataset.test, dataset.classes, dataset.shape, facts.mean, facts.deviation
    return cast(Dataset, _AsTrained(*seen, dataset.labels, dataset.nodata, dataset.sample_bytes))


def _answers(dataset: Dataset) -> ClassAnswers | LabelAnswers:
    classes = len(dataset.classes)
    return ClassAnswers(classes) if dataset.labels == "classes" else LabelAnswers(classes)


def _confuses(answers: ClassAnswers | LabelAnswers | None) -> bool:
    return isinstance(answers, ClassAnswers) and answers.confusion is not None


def _by_class(
    classes: tuple[str, ...], answers: ClassAnswers | LabelAnswers, scores: ClassScores | None, samples: int
) -> dict[str, Any]:
    columns = (
        classes,
        answers.present.tolist(),
        shares(answers.hits, answers.answered),
        shares(answers.hits, answers.present),
        [None] * len(classes) if scores is None else scores.areas,
    )
    top = confusion = None
    if isinstance(answers, ClassAnswers):
        top = answers.in_top / samples if samples and len(classes) >= 2 * TOP else None
        confusion = None if answers.confusion is None else answers.confusion.tolist()
    return {
        f"top{TOP}": top,
        "auc_samples": 0 if scores is None else len(scores.labels),
        "classes": [dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)],
        "confusion": confusion,
    }


def _check_picture(picture: str) -> None:
    need_matplotlib()
    if Path(picture).suffix not in (".svg", ".png"):
        raise UserError(picture, "pictures are SVG or PNG", "give a file that ends in .svg or .png")


def evaluation_csv(result: Mapping[str, Any]) -> str:
    """Return a line for each class: its figures, and how many of its samples were answered with each class.

    Raises UserError where there are no classes.
    """
    if not result["classes"]:
        raise UserError("--csv", f"{result['run']} reconstructs images, so no class has figures", "leave it out")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [each["class"] for each in result["classes"]]
    confusion = result["confusion"]
    writer.writerow([*COLUMNS, *(f"answered {name}" for name in names if confusion)])
    for i, each in enumerate(result["classes"]):
        writer.writerow([*(each[column] for column in COLUMNS), *(confusion[i] if confusion else ())])
    return text.getvalue()


def write_evaluation(result: Mapping[str, Any], path: str) -> None:
    """Write `evaluation_csv` to a file. Raises DataError where it cannot be written."""
    try:
        Path(path).write_text(evaluation_csv(result), encoding="utf-8")
    except OSError as error:
        raise DataError(path, error.strerror or error, "give a file that may be written") from error
