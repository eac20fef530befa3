"""Figures of a trained network on test samples: `daskcnn evaluate`."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Device, compile_here, cpu_count, single_threaded_blas
from daskcnn.datasets.own_data import check_kept
from daskcnn.errors import DataError, UserError
from daskcnn.files import output_file
from daskcnn.job.dataset import opened
from daskcnn.job.tables import CheckpointChoice
from daskcnn.nn.network import Views
from daskcnn.nn.score import MOST_CONFUSED, TOP, ClassAnswers, ClassScores, LabelAnswers, shares
from daskcnn.runs.summary import check_keeping, keep_evaluation
from daskcnn.show.renderers.drawing import draw_confusion, need_matplotlib
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.array_index import INDEX, read_index
from daskcnn.store.chunk_source import CACHE, Renumbered
from daskcnn.store.image_facts import Facts
from daskcnn.store.manifest import MAX_CHUNK_BYTES, is_like
from daskcnn.trained.place import FoundNetwork, find_network
from daskcnn.training.replica import Replica

ONE_PASS = 2 * MAX_CHUNK_BYTES
"""Bytes of chunks that are kept while all are read in their order."""
COLUMNS = ("class", "samples", "precision", "recall", "auc")
_MOST_NAMED = 20
_NO_CLASSES: dict[str, Any] = {f"top{TOP}": None, "auc_samples": 0, "classes": [], "confusion": None}


def evaluate(
    place: str,
    *,
    checkpoint: CheckpointChoice | None,
    path: str | None,
    say: Callable[[str], None],
    csv_file: str | None = None,
    picture: str | None = None,
    keep: bool = False,
    views: Views | None = None,
) -> dict[str, Any]:
    """Return accuracy, loss and AUC of a trained network on test samples, and figures of each class.

    The AUC is the mean over the classes of each one's against the rest; None where there is one class only. With more
    than a million class scores it is that of every n-th sample; `auc_samples` is their number. A network that
    reconstructs images has a loss alone; `labels` is "image" then.

    Parameters
    ----------
    place, checkpoint, views : as for `find_network`.
    path : a data set; None for that of the run's job.
    csv_file : a file that `write_evaluation` is to write; whether it can be is known before anything is computed.
    picture : a file to draw the confusion matrix into, SVG or PNG.
    keep : whether to write the result into the run directory too, for the page of its report.

    Raises
    ------
    UserError : matplotlib or the confusion matrix is missing, the picture's ending is another, the images do not have
        such views, or a model file comes without a data set.
    DataError : the network or the data set cannot be read, or the result cannot be kept.
    """
    _check_files(csv_file, picture)
    found = find_network(place, checkpoint, say, views=views)
    classifier, run = found.classifier, found.run
    if keep and run is None:
        raise UserError(place, "a model file has no run directory that keeps the result", "leave --keep out")
    if keep and run is not None:
        check_keeping(run)
    dataset, of_image = open_dataset(path) if path else _dataset_of(place, found), classifier.reconstructs
    _check_images(dataset, classifier.facts, place)
    if not of_image:
        dataset = _by_names(dataset, classifier.facts, place)
    answers: ClassAnswers | LabelAnswers | None = None
    if not of_image:
        answers = (ClassAnswers if dataset.labels == "classes" else LabelAnswers)(len(dataset.classes))
    if picture is not None and not (isinstance(answers, ClassAnswers) and answers.confusion is not None):
        reason = f"{dataset.path} has several labels a sample, or more than {MOST_CONFUSED:,} classes"
        reason = f"{place} reconstructs images" if of_image else reason
        raise UserError(picture, f"{reason}, so there is no confusion matrix", "leave --picture out")
    # the network sees other data as it saw its own: shifted and scaled by the statistics of the training samples
    seen = dataset.scaled(classifier.facts.mean.tolist(), classifier.facts.deviation.tolist())
    compile_here(classifier.job.model.dtype, say)
    device = Device.of("cpu", threads=cpu_count(), exact=classifier.job.train.exact)
    replica = Replica(classifier.job, seen, device, clock=time.perf_counter)
    replica.adopt(classifier.weights)
    samples = len(dataset.test)
    with single_threaded_blas(), _small_cache():
        look = None if answers is None else answers.add
        score = replica.evaluate(seen.test, 0, samples, whole=samples, look=look, views=classifier.views)
    result = {
        "run": place,
        "checkpoint": str(found.source),
        "choice": found.choice,
        "epoch": found.epoch,
        "data": dataset.path,
        "samples": score.samples,
        "views": classifier.views,
        "labels": "image" if of_image else dataset.labels,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "auc": score.judged.auc,
        "metrics": dict(score.judged.metrics),
        **(_by_class(dataset.classes, answers, score.classes, score.samples) if answers else _NO_CLASSES),
    }
    if picture is not None:
        draw_confusion(dataset.classes, result["confusion"], Path(picture), title=f"{place}: {dataset.name}")
    if keep and run is not None:
        keep_evaluation(run, result)
    return result


def _check_files(csv_file: str | None, picture: str | None) -> None:
    for file in filter(None, (csv_file, picture)):
        output_file(file)
    if picture is not None:
        need_matplotlib()
        if Path(picture).suffix not in (".svg", ".png"):
            raise UserError(picture, "pictures are SVG or PNG", "give a file that ends in .svg or .png")


def _dataset_of(place: str, found: FoundNetwork) -> Dataset:
    """Open the data set of the run that a network is from."""
    data = found.classifier.job.data
    if found.run is None:
        raise UserError(place, "a model file does not say which data set it was trained on", "give one: --data PATH")
    check_kept(data, place)
    return opened(data, read_index(found.run / INDEX))


def _check_images(dataset: Dataset, facts: Facts, place: str) -> None:
    """Raise DataError naming what differs from the images that the network knows."""
    for what, found, wanted in (
        ("images of", "×".join(map(str, dataset.shape)), "×".join(map(str, facts.shape))),
        ("numbers of type", facts.dtype if is_like(dataset.dtype, facts.dtype) else dataset.dtype, facts.dtype),
        ("black and white at", dataset.value_range or facts.value_range, facts.value_range or dataset.value_range),
    ):
        if found != wanted:
            reason = f"{what} {found}, and {place} was trained on {wanted}"
            raise DataError(dataset.path, reason, "give a data set of images like its own")


def _by_names(dataset: Dataset, facts: Facts, place: str) -> Dataset:
    """Return a data set whose test samples have the network's numbers of their classes, some of which it may lack.

    Raises DataError naming what the network does not know, or a missing one of several labels.
    """
    if dataset.labels != facts.labels:
        kinds = {"classes": "one class a sample", "several": "several labels a sample"}
        reason = f"{kinds[dataset.labels]}, and {place} was trained on {kinds[facts.labels]}"
        raise DataError(dataset.path, reason, "give a data set with labels like its own")
    if dataset.classes == facts.classes:
        return dataset
    several, known = facts.labels == "several", set(facts.classes)
    counts = dict(zip(dataset.classes, dataset.manifest.test.class_counts, strict=True))
    strange = [name for name in dataset.classes if name not in known and (several or counts[name])]
    absent = [name for name in facts.classes if name not in counts and several]
    if strange or absent:
        reason = f"{place} was not trained on {_listed(strange)}" if strange else f"no label {_listed(absent)}"
        remedy = f"give a data set of its classes, by the same names: {_listed(facts.classes)}"
        raise DataError(dataset.path, reason, remedy)
    own, wanted = (dataset.classes, facts.classes) if several else (facts.classes, dataset.classes)
    place_of = {name: number for number, name in enumerate(own)}
    numbers = np.array([place_of.get(name, 0) for name in wanted], np.uint16)  # 0: no sample is of that class
    train, test = (replace(part, source=Renumbered(part.source, numbers)) for part in (dataset.train, dataset.test))
    manifest = dataset.manifest.model_copy(update={"classes": facts.classes})
    return replace(dataset, manifest=manifest, train=train, test=test)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MOST_NAMED])) + ", …" * (len(names) > _MOST_NAMED)


@contextmanager
def _small_cache() -> Iterator[None]:
    """Keep few chunks: each is read once."""
    before, CACHE.limit = CACHE.limit, ONE_PASS
    try:
        yield
    finally:
        CACHE.limit = before


def _by_class(
    classes: tuple[str, ...], answers: ClassAnswers | LabelAnswers, scores: ClassScores | None, samples: int
) -> dict[str, Any]:
    columns = (
        classes,
        answers.present.tolist(),
        shares(answers.hits, answers.answered * (answers.present > 0)),  # of a class that is not there: None
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
