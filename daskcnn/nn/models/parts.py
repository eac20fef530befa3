"""Entries of a list of layers, as builders of networks write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daskcnn.nn.layer import Shape

Spec = list[dict[str, Any]]
Builder = Callable[[Shape, int], Spec]
"""(in_shape, classes) -> the layers."""

LARGE = 64
"""Rows or columns from which networks for photographs keep the strides of their first layers."""


@dataclass(frozen=True)
class NamedModel:
    """A network that has a name.

    Attributes
    ----------
    layers : makes its list of layers
    origin : where it is from
    image, classes : what it was described for: the usual shape (H, W, C) and number of classes
    reconstructs : whether it answers images with images
    """

    layers: Builder
    origin: str
    image: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    reconstructs: bool = False


def conv(kernels: int, size: int, **options: Any) -> dict[str, Any]:
    """A convolution."""
    return {"layer": "conv", "kernels": kernels, "size": size, **options}


def normalised(kernels: int, size: int, **options: Any) -> Spec:
    """A convolution without bias, and batch normalising."""
    return [conv(kernels, size, bias=False, **options), *only("batchnorm")]


def dense(units: int) -> dict[str, Any]:
    """A fully connected layer."""
    return {"layer": "dense", "units": units}


def pool(kind: str, size: int = 2, stride: int = 2) -> dict[str, Any]:
    """A pooling layer."""
    return {"layer": kind, "size": size} | ({"stride": stride} if stride != size else {})


def only(kind: str, **options: Any) -> Spec:
    """A list of one layer."""
    return [{"layer": kind, **options}]


def is_large(in_shape: Shape) -> bool:
    """Whether images are as large as photographs."""
    return min(in_shape[:2]) >= LARGE
