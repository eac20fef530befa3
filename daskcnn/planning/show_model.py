"""The plan of a network's convolutions on this machine (`daskcnn plan-conv`), and its layers (`daskcnn model`)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Device, keep_freed_memory, release_freed_memory, single_threaded_blas
from daskcnn.conv import ConvSpec, plan
from daskcnn.conv.planner import candidates
from daskcnn.conv.tuner import tune
from daskcnn.errors import UserError, nearest
from daskcnn.job.data_table import BUILT_IN
from daskcnn.job.network import convolutions, network_of
from daskcnn.job.resolve import read_job_file, resolve
from daskcnn.nn import Sequential, Shape, build_model, model_problem, sequential_from_spec, summarise
from daskcnn.nn.models import MODELS, model_spec
from daskcnn.show.renderers.network_drawing import draw_network, drawn
from daskcnn.show.renderers.network_text import times
from daskcnn.store import DATASETS, open_dataset

MEASURING = 60.0
"""The most seconds for measuring a network's convolutions."""
BATCH = 128
"""Samples of a minibatch, where no job says how many."""
SINGLE = "conv"
"""The model of a single convolution, by the layer's own options."""


def plan_conv(
    model: str,
    *,
    batch: int,
    images: str,
    dtype: str,
    device: Device,
    measure: bool,
    layer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Plan each convolution of a network on this machine, with the other candidates.

    measure: whether the candidates are measured first. layer: options of the layer `conv`, for the model "conv". Raises
    UserError for an unknown network, images that it does not take, wrong options, or a layer that exceeds the limit.
    """
    try:
        network = _conv_network(model, image_shape(images), layer or {})
        specs = convolutions(network, image_shape(images), batch, dtype)
        if not specs:
            raise ValueError(f"model {model!r}: has no convolutions; name another network")
        if measure:
            _measure([spec for _, spec in specs], device)
        inner = 1 if model != SINGLE else 0  # a network's first layer needs no gradient of its input
        layers = [_planned(name, spec, device, need_dx=i >= inner) for i, (name, spec) in enumerate(specs)]
    except ValueError as error:
        raise UserError(f"plan-conv: {error}") from error
    means = {"device": device.backend.name, "threads": device.pool.threads, "workspace_limit": device.workspace_limit}
    return {"model": model, "batch": batch, "dtype": dtype, **means, "layers": layers}


def _measure(specs: list[ConvSpec], device: Device) -> None:
    """Measure with freed memory kept, as in a run, which uses these times."""
    keep_freed_memory()
    try:
        with single_threaded_blas():
            tune(specs, device, clock=time.perf_counter, seconds=MEASURING, anew=True)
    finally:
        release_freed_memory()


def _conv_network(model: str, image: tuple[int, int, int], layer: Mapping[str, Any]) -> Sequential:
    """The network of this name, or one convolution. Raises ValueError."""
    if model == SINGLE:
        return sequential_from_spec([{"layer": SINGLE, **layer}])
    if layer:
        options = ", ".join(f"--{name}" for name in layer)
        raise ValueError(f"{options}: options of a single convolution; write {SINGLE} in place of {model}")
    if model_problem(model):
        raise ValueError(f"model {model!r}: no name, nor C1:C2 such as 50:500{nearest(model, [*MODELS, SINGLE])}")
    return sequential_from_spec(model_spec(model, image, 10))


def image_shape(images: str) -> tuple[int, int, int]:
    """(H, W, C) of a data set's name, of a prepared one, or of HxWxC. Raises ValueError for anything else."""
    if images in DATASETS:
        return DATASETS[images].shape
    if "://" in images or Path(images).exists():
        return open_dataset(images).shape
    if not (match := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", images)):
        known = nearest(images, DATASETS)
        raise ValueError(f"dataset {images!r}: write HxWxC, such as 32x32x3, a path or a name{known}")
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
        "candidates": [
            {
                "algorithm": each.name,
                "workspace": each.workspace,
                "predicted": each.predicted.step(need_dx),
                "measured": each.measured and each.measured.step(need_dx),
            }
            for each in candidates(spec, device, need_dx=need_dx)
        ],
    }


def named_models() -> list[dict[str, Any]]:
    """All named models with their usual images: name, image, classes, parameters, operations, origin."""
    models = []
    for name, model in MODELS.items():
        rows = summarise(_named(name, model.image, model.classes), model.image)
        sums = {"parameters": sum(row.parameters for row in rows), "forward": sum(row.forward for row in rows)}
        models.append({"name": name, "image": model.image, "classes": model.classes, **sums, "origin": model.origin})
    return models


def show_model(
    model: str, *, images: str | None, classes: int | None, batch: int | None, picture: str | None
) -> dict[str, Any]:
    """The table of a network, by name or of a job file: layers, shapes, parameters, operations, memory of a batch.

    images: a data set, or HxWxC; by default the job's own, or the network's usual ones. batch: that of the job, or 128,
    by default. picture: a file to draw it into, SVG or PNG. Raises UserError for an unknown network, and for images or
    classes that it does not take.
    """
    if picture is not None and Path(picture).suffix not in (".svg", ".png"):
        raise UserError(picture, "pictures are SVG or PNG", "give a file that ends in .svg or .png")
    try:
        network, shape, dtype, usual = _network(model, images, classes)
        rows = summarise(network, shape)
    except ValueError as error:
        raise UserError(f"model {model}: {error}") from error
    itemsize, batch = np.dtype(dtype).itemsize, batch or usual
    if picture is not None:
        draw_network(drawn(network, shape), f"{Path(model).stem} for images of {times(shape)}", Path(picture))
    return {
        "model": model,
        "image": shape,
        "batch": batch,
        "dtype": dtype,
        "picture": picture,
        "layers": [asdict(row) | {"memory": row.outputs * batch * itemsize} for row in rows],
    }


def _network(model: str, images: str | None, classes: int | None) -> tuple[Sequential, Shape, str, int]:
    """The network, the shape of its images, its dtype, and the usual samples of a minibatch."""
    name, relu, dtype, batch = model, True, "float32", BATCH
    if model.endswith(".toml"):
        job = resolve(read_job_file(model))
        from daskcnn.datasets.job_dataset import is_missing  # both are slow to import
        from daskcnn.planning.simulate import on_own_images

        there = job.data.name in DATASETS or not is_missing(job.data)
        if there and images is None and classes is None:  # as it will train
            job, own, _ = on_own_images(job)
            return network_of(job, own), own.shape, job.model.dtype, job.train.batch_size
        images, batch = images or job.data.name or job.data.path, job.train.batch_size
        if job.model.layers:
            return sequential_from_spec(job.model.layers), image_shape(images or BUILT_IN), job.model.dtype, batch
        name, relu, dtype = job.model.name or "quick", job.model.relu, job.model.dtype
    if model_problem(name):
        raise ValueError(f"no name, nor C1:C2 such as 50:500, nor a job file that ends in .toml{nearest(name, MODELS)}")
    known = MODELS.get(name)
    image, usual = (known.image, known.classes) if known else ((32, 32, 3), 10)
    shape = image_shape(images) if images else image
    return _named(name, shape, classes or usual, relu), shape, dtype, batch


def _named(name: str, shape: Shape, classes: int, relu: bool = True) -> Sequential:
    """The network of this name; an autoencoder's outputs are images."""
    reconstructs = name in MODELS and MODELS[name].reconstructs
    return build_model(name, None, shape, classes, relu, reconstructs=reconstructs)
