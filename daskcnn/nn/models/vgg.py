"""VGG's networks (Simonyan & Zisserman 2015, Table 1)."""

from __future__ import annotations

from functools import partial
from typing import Literal

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Builder, Spec, conv, dense, is_large, normalised, only, pool

_STAGES = {"A": (1, 1, 2, 2, 2), "D": (2, 2, 3, 3, 3)}
"""Convolutions of each stage, by the table's columns."""


def vgg(column: Literal["A", "D"], *, batchnorm: bool = False) -> Builder:
    """3×3 convolutions of 64 to 512 kernels in five stages. With `batchnorm` each is normalised, without a bias.

    Small images have no hidden layers of 4,096 units.
    """
    return partial(_vgg, _STAGES[column], batchnorm)


def _vgg(stages: tuple[int, ...], batchnorm: bool, in_shape: Shape, classes: int) -> Spec:
    layers: Spec = []
    for kernels, count in zip((64, 128, 256, 512, 512), stages, strict=True):
        for _ in range(count):
            layers += [*(normalised(kernels, 3, pad=1) if batchnorm else [conv(kernels, 3, pad=1)]), *only("relu")]
        layers.append(pool("maxpool"))
    if is_large(in_shape):
        layers += [layer for _ in range(2) for layer in (dense(4096), *only("relu"), *only("dropout", rate=0.5))]
    return [*layers, dense(classes)]
