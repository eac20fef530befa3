"""Passes over maps and vectors in blocks: the same numbers as in one piece."""

from __future__ import annotations

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.nn import Context, Layout, Shape, vector
from daskcnn.nn.layers import Dense, dense
from daskcnn.nn.scaled import channel_sum
from tests.nn.nn_cases import MAP, NESTED, example, in_blocks, values

SHAPES = [(5, 3, 4, 6), (7, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_channels_are_summed_on_every_device(shape: Shape, device: Device, rng: np.random.Generator) -> None:
    x = values(rng, shape)
    total = device.backend.to_host(channel_sum(device.backend.from_host(x), device))
    np.testing.assert_allclose(total, channel_sum(x, Device()), rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_channels_are_summed_in_blocks(shape: Shape, threads: int, rng: np.random.Generator) -> None:
    x = values(rng, shape)
    np.testing.assert_allclose(channel_sum(x, in_blocks(20, threads)), channel_sum(x, Device()), rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_sums_do_not_depend_on_threads(shape: Shape, rng: np.random.Generator) -> None:
    x = values(rng, shape, "float32")
    alone, together = (channel_sum(x, in_blocks(100, threads)) for threads in (1, 3))
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_gradients_are_flattened_on_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_LARGE", 1)
    params, state, _, _, _ = example(NESTED, MAP, Device())
    layout = Layout.of(params, state)
    device = Device.of("cpu", threads=threads)
    np.testing.assert_array_equal(layout.flatten(params, state, device=device), layout.flatten(params, state))


@pytest.mark.parametrize("features", [12, 13, 1])
def test_dense_layers_on_long_vectors_go_in_pieces(
    features: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(dense, "_PIECE", 4)
    layer, ctx = Dense(5), Context(in_blocks(100, threads=2), training=True)
    params, _, _ = layer.init(rng, (features,))
    x, dy = values(rng, (3, features)), values(rng, (3, 5))
    y, _, residual = layer.forward(params, {}, x, ctx)
    dx, grads = layer.backward(params, residual, dy, ctx)
    assert dx is not None
    np.testing.assert_allclose(y, x @ params["w"] + params["b"], rtol=1e-12)
    np.testing.assert_allclose(dx, dy @ params["w"].T, rtol=1e-12)
    np.testing.assert_allclose(grads["w"], x.T @ dy, rtol=1e-12)
