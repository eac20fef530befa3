"""What is done with data sets and finished runs: prepare, verify, evaluate, predict."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from daskcnn.arrays import Device, cpu_count, single_threaded_blas
from daskcnn.classifier import Classifier
from daskcnn.config import Job
from daskcnn.errors import DataError
from daskcnn.launch.keep import to_classifier, to_state
from daskcnn.launch.resolve import kept_job
from daskcnn.launch.runner import shown
from daskcnn.replica import Replica
from daskcnn.report.checkpoint import Checkpoint, best, latest
from daskcnn.report.run_dir import RunDirectory
from daskcnn.store import open_dataset
from daskcnn.store import prepare as prepare_dataset
from daskcnn.store import verify as verify_dataset

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")  # none that another program is called for
Which = Literal["last", "best"]


def prepare(name: str, *, archive: str | None, out: str | None, order: Any, seed: int, say: Any) -> str:
    """Write a data set where workers can read it; returns what was done."""
    return prepare_dataset(
        name,
        archive=archive,
        out=out or f"data/{name}.zarr",
        order=order,
        seed=seed,
        progress=shown(say),
        warn=lambda message: say(f"warning: {message}"),
    )


def verify(path: str) -> str:
    """Read and check all of a prepared data set. Raises DataError naming what is wrong."""
    dataset = open_dataset(path)
    verify_dataset(dataset)
    return f"{path}: {dataset.name}, {len(dataset.train):,} + {len(dataset.test):,} images, all chunks as recorded"


def load(run: str, which: Which, say: Any) -> tuple[Job, Checkpoint]:
    """A run's job and its last or best checkpoint. Raises DataError where there is none."""
    directory = RunDirectory.open(run)
    job = kept_job(directory)
    found = (best if which == "best" else latest)(directory.checkpoints, warn=say)
    found = found or latest(directory.checkpoints, warn=say)
    if found is None:
        raise DataError(f"{run}: no checkpoint yet; wait for the first epoch, or resume the run")
    return job, found


def evaluate(run: str, *, which: Which, path: str | None, say: Any) -> dict[str, Any]:
    """Accuracy and loss of a run's network on the test samples of its data set, or of another."""
    job, checkpoint = load(run, which, say)
    dataset = open_dataset(path or job.data.path or "", limit=None if path else job.data.limit)
    classifier = to_classifier(checkpoint, job)
    if (dataset.shape, dataset.classes) != (classifier.facts.shape, classifier.classes):
        raise DataError(
            f"{dataset.path}: other images or classes than {run} was trained on; give a data set like its own"
        )
    replica = Replica(job, dataset, Device.of("cpu", threads=cpu_count()), clock=time.perf_counter)
    replica.adopt(to_state(checkpoint, job).weights)
    with single_threaded_blas():
        score = replica.evaluate(dataset.test, 0, len(dataset.test))
    return {
        "run": run,
        "checkpoint": str(checkpoint.path),
        "data": dataset.path,
        "samples": score.samples,
        "accuracy": score.accuracy,
        "loss": score.loss,
    }


def readable_evaluation(result: dict[str, Any]) -> str:
    return (
        f"accuracy {100 * result['accuracy']:.2f} %, loss {result['loss']:.4f} on {result['samples']:,} test samples "
        f"of {result['data']}\ncheckpoint {result['checkpoint']}"
    )


def predict(run: str, images: Sequence[str], *, which: Which, top: int, say: Any) -> list[dict[str, Any]]:
    """The likeliest classes of each image file, resized to what the network saw in training."""
    job, checkpoint = load(run, which, say)
    classifier = to_classifier(checkpoint, job)
    pixels = np.stack([_pixels(path, classifier.facts.shape, say) for path in images])
    return [_likeliest(path, p, classifier, top) for path, p in zip(images, classifier.predict(pixels), strict=True)]


def _likeliest(path: str, probabilities: npt.NDArray[Any], classifier: Classifier, top: int) -> dict[str, Any]:
    order = np.argsort(-probabilities)[:top]
    return {
        "image": path,
        "classes": [{"class": classifier.classes[i], "probability": float(probabilities[i])} for i in order],
    }


def _pixels(path: str, shape: tuple[int, int, int], say: Any) -> npt.NDArray[np.uint8]:
    """An image file as (H, W, C) uint8. Raises DataError for what is no image, or too large to be one."""
    H, W, C = shape
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            image = Image.open(path, formats=FORMATS)
        with image:
            if image.size != (W, H):
                say(f"warning: {path}: {image.size[0]}x{image.size[1]} pixels, resized to {W}x{H}")
            plain = image.convert("RGB" if C == 3 else "L").resize((W, H), Image.Resampling.BILINEAR)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: too large for an image to look at ({error}); scale it down first") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: not an image that can be read ({error}); give a PNG or JPEG file") from error
    return np.asarray(plain, np.uint8).reshape(H, W, C)


def readable_predictions(results: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"{r['image']}: " + ", ".join(f"{c['class']} {100 * c['probability']:.1f} %" for c in r["classes"])
        for r in results
    )
