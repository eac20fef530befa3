"""Scores over views of an image: which views, with which weight, and that it is scores that are averaged."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.nn import Context, build_model, init_network, map_leaves, predict
from daskcnn.nn.network import Views, predict_views, views_problem, weighted_views
from tests.nn.nn_cases import values

LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3},
    {"layer": "tanh"},
    {"layer": "dense", "units": 3},
]
SHAPE = (5, 7, 2)
names = pytest.mark.parametrize("views", get_args(Views))


@names
def test_weights_of_views_add_up_to_one(views: Views, rng: np.random.Generator) -> None:
    weights = [weight for _, weight in weighted_views(values(rng, (5, 7, 3, 2)), views)]
    assert sum(weights) == 1
    assert sorted(weights) == {"none": [1], "mirror": [0.5] * 2, "mirror-translate": [0.125] * 4 + [0.25] * 2}[views]


def test_views_are_the_image_mirrored_and_shifted_both_ways(rng: np.random.Generator) -> None:
    x = values(rng, (5, 7, 3, 2))
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0), (0, 0)), "reflect")
    expected = [image for plain in (x, padded[:5, :7], padded[2:, 2:]) for image in (plain, plain[:, ::-1])]
    for (view, _), image in zip(weighted_views(x, "mirror-translate"), expected, strict=True):
        np.testing.assert_array_equal(view, image)
        assert view.flags.c_contiguous


@names
def test_the_scores_of_all_views_are_averaged(views: Views, device: Device, rng: np.random.Generator) -> None:
    model, x = build_model(None, LAYERS, SHAPE, 3), values(rng, (5, 7, 4, 2))
    params, state = init_network(model, 0, SHAPE, "float64")
    there, ctx = map_leaves(device.backend.from_host, params), Context(device)
    found = device.backend.to_host(predict_views(model, there, state, x, ctx, views))
    each = [w * predict(model, params, state, view, Context(Device())) for view, w in weighted_views(x, views)]
    np.testing.assert_allclose(found, np.sum(each, axis=0), rtol=1e-10, atol=1e-12)
    mirrored = device.backend.to_host(predict_views(model, there, state, np.ascontiguousarray(x[:, ::-1]), ctx, views))
    assert np.allclose(found, mirrored) == (views == "mirror")  # shifts go along one diagonal


def test_images_of_a_row_cannot_be_shifted() -> None:
    assert views_problem("mirror-translate", (1, 8, 3)) == (
        "'mirror-translate': images of 1x8 have no pixel beside the outermost one to shift by; use 'mirror'"
    )
    assert views_problem("mirror-translate", (2, 8, 3)) is None
    assert views_problem("mirror", (1, 8, 3)) is None
