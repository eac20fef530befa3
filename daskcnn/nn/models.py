"""The networks that have a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from daskcnn.nn.layer import Shape
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.spec import sequential_from_spec

Spec = list[dict[str, Any]]
Builder = Callable[[Shape, int], Spec]
"""(in_shape, classes) -> the layers."""


def _conv(kernels: int, pad: int = 2) -> dict[str, Any]:
    return {"layer": "conv", "kernels": kernels, "size": 5, "pad": pad}


def _pool(kind: str) -> dict[str, Any]:
    return {"layer": kind, "size": 2}


def _only(kind: str) -> Spec:
    return [{"layer": kind}]


def quick(in_shape: Shape, classes: int) -> Spec:
    """Three 5×5 convolutions of 32, 32 and 64 kernels, for 32×32 images: "quick" of cuda-convnet and Caffe."""
    return [
        *(_conv(32), _pool("maxpool"), *_only("relu")),
        *(_conv(32), *_only("relu"), _pool("averagepool")),
        *(_conv(64), *_only("relu"), _pool("averagepool")),
        {"layer": "dense", "units": classes},
    ]


def lenet5(in_shape: Shape, classes: int) -> Spec:
    """LeCun et al. 1998, Fig. 2, with plain averages and full connections. 28×28 images are padded to its 32×32."""
    hidden = [layer for units in (120, 84) for layer in ({"layer": "dense", "units": units}, *_only("tanh"))]
    return [
        *(_conv(6, pad=0 if min(in_shape[:2]) >= 32 else 2), *_only("tanh"), _pool("averagepool")),
        *(_conv(16, pad=0), *_only("tanh"), _pool("averagepool")),
        *hidden,
        {"layer": "dense", "units": classes},
    ]


def two_convolutions(c1: int, c2: int, classes: int, *, relu: bool = True) -> Spec:
    """The network of Marques et al. with c1 and c2 kernels.

    Without `relu` it has exactly the layers that the paper lists.
    """

    def stage(kernels: int) -> Spec:
        return [_conv(kernels), *(_only("relu") if relu else []), *_only("lrn"), _pool("maxpool")]

    return [*stage(c1), *stage(c2), {"layer": "dense", "units": classes}]


def sae(in_shape: Shape, classes: int) -> Spec:
    """Stacked autoencoder of sigmoid units: 500, 250 and 10, and back by the same weights, transposed.

    It reconstructs images of pixels between 0 and 1, by the loss `reconstruction`.
    """
    sizes = (prod(in_shape), 500, 250, 10)
    there: Spec = [{"layer": "dense", "units": units} for units in sizes[1:]]
    back: Spec = [{"layer": "dense", "units": sizes[i], "tied": f"dense{i + 1}"} for i in (2, 1, 0)]
    return [layer for dense in (*there, *back) for layer in (dense, *_only("sigmoid"))]


MODELS: Mapping[str, Builder] = {"quick": quick, "lenet5": lenet5, "sae": sae}


def model_problem(name: str) -> str | None:
    """Return what is wrong with a model's name, None if nothing is."""
    if name in MODELS or _counts(name):
        return None
    return f'model "{name}": there is none of this name; it is one of {", ".join(MODELS)} or C1:C2, such as 50:500'


def _counts(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"([1-9]\d{0,4}):([1-9]\d{0,4})", name)
    return (int(match[1]), int(match[2])) if match else None


def model_spec(name: str, in_shape: Shape, classes: int, *, relu: bool = True) -> Spec:
    """Return the layers of a named model. Raises ValueError for an unknown name."""
    if problem := model_problem(name):
        raise ValueError(problem)
    if counts := _counts(name):
        return two_convolutions(*counts, classes, relu=relu)
    return MODELS[name](in_shape, classes)


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
    out, values = model.out_shape(in_shape), prod(in_shape)
    if reconstructs and out not in (in_shape, (values,)):
        raise ValueError(
            f"the model's output is {out}, and the loss compares it with images {in_shape}: end it with a map of that "
            f"shape, or with a dense layer of {values} units"
        )
    if not reconstructs and out != (classes,):
        of_image = "; or set train.loss = 'reconstruction'" if out in (in_shape, (values,)) else ""
        raise ValueError(
            f"the model's output is {out}, of {classes} classes: end it with a dense layer of {classes} units{of_image}"
        )
    return model
