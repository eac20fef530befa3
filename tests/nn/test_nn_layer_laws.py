"""Laws that every layer keeps, found from the registry."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from daskcnn.arrays import Array, Device
from daskcnn.nn import LAYERS, Context, Layer, Params, Shape, State, leaves, map_leaves
from daskcnn.nn.layers.dense import Bias
from tests.nn.nn_cases import ALL, CASES, example, in_blocks, label
from tests.standin import elsewhere

DTYPES = ["float32", "float64"]
every_layer = pytest.mark.parametrize(("layer", "in_shape"), ALL, ids=label)


def test_every_registered_layer_has_cases() -> None:
    assert CASES.keys() == LAYERS.keys()
    assert all(type(layer) is LAYERS[kind] for kind, cases in CASES.items() for layer, _ in cases)


def numeric_gradient(f: Callable[[], float], array: Array, step: float = 1e-5) -> Array:
    """Central differences of f() by every entry of the array."""
    gradient, flat = np.empty_like(array), array.reshape(-1)
    for i, value in enumerate(flat):
        flat[i] = value + step
        above = f()
        flat[i] = value - step
        gradient.reshape(-1)[i] = (above - f()) / (2 * step)
        flat[i] = value
    return gradient


@pytest.mark.parametrize(("layer", "in_shape"), [*ALL, (Bias(), (3,))], ids=label)
def test_its_numbers_are_known_before_they_are_made(layer: Layer, in_shape: Shape) -> None:
    params, state, _ = layer.init(np.random.default_rng(0), in_shape)
    assert layer.numbers(in_shape) == sum(array.size for tree in (params, state) for _, array in leaves(tree))


@every_layer
def test_gradients_are_the_central_differences(layer: Layer, in_shape: Shape) -> None:
    params, state, x, dy, ctx = example(layer, in_shape, Device())

    def value() -> float:
        return (layer.forward(params, state, x, ctx)[0] * dy).sum()

    _, _, residual = layer.forward(params, state, x, ctx)
    dx, grads = layer.backward(params, residual, dy, ctx)
    np.testing.assert_allclose(dx, numeric_gradient(value, x), rtol=1e-6, atol=1e-8)
    assert [name for name, _ in leaves(grads)] == [name for name, _ in leaves(params)]
    for (name, found), (_, parameter) in zip(leaves(grads), leaves(params), strict=True):
        np.testing.assert_allclose(found, numeric_gradient(value, parameter), rtol=1e-6, atol=1e-8, err_msg=name)


@every_layer
def test_shapes_and_dtype_are_kept(layer: Layer, in_shape: Shape, device: Device) -> None:
    for dtype, training in product(DTYPES, (True, False)):
        params, state, x, dy, ctx = example(layer, in_shape, device, dtype=dtype, training=training)
        move, host = device.backend.from_host, device.backend.to_host
        params, state = map_leaves(move, params), map_leaves(move, state)
        y, new_state, residual = layer.forward(params, state, move(x), ctx)
        *pixels, channels = layer.out_shape(in_shape)
        assert host(y).shape == (*pixels, x.shape[-2], channels)
        assert host(y).dtype == dtype
        assert [(n, host(a).dtype, host(a).shape) for n, a in leaves(new_state)] == [
            (n, np.dtype(dtype), host(a).shape) for n, a in leaves(state)
        ]
        if training:
            dx, grads = layer.backward(params, residual, move(dy), ctx)
            assert host(dx).shape == x.shape
            found = [host(dx), *(host(g) for _, g in leaves(grads))]
            assert {str(a.dtype) for a in found} == {dtype}
            assert [host(g).shape for _, g in leaves(grads)] == [host(p).shape for _, p in leaves(params)]


@every_layer
@elsewhere
def test_devices_agree(layer: Layer, in_shape: Shape, device: Device) -> None:
    params, state, x, dy, ctx = example(layer, in_shape, device)
    reference = passes(layer, params, state, x, dy, replace(ctx, device=Device()))
    move, host = device.backend.from_host, device.backend.to_host
    arrays = (map_leaves(move, params), map_leaves(move, state), move(x), move(dy))
    for found, expected in zip(passes(layer, *arrays, ctx), reference, strict=True):
        np.testing.assert_allclose(host(found), expected, rtol=1e-9, atol=1e-12)


def passes(layer: Layer, params: Params, state: State, x: Array, dy: Array, ctx: Context) -> list[Array]:
    """[y, dx, gradients and new state ...]."""
    y, new_state, residual = layer.forward(params, state, x, ctx)
    dx, grads = layer.backward(params, residual, dy, ctx)
    return [y, dx, *(a for _, a in leaves(grads)), *(a for _, a in leaves(new_state))]


@every_layer
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_is_given_is_not_written_to(layer: Layer, in_shape: Shape, training: bool) -> None:
    params, state, x, dy, ctx = example(layer, in_shape, Device(), training=training)
    given = (params, state, x, dy)
    before = deepcopy(given)
    y, _, residual = layer.forward(params, state, x, ctx)
    y_before = y.copy()
    if training:
        dx, grads = layer.backward(params, residual, dy, ctx)
        np.testing.assert_array_equal(y, y_before)
        for result in (dx, *(g for _, g in leaves(grads))):
            result[...] = np.nan
    y[...] = np.nan  # nor does it share memory with what is returned
    np.testing.assert_equal(given, before)


@every_layer
def test_a_residual_gives_the_same_gradients_twice(layer: Layer, in_shape: Shape) -> None:
    params, state, x, dy, ctx = example(layer, in_shape, Device())
    _, _, residual = layer.forward(params, state, x, ctx)
    first = layer.backward(params, residual, dy, ctx)
    np.testing.assert_equal(layer.backward(params, residual, dy, ctx), first)


@every_layer
def test_blocks_and_threads_change_nothing(layer: Layer, in_shape: Shape) -> None:
    params, state, x, dy, ctx = example(layer, in_shape, Device())
    whole = passes(layer, params, state, x, dy, ctx)
    parts = passes(layer, params, state, x, dy, replace(ctx, device=in_blocks(1, threads=2)))
    for found, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@every_layer
def test_the_number_of_threads_changes_not_one_bit(layer: Layer, in_shape: Shape) -> None:
    params, state, x, dy, ctx = example(layer, in_shape, in_blocks(100))
    one = passes(layer, params, state, x, dy, ctx)
    for threads in (2, 3):
        several = passes(layer, params, state, x, dy, replace(ctx, device=in_blocks(100, threads)))
        np.testing.assert_equal(several, one)


@every_layer
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_samples_output_depends_on_no_other_sample(layer: Layer, in_shape: Shape, training: bool) -> None:
    if training and layer.mixes_samples:
        pytest.skip("batch normalisation in training depends on the batch by design")
    params, state, x, _, ctx = example(layer, in_shape, Device(), N=4, training=training)
    together, _, _ = layer.forward(params, state, x, ctx)
    some = [2, 0]
    assert ctx.keys is not None
    alone, _, _ = layer.forward(params, state, x[..., some, :], replace(ctx, keys=ctx.keys[some]))
    np.testing.assert_allclose(alone, together[..., some, :], rtol=1e-12, atol=1e-15)
