"""Every loop of the layers between convolutions against its array expressions, which the stand-in for GPUs runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daskcnn.arrays import Array, Device, Pool
from daskcnn.compiled.batchnorm import PART, TENTH
from daskcnn.nn import LOSSES, Context, Layer, Shape, leaves, map_leaves
from daskcnn.nn.layers import (
    GELU,
    LRN,
    AveragePool,
    BatchNorm,
    Dropout,
    L2Pool,
    LeakyReLU,
    MaxPool,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
)
from daskcnn.nn.losses import SoftmaxCrossEntropy
from daskcnn.nn.scaled import channel_sum, moments
from tests.nn.nn_cases import example, label, values
from tests.standin import device_of

LAYERS: list[Layer] = [
    *(ReLU(), Sigmoid(), Tanh(), LeakyReLU(0.2), GELU(), SiLU(), Dropout(0.4)),
    *(LRN(), LRN(3, 0.5, 0.6, 2.0), LRN(4, 0.5)),
    *(pool(*sizes) for pool in (MaxPool, AveragePool, L2Pool) for sizes in ((2,), (3, 2), (2, 3))),
    *(BatchNorm(), BatchNorm(fixed=True)),
]
SHAPES = [(7, 9, 1), (6, 8, 16), (5, 3, 50), (3, 4, 1024)]
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def results(layer: Layer, in_shape: Shape, device: Device, dtype: str, N: int) -> list[Array]:
    """y, dx, gradients and new state, on the host."""
    params, state, x, dy, ctx = example(layer, in_shape, device, dtype=dtype, N=N)
    move, host = device.backend.from_host, device.backend.to_host
    y, new, residual = layer.forward(map_leaves(move, params), map_leaves(move, state), move(x), ctx)
    dx, grads = layer.backward(map_leaves(move, params), residual, move(dy), ctx)
    return [host(a) for a in (y, dx, *(a for tree in (grads, new) for _, a in leaves(tree)))]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("in_shape", SHAPES, ids=label)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_computes_its_array_expressions(layer: Layer, in_shape: Shape, dtype: str) -> None:
    own = results(layer, in_shape, Device(), dtype, 33)
    for found, expected in zip(own, results(layer, in_shape, device_of("standin"), dtype, 33), strict=True):
        limit = TOLERANCE[dtype]
        np.testing.assert_allclose(found, expected, rtol=limit, atol=limit * max(1, abs(expected).max()))
        assert found.dtype == dtype


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_large_maps_give_the_same_bits_on_any_number_of_threads(layer: Layer) -> None:
    one = results(layer, (17, 18, 50), Device(), "float32", 21)
    for threads in (2, 3):
        np.testing.assert_equal(results(layer, (17, 18, 50), Device(pool=Pool(threads)), "float32", 21), one)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layer", [Sigmoid(), Tanh()], ids=repr)
def test_exponentials_are_right_to_a_few_units_in_the_last_place(layer: Layer, dtype: str) -> None:
    x = np.concatenate([np.geomspace(1e-8, 200, 4001), -np.geomspace(1e-8, 200, 4001), [0]]).astype(dtype)[None]
    y, _, _ = layer.forward({}, {}, x, Context(Device()))
    exact = np.tanh(x.astype("longdouble")) if isinstance(layer, Tanh) else 1 / (1 + np.exp(-x.astype("longdouble")))
    in_range, limit = exact > 1e-37, float(4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(y[in_range], exact[in_range], rtol=limit)
    np.testing.assert_allclose(y, exact, rtol=limit, atol=1e-37)


@pytest.mark.parametrize("layer", [ReLU(), Sigmoid(), Tanh(), MaxPool(2), AveragePool(2), L2Pool(2)], ids=repr)
def test_what_is_not_a_number_goes_through(layer: Layer) -> None:
    x = np.zeros((2, 2, 3, 20), "float32")
    x[1, 0, 1, 7] = np.nan
    y, _, _ = layer.forward({}, {}, x, Context(Device()))
    assert np.isnan(y[-1, 0, 1, 7])
    assert np.isnan(y).sum() == 1


@pytest.mark.parametrize("shape", [(4, 5, 33, 7), (32, 32, 64, 16), (1, 1, 3, 1024), (200, 3001)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mean", [0, 30, 1000])
def test_moments_are_exact_however_far_the_mean_is_from_0(
    shape: Shape, dtype: str, mean: float, rng: np.random.Generator
) -> None:
    x = (mean + values(rng, shape)).astype(dtype)
    axes = tuple(range(x.ndim - 1))
    exact = x.astype("longdouble").mean(axis=axes), x.astype("longdouble").var(axis=axes)
    for device in (Device(), Device(pool=Pool(3))):
        found, rest, variance = moments(x, device)
        limit = 3e-7 if dtype == "float32" else 1e-14 * max(1, mean)
        np.testing.assert_allclose(found.astype("longdouble") + rest, exact[0], rtol=0, atol=limit)
        np.testing.assert_allclose(variance, exact[1], rtol=3e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("away", [1e2, 1e6])
def test_moments_are_exact_where_the_first_numbers_are_unlike_the_rest(away: float, rng: np.random.Generator) -> None:
    x = values(rng, (32, 32, 128, 8), "float32")
    x.reshape(-1, PART)[:, : PART // (2 * TENTH)] += np.float32(away)
    exact = x.astype("longdouble").mean(axis=(0, 1, 2)), x.astype("longdouble").var(axis=(0, 1, 2))
    mean, rest, variance = moments(x, Device())
    np.testing.assert_allclose(mean.astype("longdouble") + rest, exact[0], rtol=3e-6)
    np.testing.assert_allclose(variance, exact[1], rtol=3e-6)


@pytest.mark.parametrize("shape", [(4, 5, 33, 7), (32, 32, 64, 16), (200, 3001)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_channels_are_summed_part_by_part(shape: Shape, dtype: str, rng: np.random.Generator) -> None:
    x = values(rng, shape, dtype)
    exact = x.astype("longdouble").sum(axis=tuple(range(x.ndim - 1)))
    one = channel_sum(x, Device())
    np.testing.assert_allclose(one, exact, rtol=0, atol=3e-4 if dtype == "float32" else 1e-10)
    np.testing.assert_array_equal(channel_sum(x, Device(pool=Pool(3))), one)


@pytest.mark.parametrize(("N", "classes"), [(1, 2), (64, 10), (33, 1000)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_softmax_is_its_array_expressions(
    N: int, classes: int, dtype: str, weighted: bool, smoothing: float, rng: np.random.Generator
) -> None:
    backend = device_of("standin").backend
    scores, labels = 20 * values(rng, (N, classes), dtype), rng.integers(0, classes, N)
    weights = rng.random(N) if weighted else None
    softmax = SoftmaxCrossEntropy(smoothing)
    loss, dscores = softmax(scores, labels, np, weights)
    there = [None if a is None else backend.from_host(a) for a in (scores, labels, weights)]
    expected, dexpected = softmax(there[0], there[1], backend.xp, there[2])  # type: ignore[arg-type]
    limit = 2e-6 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(loss, backend.to_host(expected), rtol=limit)
    np.testing.assert_allclose(dscores, backend.to_host(dexpected), rtol=10 * limit, atol=limit / N)
    assert loss.dtype == dscores.dtype == dtype


def test_a_loss_that_is_not_finite_shows() -> None:
    for bad in (np.nan, np.inf):
        loss, _ = LOSSES["softmax"](np.array([[0, bad], [1, 2]], "float32"), np.array([0, 1]))
        assert not np.isfinite(loss)


def test_dropout_draws_for_absolute_channels() -> None:
    _, _, x, _, ctx = example(Dropout(0.4), (3, 4, 8), Device(), N=5)
    whole, _, _ = Dropout(0.4).forward({}, {}, x, ctx)
    part, _, _ = Dropout(0.4).forward({}, {}, x[..., 3:].copy(), replace(ctx, channel=3))
    np.testing.assert_array_equal(part, whole[..., 3:])


@pytest.mark.parametrize("mean", [0, 30, 1000])
def test_normalising_in_float32_is_exact_however_far_the_mean_is_from_0(mean: float, rng: np.random.Generator) -> None:
    x, dy = (mean + values(rng, (16, 16, 64, 8))).astype("float32"), values(rng, (16, 16, 64, 8), "float32")
    layer, ctx = BatchNorm(), Context(Device(), training=True)
    params, state, _ = layer.init(rng, (16, 16, 8))
    params, state = (map_leaves(lambda a: a.astype("float32"), tree) for tree in (params, state))
    y, _, residual = layer.forward(params, state, x, ctx)
    dx, _ = layer.backward(params, residual, dy, ctx)
    axes, wide, dwide = (0, 1, 2), x.astype("longdouble"), dy.astype("longdouble")
    deviation = np.sqrt(wide.var(axis=axes) + 1e-5)
    normal = (wide - wide.mean(axis=axes)) / deviation
    exact = (dwide - dwide.mean(axis=axes) - normal * (dwide * normal).mean(axis=axes)) / deviation
    assert dx is not None
    np.testing.assert_allclose(y, normal.astype("float64"), rtol=0, atol=1.5e-6)
    np.testing.assert_allclose(dx, exact.astype("float64"), rtol=0, atol=1.5e-6)
