"""GoogLeNet (Szegedy et al. 2015, Going deeper with convolutions)."""

from __future__ import annotations

from typing import Any

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Spec, conv, dense, only, pool

MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Table 1: kernels of 1×1, of the reduction before 3×3, 3×3, of the reduction before 5×5, 5×5, and behind the pool."""


def googlenet(in_shape: Shape, classes: int) -> Spec:
    """Table 1 for 224×224 images, with heads behind 4a and 4d in training (section 5).

    Its pools of 3 round map sizes up. Zeros around maps give the same sizes, with windows one pixel further up and
    left. Behind a ReLU zeros change no maximum.
    """

    def modules(*names: str) -> Spec:
        return [inception(*MODULES[name]) for name in names]

    lrn = only("lrn", size=5, alpha=1e-4, beta=0.75, k=1.0)
    return [
        *(*_relu(64, 7, stride=2, pad=3), *_halved(), *lrn),
        *(*_relu(64, 1), *_relu(192, 3, pad=1), *lrn, *_halved()),
        *(*modules("3a", "3b"), *_halved()),
        *(*modules("4a"), _head(classes), *modules("4b", "4c", "4d"), _head(classes), *modules("4e"), *_halved()),
        *modules("5a", "5b"),
        *(*only("globalpool"), *only("dropout", rate=0.4), dense(classes)),
    ]


def inception(one: int, before_three: int, three: int, before_five: int, five: int, behind_pool: int) -> dict[str, Any]:
    """Fig. 2 b: four branches side by side."""
    branches = [
        _relu(one, 1),
        [*_relu(before_three, 1), *_relu(three, 3, pad=1)],
        [*_relu(before_five, 1), *_relu(five, 5, pad=2)],
        [*only("pad", size=1), pool("maxpool", 3, 1), *_relu(behind_pool, 1)],
    ]
    return {"layer": "branches", "branches": branches}


def _head(classes: int) -> dict[str, Any]:
    """Section 5: a smaller network of its own, whose loss counts 0.3 times."""
    hidden = [dense(1024), *only("relu"), *only("dropout", rate=0.7), dense(classes)]
    return {"layer": "auxiliary", "weight": 0.3, "path": [pool("averagepool", 5, 3), *_relu(128, 1), *hidden]}


def _relu(kernels: int, size: int, **options: int) -> Spec:
    return [conv(kernels, size, **options), *only("relu")]


def _halved() -> Spec:
    return [*only("pad", size=1), pool("maxpool", 3)]
