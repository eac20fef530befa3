"""The networks that have a name."""

# mypy: implicit-reexport

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from daskcnn.errors import similar
from daskcnn.nn.layer import LayerError, Shape, walk
from daskcnn.nn.layers.auxiliary import Auxiliary
from daskcnn.nn.models.networks import CIFAR10, MODELS, Spec, two_convolutions
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.spec import sequential_from_spec
from daskcnn.nn.whitening import check_whitening


def model_problem(name: str) -> str | None:
    """Return what is wrong with a model's name, None if nothing is."""
    if name in MODELS or _counts(name):
        return None
    known = f"it is one of {', '.join(MODELS)} or C1:C2, such as 50:500"
    return f'model "{name}": there is none of this name{similar(name, MODELS)}; {known}'


def described_for(name: str) -> Shape:
    """Return the shape (H, W, C) of the images that a named network was described for."""
    return MODELS[name].image if name in MODELS else CIFAR10


def _counts(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"([1-9]\d{0,4}):([1-9]\d{0,4})", name)
    return (int(match[1]), int(match[2])) if match else None


def model_spec(name: str, in_shape: Shape, classes: int, *, relu: bool = True) -> Spec:
    """Return the layers of a named model. Raises ValueError for an unknown name."""
    if problem := model_problem(name):
        raise ValueError(problem)
    if counts := _counts(name):
        return two_convolutions(*counts, classes, relu=relu)
    return MODELS[name].layers(in_shape, classes)


def build_model(
    name: str | None,
    layers: Sequence[Mapping[str, Any]] | None,
    in_shape: Shape,
    classes: int,
    relu: bool = True,
    *,
    reconstructs: bool = False,
) -> Sequential:
    """Return the network of this name, or of these layers, for images (H, W, C) and this number of classes.

    Raises ValueError for an unknown name, a wrong layer, a layer that does not fit the images, or a number of
    outputs that differs from the number of classes; of a network that `reconstructs` images, from theirs. `relu`
    matters to C1:C2 only.
    """
    if (name is None) == (layers is None):
        raise ValueError(f"model name={name!r} and layers={layers!r}: give one of the two")
    model = sequential_from_spec(model_spec(name, in_shape, classes, relu=relu) if name is not None else layers or [])
    check_whitening(model, in_shape)
    if problem := _of_output(model.out_shape(in_shape), in_shape, classes, reconstructs):
        raise ValueError(f"the model's output is {problem}")
    for path, layer, shape in walk(model, in_shape, composite=True):
        if isinstance(layer, Auxiliary) and (
            problem := _of_output(layer.scores_shape(shape), in_shape, classes, reconstructs)
        ):
            raise LayerError(path, f"its path's output is {problem}")
    return model


def _of_output(out: Shape, image: Shape, classes: int, reconstructs: bool) -> str | None:
    """Return what is wrong with scores of this shape, and the remedy."""
    values = prod(image)
    of_image = out in (image, (values,))
    if reconstructs:
        ending = f"end it with a map of that shape, or with a dense layer of {values} units"
        return None if of_image else f"{out}, and the loss compares it with images {image}: {ending}"
    if out == (classes,):
        return None
    other = "; or set train.loss = 'reconstruction'" if of_image else ""
    return f"{out}, of {classes} classes: end it with a dense layer of {classes} units{other}"
