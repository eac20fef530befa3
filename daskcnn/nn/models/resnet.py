"""Residual networks (He et al. 2016, Deep residual learning for image recognition)."""

from __future__ import annotations

from functools import partial

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Builder, Spec, dense, is_large, normalised, only, pool


def for_small_images(blocks: int) -> Builder:
    """Section 4.2: 6·blocks + 2 layers, three stages of 16, 32 and 64 kernels, shortcuts without parameters (A)."""
    return partial(_small, blocks)


def for_photographs(blocks: tuple[int, int, int, int]) -> Builder:
    """Table 1: four stages of 64 to 512 kernels, with projections (B). Small images keep their size at first.

    blocks: of each stage.
    """
    return partial(_large, blocks)


def _small(blocks: int, in_shape: Shape, classes: int) -> Spec:
    layers = [*normalised(16, 3, pad=1), *only("relu")]
    before = 16
    for kernels in (16, 32, 64):
        for i in range(blocks):
            halved = i == 0 and kernels > before
            shortcut = [pool("maxpool", 1), *only("pad", channels=kernels - before)] if halved else []
            layers += _basic(kernels, 2 if halved else 1, shortcut)
        before = kernels
    return [*layers, *only("globalpool"), dense(classes)]


def _large(blocks: tuple[int, int, int, int], in_shape: Shape, classes: int) -> Spec:
    if is_large(in_shape):
        layers = [*normalised(64, 7, stride=2, pad=3), *only("relu"), *only("pad", size=1), pool("maxpool", 3)]
    else:
        layers = [*normalised(64, 3, pad=1), *only("relu")]
    before = 64
    for kernels, count in zip((64, 128, 256, 512), blocks, strict=True):
        for i in range(count):
            halved = i == 0 and kernels > before
            shortcut = normalised(kernels, 1, stride=2) if halved else []
            layers += _basic(kernels, 2 if halved else 1, shortcut)
        before = kernels
    return [*layers, *only("globalpool"), dense(classes)]


def _basic(kernels: int, stride: int, shortcut: Spec) -> Spec:
    """Fig. 2: two 3×3 convolutions beside a shortcut, which is the input where it is empty."""
    first = [*normalised(kernels, 3, stride=stride, pad=1), *only("relu")]
    path = [*first, *normalised(kernels, 3, pad=1)]
    return [{"layer": "residual", "path": path} | ({"shortcut": shortcut} if shortcut else {}), *only("relu")]
