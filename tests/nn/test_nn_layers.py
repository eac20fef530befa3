"""What each layer computes, by hand and by naive loops; bad hyper-parameters and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Array, Device
from daskcnn.compiled.program import Program
from daskcnn.nn import Context, Layer, Params, Shape, State
from daskcnn.nn.layers import (
    LRN,
    AveragePool,
    BatchNorm,
    Conv,
    Dense,
    Dropout,
    Flatten,
    L2Pool,
    MaxPool,
    ReLU,
    Sigmoid,
)
from tests.nn.nn_cases import example, values


def context(**options: Any) -> Context:
    return Context(Device(), **{"training": True, **options})


def forward(
    layer: Layer, x: Array, params: Params | None = None, state: State | None = None, **options: Any
) -> tuple[Array, State, Any]:
    return layer.forward(params or {}, state or {}, x, context(**options))


def test_convolution_correlates_and_adds_the_bias() -> None:
    x = np.arange(9.0).reshape(3, 3, 1, 1)
    params = {"w": np.array([[1.0, 0], [0, -1]]).reshape(2, 2, 1, 1), "b": np.array([10.0])}
    y, _, _ = forward(Conv(1, 2), x, params)
    np.testing.assert_array_equal(y[..., 0, 0], np.full((2, 2), 6.0))  # 10 + x[i, j] - x[i+1, j+1]


def test_kernel_shards_join_to_the_whole_layer() -> None:
    layer = Conv(5, 3, stride=2, pad=1)
    params, _, x, dy, ctx = example(layer, (6, 5, 3), Device())
    y, _, residual = layer.forward(params, {}, x, ctx)
    dx, grads = layer.backward(params, residual, dy, ctx)
    shards = [slice(0, 2), slice(2, 5)]
    parts = []
    for k in shards:
        own = {name: p[..., k] for name, p in params.items()}
        part, _, kept = layer.forward(own, {}, x, ctx)
        own_dx, own_grads = layer.backward(own, kept, dy[..., k], ctx)
        assert own_dx is not None
        parts.append((part, own_dx, own_grads))
    np.testing.assert_allclose(np.concatenate([p[0] for p in parts], axis=-1), y)
    assert dx is not None
    np.testing.assert_allclose(sum(p[1] for p in parts), dx)
    for name in params:
        np.testing.assert_allclose(np.concatenate([p[2][name] for p in parts], axis=-1), grads[name])


@pytest.mark.parametrize("layer", [Conv(2, 3), Dense(2)])
def test_dx_is_left_out_where_it_is_not_needed(layer: Layer) -> None:
    params, _, x, dy, ctx = example(layer, (4, 4, 2), Device())
    _, _, residual = layer.forward(params, {}, x, ctx)
    dx, grads = layer.backward(params, residual, dy, replace(ctx, need_dx=False))
    assert dx is None
    np.testing.assert_equal(grads, layer.backward(params, residual, dy, ctx)[1])


@pytest.mark.parametrize("units", [6, 64])
def test_dense_on_a_map_is_dense_behind_flatten(units: int) -> None:
    layer, flatten = Dense(units), Flatten()
    params, _, x, dy, ctx = example(layer, (3, 2, 4), Device())
    flat, _, shape = flatten.forward({}, {}, x, ctx)
    vector = {"w": params["w"].reshape(-1, units), "b": params["b"]}
    y, _, residual = layer.forward(params, {}, x, ctx)
    flat_y, _, flat_residual = layer.forward(vector, {}, flat, ctx)
    np.testing.assert_allclose(y, flat_y, rtol=1e-12)
    dx, grads = layer.backward(params, residual, dy, ctx)
    flat_dx, flat_grads = layer.backward(vector, flat_residual, dy, ctx)
    assert dx is not None
    assert flat_dx is not None
    np.testing.assert_allclose(dx, flatten.backward({}, shape, flat_dx, ctx)[0], rtol=1e-12)
    np.testing.assert_allclose(grads["w"].reshape(-1, units), flat_grads["w"], rtol=1e-12)


def test_flatten_gives_rows_columns_channels(rng: np.random.Generator) -> None:
    x = values(rng, (2, 3, 4, 5))
    y, _, _ = forward(Flatten(), x)
    np.testing.assert_array_equal(y, x.transpose(2, 0, 1, 3).reshape(4, -1))


def test_max_pool_gives_the_gradient_to_the_first_of_equal_pixels() -> None:
    x = np.array([[1.0, 2, 7, 7], [2, 2, 7, 7]]).reshape(2, 4, 1, 1)
    layer, ctx = MaxPool(2), context()
    y, _, residual = layer.forward({}, {}, x, ctx)
    dx, _ = layer.backward({}, residual, np.array([3.0, 5.0]).reshape(1, 2, 1, 1), ctx)
    np.testing.assert_array_equal(y.reshape(-1), [2, 7])
    np.testing.assert_array_equal(dx[..., 0, 0], [[0, 3, 5, 0], [0, 0, 0, 0]])


def test_max_pool_knows_every_place_in_a_large_window(device: Device) -> None:
    x, move = np.zeros((17, 17, 2, 1)), device.backend.from_host
    x[16, 16, 0], x[0, 3, 1] = 1, 1
    layer, ctx = MaxPool(17), Context(device, training=True)
    _, _, residual = layer.forward({}, {}, move(x), ctx)
    dx, _ = layer.backward({}, residual, move(np.ones((1, 1, 2, 1))), ctx)
    np.testing.assert_array_equal(device.backend.to_host(dx), x)


@pytest.mark.parametrize(
    ("layer", "of_window"),
    [(MaxPool, np.max), (AveragePool, np.mean), (L2Pool, lambda w, axis: np.sqrt((w**2).sum(axis)))],
)
@pytest.mark.parametrize(("size", "stride"), [(2, None), (3, 2), (2, 3), (3, 1)])
def test_pools_reduce_their_windows(
    layer: type[MaxPool | AveragePool | L2Pool],
    of_window: Callable[..., Array],
    size: int,
    stride: int | None,
    rng: np.random.Generator,
) -> None:
    x, step = values(rng, (7, 8, 2, 3)), stride or size
    y, _, _ = forward(layer(size, stride), x)
    for i, row in enumerate(y):
        for j, found in enumerate(row):
            window = x[i * step : i * step + size, j * step : j * step + size]
            np.testing.assert_allclose(found, of_window(window, axis=(0, 1)))
    assert y.shape[:2] == ((7 - size) // step + 1, (8 - size) // step + 1)


@pytest.mark.parametrize(("size", "shared"), [(1, False), (2, False), (3, True)])
def test_threads_never_add_to_pixels_that_windows_share(size: int, shared: bool) -> None:
    operation = MaxPool(size, 2).operation(context())
    program = Program.of([operation], (9, 9, 32, 64), np.dtype("float32"), 1 << 10, goes_back=True)
    bands = {tuple(part[:2]) for part in program.parts}
    assert len(program.parts) > 8
    assert (len(bands) == 1) == shared


def test_l2_pool_has_no_gradient_at_zero() -> None:
    layer, ctx = L2Pool(2), context()
    _, _, residual = layer.forward({}, {}, np.zeros((2, 2, 1, 1)), ctx)
    dx, _ = layer.backward({}, residual, np.ones((1, 1, 1, 1)), ctx)
    np.testing.assert_array_equal(dx, np.zeros((2, 2, 1, 1)))


@pytest.mark.parametrize(
    "layer", [LRN(), LRN(size=4, alpha=0.3, beta=0.5, k=2), LRN(size=9, alpha=2.0), LRN(size=1 << 31, alpha=1e9)]
)
def test_lrn_is_its_formula(layer: LRN, rng: np.random.Generator) -> None:
    x, C = values(rng, (2, 1, 3, 7)), 7
    y, _, _ = forward(layer, x)
    for c in range(C):
        low, high = max(0, c - layer.size // 2), c + (layer.size - 1) // 2 + 1
        s = layer.k + layer.alpha / layer.size * (x[..., low:high] ** 2).sum(axis=-1)
        np.testing.assert_allclose(y[..., c], x[..., c] / s**layer.beta, rtol=1e-12)


def test_sigmoid_does_not_overflow() -> None:
    y, _, _ = forward(Sigmoid(), np.array([[-1e4, 0, 1e4]], "float32"))
    np.testing.assert_array_equal(y, [[0, 0.5, 1]])


def test_relu_lets_not_a_number_through() -> None:
    assert np.isnan(forward(ReLU(), np.array([[np.nan]]))[0]).all()


def test_batch_norm_in_training_normalises_and_moves_its_statistics(rng: np.random.Generator) -> None:
    layer, x = BatchNorm(epsilon=1e-12), 3 + 2 * values(rng, (4, 3, 5, 2))
    params, state, _ = layer.init(rng, (4, 3, 2))
    y, new, _ = layer.forward(params, state, x, context())
    np.testing.assert_allclose(y.mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=(0, 1, 2)), 1, rtol=1e-9)
    np.testing.assert_allclose(new["mean"], 0.1 * x.mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(new["variance"], 0.9 + 0.1 * x.var(axis=(0, 1, 2), ddof=1))


def test_batch_norm_in_evaluation_uses_its_statistics_and_keeps_them(rng: np.random.Generator) -> None:
    layer, x = BatchNorm(), values(rng, (2, 2, 3, 2))
    params = {"scale": np.array([2.0, 1.0]), "shift": np.array([0.0, 5.0])}
    state = {"mean": np.array([1.0, -1.0]), "variance": np.array([4.0, 0.25])}
    y, new, _ = layer.forward(params, state, x, context(training=False))
    np.testing.assert_allclose(
        y, (x - state["mean"]) / np.sqrt(state["variance"] + 1e-5) * params["scale"] + params["shift"]
    )
    np.testing.assert_equal(new, state)


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 1, 3)])
def test_batch_norm_of_one_number_a_channel_uses_its_statistics(
    shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    """As a fixed layer does, forward and back: a single number has no variance, and would come out as 0."""
    layer, (x, dy) = BatchNorm(), (values(rng, shape) for _ in range(2))
    params = {"scale": np.array([2.0, 1.0, 0.5]), "shift": np.array([0.0, 5.0, 1.0])}
    state = {"mean": np.array([1.0, -1.0, 0.3]), "variance": np.array([4.0, 0.25, 1.0])}
    found, expected = (
        (y, new, *each.backward(params, residual, dy, context()))
        for each in (layer, BatchNorm(fixed=True))
        for y, new, residual in [each.forward(params, state, x, context())]
    )
    np.testing.assert_equal(found, expected)
    assert found[2] is not None
    assert np.abs(found[2]).min() > 0


def test_batch_norm_survives_a_negative_running_variance(rng: np.random.Generator) -> None:
    layer = BatchNorm()
    params, state, _ = layer.init(rng, (2,))
    y, _, _ = layer.forward(
        params, {**state, "variance": np.array([-0.1, 1.0])}, np.ones((1, 2)), context(training=False)
    )
    np.testing.assert_allclose(y, [[1 / np.sqrt(1e-5), 1 / np.sqrt(1 + 1e-5)]])


def test_dropout_keeps_its_rate_and_the_mean() -> None:
    keys = np.arange(64, dtype=np.uint64)
    y, _, _ = forward(Dropout(0.25), np.ones((8, 8, 64, 16)), keys=keys, salt=5)
    np.testing.assert_allclose(np.unique(y), [0, 4 / 3])
    assert abs((y == 0).mean() - 0.25) < 0.005
    for axes in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):  # by channel, sample, row, column
        assert abs((y == 0).mean(axis=axes) - 0.25).max() < 0.05


def test_dropout_differs_by_sample_layer_pixel_and_channel() -> None:
    keys = np.arange(4, dtype=np.uint64)
    x = np.ones((6, 6, 4, 32))
    mask = forward(Dropout(0.5), x, keys=keys, salt=1)[0] > 0
    assert 0.4 < (mask != (forward(Dropout(0.5), x, keys=keys, salt=2)[0] > 0)).mean() < 0.6
    for axis in range(4):
        assert 0.4 < (mask != np.roll(mask, 1, axis)).mean() < 0.6


def test_dropout_of_the_first_channels_does_not_depend_on_the_others() -> None:
    keys = np.arange(3, dtype=np.uint64)
    wide, _, _ = forward(Dropout(0.5), np.ones((4, 4, 3, 8)), keys=keys)
    narrow, _, _ = forward(Dropout(0.5), np.ones((2, 3, 3, 5)), keys=keys)
    np.testing.assert_array_equal(narrow, wide[:2, :3, :, :5])


def test_dropout_outside_training_is_the_identity(rng: np.random.Generator) -> None:
    x = values(rng, (2, 3))
    np.testing.assert_array_equal(forward(Dropout(0.5), x, training=False)[0], x)


def test_dropout_without_keys_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"keys=None.*give them"):
        forward(Dropout(0.5), np.ones((2, 3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv(0, 3), "kernels=0.*at least 1"),
        (lambda: Conv(1, 3, stride=0), "stride=0"),
        (lambda: Conv(1, 3, pad=-1), "pad=-1"),
        (lambda: MaxPool(0), "size=0"),
        (lambda: MaxPool(2, 0), "stride=0"),
        (lambda: Dense(0), "units=0"),
        (lambda: Dropout(1.0), "rate=1.0"),
        (lambda: LRN(size=0), "size=0"),
        (lambda: LRN(alpha=-1.0), "alpha=-1.0"),
        (lambda: LRN(k=0.0), "k=0.0"),
        (lambda: BatchNorm(epsilon=0.0), "epsilon=0.0"),
        (lambda: BatchNorm(momentum=-0.1), "momentum=-0.1"),
        (lambda: BatchNorm(momentum=1.01), "momentum=1.01: .* Keras's 0.99 is 0.01 here"),
    ],
)
def test_nonsense_is_refused_by_name_and_value(make: Callable[[], Layer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "in_shape", "message"),
    [
        (Conv(1, 5), (4, 4, 1), "kernel.*5"),
        (Conv(1, 5), (10,), "works on maps"),
        (MaxPool(3), (2, 8, 1), "larger than the map, 2x8"),
        (MaxPool(3), (10,), "works on maps"),
        (Flatten(), (10,), "works on maps"),
    ],
)
def test_a_layer_that_does_not_fit_says_so(layer: Layer, in_shape: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer.out_shape(in_shape)
