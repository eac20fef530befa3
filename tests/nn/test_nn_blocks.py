"""Passes over maps and vectors in blocks: the same numbers as in one piece."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import MAP, NESTED, example, in_blocks, values

from daskcnn.arrays import Device
from daskcnn.nn import SGD, Context, Layout, vector
from daskcnn.nn.channels import add_to_channels, channel_sum
from daskcnn.nn.layers import Dense, dense

SHAPES = [(5, 3, 4, 6), (7, 2)]


@pytest.mark.parametrize("options", [(0.0,), (0.9,), (0.9, True), (0.9, True, 1e-3), (0.0, False, 1e-3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_descent_in_blocks_gives_the_same_bits(options, threads, rng):
    whole = [values(rng, 1001, "float32") for _ in range(3)]
    parts = [v.copy() for v in whole]
    SGD(*options).step(*whole, 0.1)
    SGD(*options).step(*parts, 0.1, in_blocks(100, threads))
    np.testing.assert_equal(parts, whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_channels_are_summed_and_added_to_on_every_device(shape, device, rng):
    x, extra = values(rng, shape), values(rng, shape[-1])
    move, host = device.backend.from_host, device.backend.to_host
    np.testing.assert_allclose(host(channel_sum(move(x), device)), channel_sum(x), rtol=1e-12)
    for given in ({}, {"device": device}):
        moved = move(x.copy())
        assert np.shares_memory(host(moved), host(add_to_channels(device.xp, moved, move(extra), **given))) or (
            device.backend.name != "numpy"
        )
        np.testing.assert_allclose(host(moved), x + extra)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_channels_are_summed_and_added_to_in_blocks(shape, threads, rng):
    x, extra, device = values(rng, shape), values(rng, shape[-1]), in_blocks(20, threads)
    np.testing.assert_allclose(channel_sum(x, device), channel_sum(x), rtol=1e-12)
    np.testing.assert_array_equal(add_to_channels(np, x.copy(), extra, device), x + extra)


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_sums_do_not_depend_on_threads(shape, rng):
    x = values(rng, shape, "float32")
    np.testing.assert_array_equal(*(channel_sum(x, in_blocks(100, t)) for t in (1, 3)))


@pytest.mark.parametrize("threads", [1, 2])
def test_large_gradients_are_flattened_on_threads(threads, monkeypatch):
    monkeypatch.setattr(vector, "_LARGE", 1)
    params, state, _, _, _ = example(NESTED, MAP, Device())
    layout = Layout.of(params, state)
    device = Device.of("cpu", threads=threads)
    np.testing.assert_array_equal(layout.flatten(params, state, device=device), layout.flatten(params, state))


@pytest.mark.parametrize("features", [12, 13, 1])
def test_dense_layers_on_long_vectors_go_in_pieces(features, monkeypatch, rng):
    monkeypatch.setattr(dense, "_PIECE", 4)
    layer, ctx = Dense(5), Context(in_blocks(100, threads=2), training=True)
    params, _, _ = layer.init(rng, (features,))
    x, dy = values(rng, (3, features)), values(rng, (3, 5))
    y, _, residual = layer.forward(params, {}, x, ctx)
    dx, grads = layer.backward(params, residual, dy, ctx)
    np.testing.assert_allclose(y, x @ params["w"] + params["b"], rtol=1e-12)
    np.testing.assert_allclose(dx, dy @ params["w"].T, rtol=1e-12)
    np.testing.assert_allclose(grads["w"], x.T @ dy, rtol=1e-12)
