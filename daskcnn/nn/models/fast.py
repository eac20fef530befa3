"""The network of airbench94 (Jordan 2024, 94 % on CIFAR-10 in 3.29 seconds on a single GPU, section 3)."""

from __future__ import annotations

from typing import Any

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Spec, conv, only, pool

_KERNELS = (64, 256, 256)
_PATCH = 2
_SCALE = 1 / 9
"""Factor of the scores, the paper's."""


def fast(in_shape: Shape, classes: int) -> Spec:
    """Whitening 2×2 kernels, three blocks of two 3×3 convolutions, and scaled scores.

    Convolutions begin as the identity on the channels that come in; their other kernels, and the weights of the scores,
    are drawn as PyTorch draws them. Normalising shifts but does not scale.
    """
    layers = [conv(2 * _PATCH**2 * in_shape[-1], _PATCH, initial="whitening"), *only("gelu")]
    for kernels in _KERNELS:
        layers += [_convolution(kernels), pool("maxpool"), *_normalised(), _convolution(kernels), *_normalised()]
    scores = {"layer": "dense", "units": classes, "bias": False, "initial": "uniform"}
    return [*layers, pool("maxpool", 3, 3), scores, *only("scale", factor=_SCALE)]


def _convolution(kernels: int) -> dict[str, Any]:
    return conv(kernels, 3, pad=1, bias=False, initial="dirac")


def _normalised() -> Spec:
    return [*only("batchnorm", scale=False, momentum=0.4, epsilon=1e-12), *only("gelu")]
