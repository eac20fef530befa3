"""The networks of the papers that daskcnn implements."""

from __future__ import annotations

from functools import partial

from daskcnn.nn.layer import Shape
from daskcnn.nn.models.parts import Builder, NamedModel, Spec, conv, dense, only, pool

_CASES = (
    (2, 4, 3, 500),
    (4, 4, 3, 1000),
    (6, 8, 5, 1500),
    (8, 8, 5, 1500),
    (8, 10, 7, 2000),
    (10, 10, 7, 2000),
    (10, 12, 7, 2000),
)
"""BPT-CNN, Table 2: convolutions, filters of each, fully connected layers, neurons of each."""
_SMALLEST = 4
"""Rows or columns of the smallest map that is pooled."""


def two_convolutions(c1: int, c2: int, classes: int, *, relu: bool = True) -> Spec:
    """The network of Marques et al. with c1 and c2 kernels.

    Without `relu` it has exactly the layers that the paper lists.
    """

    def stage(kernels: int) -> Spec:
        return [conv(kernels, 5, pad=2), *(only("relu") if relu else []), *only("lrn"), pool("maxpool")]

    return [*stage(c1), *stage(c2), dense(classes)]


def case(number: int) -> Builder:
    """The network of BPT-CNN's case 1 to 7.

    The paper names counts only. Convolutions are 3×3 here, every second one is pooled by 2 while maps are larger than
    4×4, and the scores have a layer of their own.
    """
    return partial(_case, _CASES[number - 1])


def _case(scale: tuple[int, int, int, int], in_shape: Shape, classes: int) -> Spec:
    convolutions, filters, hidden, neurons = scale
    layers, side = Spec(), min(in_shape[:2])
    for i in range(convolutions):
        layers += [conv(filters, 3, pad=1), *only("relu")]
        if i % 2 and side > _SMALLEST:
            layers.append(pool("maxpool"))
            side //= 2
    layers += [layer for _ in range(hidden) for layer in (dense(neurons), *only("relu"))]
    return [*layers, dense(classes)]


CASES = {f"case{i}": NamedModel(case(i), f"BPT-CNN (Chen et al. 2019), Table 2, case {i}") for i in range(1, 8)}
