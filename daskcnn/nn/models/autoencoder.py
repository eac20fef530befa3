"""Networks that reconstruct the images that they are given."""

from __future__ import annotations

from math import prod

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Spec, dense, only


def sae(in_shape: Shape, classes: int) -> Spec:
    """Stacked autoencoder of sigmoid units: 500, 250 and 10, and back by the same weights, transposed.

    It reconstructs images of pixels between 0 and 1, by the loss `reconstruction`.
    """
    sizes = (prod(in_shape), 500, 250, 10)
    there = [dense(units) for units in sizes[1:]]
    back = [dense(sizes[i]) | {"tied": f"dense{i + 1}"} for i in (2, 1, 0)]
    return [layer for each in (*there, *back) for layer in (each, *only("sigmoid"))]
