"""What is done with data sets, finished runs and networks: prepare, verify, evaluate, predict, plan_conv."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from daskcnn.arrays import Device, cpu_count, single_threaded_blas
from daskcnn.conv import ConvSpec, plan
from daskcnn.conv.planner import Candidate, candidates, readable
from daskcnn.conv.tuner import tune
from daskcnn.errors import DataError, UserError
from daskcnn.job.network import convolutions
from daskcnn.job.tables import Job, nearest
from daskcnn.launch.resolve import kept_job
from daskcnn.launch.training import shown
from daskcnn.nn import build_model, model_problem
from daskcnn.nn.models import MODELS
from daskcnn.runs.checkpoint import Checkpoint, best, latest
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import to_state
from daskcnn.store import open_dataset
from daskcnn.store import prepare as prepare_dataset
from daskcnn.store import verify as verify_dataset
from daskcnn.training.replica import Replica
from daskcnn.training.trained_network import Classifier, to_classifier

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")  # none that another program is called for
Which = Literal["last", "best"]
IMAGES = {"cifar10": (32, 32, 3), "mnist": (28, 28, 1), "synthetic": (32, 32, 3)}
"""(H, W, C) of the data sets' images."""
MEASURING = 60.0
"""Seconds for measuring a network's convolutions, when that is what was asked for."""


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
        raise DataError(run, "no checkpoint yet", "wait for the first epoch, or resume the run")
    return job, found


def evaluate(run: str, *, which: Which, path: str | None, say: Any) -> dict[str, Any]:
    """Accuracy, loss and AUC of a run's network on the test samples of its data set, or of another.

    AUC: of each class against the rest, the mean over the classes; None where there is only one.
    """
    job, checkpoint = load(run, which, say)
    dataset = open_dataset(path or job.data.path or "", limit=None if path else job.data.limit)
    classifier = to_classifier(checkpoint, job)
    if (dataset.shape, dataset.classes) != (classifier.facts.shape, classifier.classes):
        raise DataError(
            dataset.path, f"other images or classes than {run} was trained on", "give a data set like its own"
        )
    replica = Replica(job, dataset, Device.of("cpu", threads=cpu_count()), clock=time.perf_counter)
    replica.adopt(to_state(checkpoint, job).weights)
    samples = len(dataset.test)
    with single_threaded_blas():
        score = replica.evaluate(dataset.test, 0, samples, whole=samples)
    return {
        "run": run,
        "checkpoint": str(checkpoint.path),
        "data": dataset.path,
        "samples": score.samples,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "auc": score.judged.auc,
    }


def readable_evaluation(result: dict[str, Any]) -> str:
    auc = "-" if result["auc"] is None else f"{result['auc']:.4f}"
    return (
        f"accuracy {100 * result['accuracy']:.2f} %, loss {result['loss']:.4f}, AUC {auc} "
        f"on {result['samples']:,} test samples of {result['data']}\ncheckpoint {result['checkpoint']}"
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
        raise DataError(path, f"too large for an image to look at ({error})", "scale it down first") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(path, f"not an image that can be read ({error})", "give a PNG or JPEG file") from error
    return np.asarray(plain, np.uint8).reshape(H, W, C)


def readable_predictions(results: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"{r['image']}: " + ", ".join(f"{c['class']} {100 * c['probability']:.1f} %" for c in r["classes"])
        for r in results
    )


def plan_conv(model: str, *, batch: int, images: str, dtype: str, device: Device, measure: bool) -> dict[str, Any]:
    """How each convolution of a network would be computed on this machine, and how else; measured first if asked.

    Raises UserError for an unknown network, for images it does not take, and for a layer that does not fit the limit.
    """
    try:
        if model_problem(model):
            raise ValueError(f"model {model!r}: no name, nor C1:C2 such as 50:500{nearest(model, MODELS)}")
        network = build_model(model, None, _image_shape(images), 10)
        specs = convolutions(network, _image_shape(images), batch, dtype)
        if measure:
            with single_threaded_blas():
                tune([spec for _, spec in specs], device, clock=time.perf_counter, seconds=MEASURING, anew=True)
        layers = [_planned(name, spec, device, need_dx=i > 0) for i, (name, spec) in enumerate(specs)]
    except ValueError as error:
        raise UserError(f"plan-conv: {error}") from error
    means = {"device": device.backend.name, "threads": device.pool.threads, "workspace_limit": device.workspace_limit}
    return {"model": model, "batch": batch, "dtype": dtype, **means, "layers": layers}


def _image_shape(images: str) -> tuple[int, int, int]:
    """(H, W, C) of a data set's name or of HxWxC. Raises ValueError for anything else."""
    if images in IMAGES:
        return IMAGES[images]
    if not (match := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", images)):
        raise ValueError(f"dataset {images!r}: write HxWxC, such as 32x32x3, or a name{nearest(images, IMAGES)}")
    H, W, C = map(int, match.groups())
    return H, W, C


def _planned(name: str, spec: ConvSpec, device: Device, *, need_dx: bool) -> dict[str, Any]:
    chosen = plan(spec, device, need_dx=need_dx)
    return {
        "layer": name,
        "spec": asdict(spec),
        "algorithm": chosen.algorithm,
        "why": chosen.reason,
        "measured": chosen.measured,
        "seconds": chosen.seconds,
        "gflops_per_second": chosen.flops_per_second / 1e9,
        "workspace": chosen.workspace,
        "candidates": [_candidate(c, need_dx) for c in candidates(spec, device, need_dx=need_dx)],
    }


def _candidate(c: Candidate, need_dx: bool) -> dict[str, Any]:
    measured = c.measured and c.measured.step(need_dx)
    return {
        "algorithm": c.name,
        "workspace": c.workspace,
        "predicted": c.predicted.step(need_dx),
        "measured": measured,
    }


def readable_conv_plans(result: dict[str, Any]) -> str:
    """A line a convolution, under it why, and the seconds a training step would take otherwise."""
    rows = [("layer", "convolution", "algorithm", "step", "GFLOP/s", "workspace"), *map(_row, result["layers"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    limit = result["workspace_limit"] / 2**20
    head = (
        f"{result['model']}, batch {result['batch']}, {result['dtype']}, on {result['device']}: "
        f"threads {result['threads']}, workspace up to {limit:,.0f} MiB"
    )
    for i in range(len(result["layers"]), 0, -1):
        lines[i + 1 : i + 1] = [f"{'':<{widths[0]}}  {line}" for line in _reasons(result["layers"][i - 1])]
    return "\n".join([head, "", *lines])


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    s = layer["spec"]
    stride = "" if tuple(s["stride"]) == (1, 1) else f" stride {s['stride'][0]}"
    return (
        layer["layer"],
        f"{s['R']}×{s['S']} {s['C']}→{s['K']} on {s['H']}×{s['W']}{stride}",
        layer["algorithm"],
        readable(layer["seconds"]),
        f"{layer['gflops_per_second']:.0f}",
        f"{layer['workspace'] / 2**20:.1f} MiB",
    )


def _reasons(layer: dict[str, Any]) -> list[str]:
    others = [c for c in layer["candidates"] if c["algorithm"] != layer["algorithm"]]
    return [layer["why"], *([f"others: {', '.join(map(_alternative, others))}"] if others else [])]


def _alternative(c: dict[str, Any]) -> str:
    kind = "predicted" if c["measured"] is None else "measured"
    return f"{c['algorithm']} {readable(c[kind])} ({kind})"
