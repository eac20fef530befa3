"""Scores of an image from several views of it: mirrored, and shifted by a pixel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Literal, TypeAlias

import numpy as np

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Shape, State
from daskcnn.nn.network import predict

Views: TypeAlias = Literal["none", "mirror", "mirror-translate"]


def predict_views(model: Layer, params: Params, state: State, x: Array, ctx: Context, views: Views) -> Array:
    """Return the mean scores (N, classes), on the device, over the views of a host batch x (H, W, N, C).

    `mirror` is the mean of the image and its mirror image. `mirror-translate` gives half of the weight to these two and
    half to both after a shift by one pixel to the upper left and to the lower right, where pixels at the edges are
    mirrored: 2 views of weight 1/4 and 4 of 1/8 (airbench94, Jordan 2024). Scores are averaged, not probabilities.
    """
    if views == "none":
        return predict(model, params, state, x, ctx)
    weighed = (predict(model, params, state, view, ctx) * x.dtype.type(part) for view, part in weighted_views(x, views))
    return reduce(add, weighed)


def weighted_views(x: Array, views: Views) -> Iterator[tuple[Array, float]]:
    """Yield each view of a host batch x (H, W, N, C) with its weight; the weights add up to 1."""
    if views == "none":
        yield x, 1.0
        return
    part = 1 / 2 if views == "mirror" else 1 / 4
    yield from _both_ways(x, part)
    if views == "mirror-translate":
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0), (0, 0)), "reflect")
        for shifted in (padded[:-2, :-2], padded[2:, 2:]):
            yield from _both_ways(shifted, part / 2)


def _both_ways(x: Array, weight: float) -> Iterator[tuple[Array, float]]:
    yield np.ascontiguousarray(x), weight
    yield np.ascontiguousarray(x[:, ::-1]), weight


def views_problem(views: Views, in_shape: Shape, *, reconstructs: bool = False) -> str | None:
    """Return why a network for images (H, W, C) cannot look at these views of them, None if it can.

    reconstructs: whether it answers an image with an image; the answers to two views show different things.
    """
    H, W = in_shape[:2]
    if reconstructs and views != "none":
        return f"{views!r}: views average scores of classes, and this network reconstructs images; use 'none'"
    if views == "mirror-translate" and min(H, W) < 2:
        return f"{views!r}: images of {H}x{W} have no pixel beside the outermost one to shift by; use 'mirror'"
    return None
