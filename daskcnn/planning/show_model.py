"""What networks are made of: `daskcnn model`, `daskcnn models`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.errors import UserError, nearest
from daskcnn.job.resolve import resolve
from daskcnn.job.sources import read_job_file
from daskcnn.job.tables import BUILT_IN
from daskcnn.nn import Sequential, Shape, build_model, model_problem, sequential_from_spec, summarise
from daskcnn.nn.models import MODELS
from daskcnn.planning.plan_conv import image_shape
from daskcnn.show.network_drawing import draw_network, drawn
from daskcnn.show.network_text import times

_USUAL = (32, 32, 3), 10
"""Images and classes of networks that are not described for any."""


def named_models() -> list[dict[str, Any]]:
    """All named models with their usual images: name, image, classes, parameters, operations, origin."""
    rows = []
    for name, model in MODELS.items():
        layers = summarise(_named(name, model.image, model.classes), model.image)
        rows.append(
            {
                "name": name,
                "image": model.image,
                "classes": model.classes,
                "parameters": sum(row.parameters for row in layers),
                "forward": sum(row.forward for row in layers),
                "origin": model.origin,
            }
        )
    return rows


def show_model(
    model: str, *, images: str | None, classes: int | None, batch: int, picture: str | None
) -> dict[str, Any]:
    """The table of a network by name, or of a job file's, for a batch: layers, shapes, parameters, operations, memory.

    images: a data set, or HxWxC; the network's usual ones by default. picture: a file to draw it into, SVG or PNG.
    Raises UserError for an unknown network, and for images or classes that it does not take.
    """
    if picture is not None and Path(picture).suffix not in (".svg", ".png"):
        raise UserError(picture, "pictures are SVG or PNG", "give a file that ends in .svg or .png")
    try:
        network, shape, dtype = _network(model, images, classes)
        rows = summarise(network, shape)
    except ValueError as error:
        raise UserError(f"model {model}: {error}") from error
    itemsize = np.dtype(dtype).itemsize
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


def _network(model: str, images: str | None, classes: int | None) -> tuple[Sequential, Shape, str]:
    """The network, the shape of its images, and its number type."""
    name, relu, dtype = model, True, "float32"
    if model.endswith(".toml"):
        job = resolve(read_job_file(model))
        images = images or job.data.name or job.data.path
        if job.model.layers:
            return sequential_from_spec(job.model.layers), image_shape(images or BUILT_IN), job.model.dtype
        name, relu, dtype = job.model.name or "quick", job.model.relu, job.model.dtype
    if model_problem(name):
        raise ValueError(f"no name, nor C1:C2 such as 50:500, nor a job file that ends in .toml{nearest(name, MODELS)}")
    known = MODELS.get(name)
    image, usual = (known.image, known.classes) if known else _USUAL
    shape = image_shape(images) if images else image
    return _named(name, shape, classes or usual, relu), shape, dtype


def _named(name: str, shape: Shape, classes: int, relu: bool = True) -> Sequential:
    """The network of this name, with the outputs that it is for."""
    reconstructs = name in MODELS and MODELS[name].reconstructs
    return build_model(name, None, shape, classes, relu, reconstructs=reconstructs)
