"""The networks that have a name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from daskcnn.errors import similar
from daskcnn.nn.layer import LayerError, Shape, walk
from daskcnn.nn.layers.auxiliary import Auxiliary
from daskcnn.nn.models.networks import (
    CASES,
    NamedModel,
    Spec,
    alexnet,
    fast,
    googlenet,
    lenet5,
    quick,
    resnet_for_photographs,
    resnet_for_small_images,
    sae,
    two_convolutions,
    vgg,
)
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.spec import sequential_from_spec
from daskcnn.nn.whitening import check_whitening

CIFAR10 = (32, 32, 3)
"""Images that Marques et al. train C1:C2 on."""
PHOTOGRAPHS = (224, 224, 3), 1000
"""Images and classes of ImageNet."""

MODELS: Mapping[str, NamedModel] = {
    "quick": NamedModel(quick, "cuda-convnet and Caffe, CIFAR-10"),
    "lenet5": NamedModel(lenet5, "LeCun et al. 1998, Fig. 2", (28, 28, 1)),
    "fast": NamedModel(fast, "airbench94 (Jordan 2024, section 3)"),
    **CASES,
    "sae": NamedModel(sae, "Marques 2016, thesis, appendix A", (28, 28, 1), reconstructs=True),
    "resnet20": NamedModel(resnet_for_small_images(3), "He et al. 2016, section 4.2"),
    "resnet32": NamedModel(resnet_for_small_images(5), "He et al. 2016, section 4.2"),
    "resnet56": NamedModel(resnet_for_small_images(9), "He et al. 2016, section 4.2"),
    "resnet18": NamedModel(resnet_for_photographs((2, 2, 2, 2)), "He et al. 2016, Table 1", *PHOTOGRAPHS),
    "resnet34": NamedModel(resnet_for_photographs((3, 4, 6, 3)), "He et al. 2016, Table 1", *PHOTOGRAPHS),
    "vgg11": NamedModel(vgg("A"), "Simonyan & Zisserman 2015, Table 1, A", *PHOTOGRAPHS),
    "vgg11-bn": NamedModel(vgg("A", batchnorm=True), "the same with batch normalising", *PHOTOGRAPHS),
    "vgg16": NamedModel(vgg("D"), "Simonyan & Zisserman 2015, Table 1, D", *PHOTOGRAPHS),
    "vgg16-bn": NamedModel(vgg("D", batchnorm=True), "the same with batch normalising", *PHOTOGRAPHS),
    "alexnet": NamedModel(alexnet, "Krizhevsky et al. 2012, Fig. 2", *PHOTOGRAPHS),
    "googlenet": NamedModel(googlenet, "Szegedy et al. 2015, Table 1", *PHOTOGRAPHS),
}
"""A new network is a function in a file here, and a line of this."""


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
