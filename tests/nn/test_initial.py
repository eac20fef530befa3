"""Initial kernels that pass channels on, or whiten patches of images; layouts without initial weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.nn import Context, Layer, Layout, Shape, build_model, init_network, layout_of
from daskcnn.nn.layer import passing_through
from daskcnn.nn.layers import Conv, Dense
from daskcnn.nn.network import patch_moments, whitened_layer, whitening_kernels
from tests.nn.nn_cases import COMPOSITES, label, values


def conv(**options: Any) -> dict[str, Any]:
    return {"layer": "conv", **options}


HEAD = {"layer": "dense", "units": 4}

# --- kernels that pass a channel on ---


@pytest.mark.parametrize(("size", "channels", "kernels"), [(3, 4, 6), (5, 3, 3), (1, 2, 5), (3, 5, 2)])
def test_the_first_kernels_pass_a_channel_on(size: int, channels: int, kernels: int, rng: np.random.Generator) -> None:
    layer = Conv(kernels, size, pad=size // 2, bias=False, initial="dirac")
    params, state, _ = layer.init(np.random.default_rng(0), (6, 7, channels))
    x = values(rng, (6, 7, 2, channels))
    y, _, _ = layer.forward(params, state, x, Context(Device(exact=True)))
    passed = min(channels, kernels)
    np.testing.assert_allclose(y[..., :passed], x[..., :passed], rtol=0, atol=1e-12)
    drawn, _, _ = Conv(kernels, size, bias=False, initial="uniform").init(np.random.default_rng(0), (6, 7, channels))
    np.testing.assert_array_equal(params["w"][..., passed:], drawn["w"][..., passed:])


def test_they_are_pytorchs(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    for *shape, groups in ((3, 3, 4, 4, 1), (2, 5, 3, 3, 1), (4, 4, 2, 2, 1), (3, 3, 2, 6, 3), (3, 1, 1, 4, 4)):
        expected = torch.nn.init.dirac_(torch.empty(shape[3], shape[2], shape[0], shape[1]), groups).numpy()
        found = passing_through(values(rng, tuple(shape)), groups)
        np.testing.assert_array_equal(found, expected.transpose(2, 3, 1, 0))


@pytest.mark.parametrize(("channels", "kernels", "groups"), [(6, 6, 3), (4, 4, 4), (4, 10, 2), (9, 6, 3)])
def test_every_group_passes_its_channels_on(channels: int, kernels: int, groups: int, rng: np.random.Generator) -> None:
    layer, x = Conv(kernels, 3, pad=1, groups=groups, initial="dirac"), values(rng, (4, 3, 2, channels))
    params, state, _ = layer.init(np.random.default_rng(0), (4, 3, channels))
    y, _, _ = layer.forward(params, state, x, Context(Device(exact=True)))
    passed = min(channels, kernels) // groups
    found, given = (a.reshape(4, 3, 2, groups, -1)[..., :passed] for a in (y, x))
    np.testing.assert_allclose(found, given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("initial", ["eye", ""])
def test_another_name_is_refused(initial: str) -> None:
    with pytest.raises(ValueError, match="use 'uniform', 'dirac' or 'whitening', or leave it out"):
        build_model(None, [conv(kernels=2, size=1, initial=initial), HEAD], (4, 4, 1), 4)


# --- small weights ---


def test_uniform_weights_are_as_small_as_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    for ours, theirs in (
        (Conv(40, 3, initial="uniform").init(np.random.default_rng(0), (9, 9, 50)), torch.nn.Conv2d(50, 40, 3)),
        (Dense(300, initial="uniform").init(np.random.default_rng(0), (200,)), torch.nn.Linear(200, 300)),
    ):
        w, given = ours[0]["w"], theirs.weight.detach().numpy()
        assert np.abs(w).max() == pytest.approx(np.abs(given).max(), rel=1e-2)
        assert w.std() == pytest.approx(given.std(), rel=3e-2)


def test_a_dense_layer_refuses_another_name() -> None:
    with pytest.raises(ValueError, match="initial='dirac': use 'uniform', or leave it out"):
        Dense(3, initial="dirac")


# --- kernels that whiten ---


def correlated(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Images whose neighbouring pixels and channels go together."""
    x = values(rng, shape)
    x[1:] += 0.8 * x[:-1]
    x[:, 1:] += 0.5 * x[:, :-1]
    x[..., 1:] += x[..., :1]
    return x


@pytest.mark.parametrize(("size", "channels"), [(2, 3), (3, 1), (1, 12)])
def test_outputs_over_the_patches_are_uncorrelated(size: int, channels: int, rng: np.random.Generator) -> None:
    x = correlated(rng, (9, 8, 40, channels))
    sums, count = patch_moments(x, size)
    moments = sums / count
    kernels = whitening_kernels(moments, size, eps=1e-3)
    half = size**2 * channels
    assert kernels.shape == (size, size, channels, 2 * half)
    layer = Conv(2 * half, size, bias=False)
    y, _, _ = layer.forward({"w": kernels}, {}, x, Context(Device(exact=True)))
    assert count == y[..., 0].size
    flat = y.reshape(-1, 2 * half)
    np.testing.assert_allclose(flat[:, half:], -flat[:, :half], rtol=0, atol=1e-9)
    found = flat[:, :half].T @ flat[:, :half] / len(flat)
    values_of = np.linalg.eigvalsh(moments)[::-1]
    np.testing.assert_allclose(found, np.diag(values_of / (values_of + 1e-3)), rtol=0, atol=1e-8)
    largest = np.abs(kernels.reshape(half, -1)).argmax(axis=0)
    assert (np.take_along_axis(kernels.reshape(half, -1), largest[None], axis=0)[0, :half] > 0).all()


def test_moments_of_parts_add_up_to_those_of_all(rng: np.random.Generator) -> None:
    x = correlated(rng, (6, 5, 9, 2))
    (whole, count), *parts = (patch_moments(each, 2) for each in (x, x[:, :, :4], x[:, :, 4:]))
    np.testing.assert_allclose(parts[0][0] + parts[1][0], whole, rtol=1e-12)
    assert parts[0][1] + parts[1][1] == count == 9 * 5 * 4


def test_a_black_data_set_gives_finite_kernels() -> None:
    assert np.isfinite(whitening_kernels(np.zeros((4, 4)), 2)).all()


def test_it_is_for_the_first_layer_alone() -> None:
    whitening, shape = conv(kernels=24, size=2, initial="whitening"), (8, 8, 3)
    found = whitened_layer(build_model(None, [whitening, HEAD], shape, 4))
    assert found is not None
    assert found[0] == "conv1"
    assert whitened_layer(build_model(None, [conv(kernels=24, size=2), HEAD], shape, 4)) is None
    for layers in ([{"layer": "relu"}, whitening], [whitening, whitening]):
        with pytest.raises(ValueError, match="is for the network's first layer"):
            build_model(None, [*layers, HEAD], shape, 4)
    inside = {"layer": "residual", "path": [whitening], "shortcut": [conv(kernels=24, size=2)]}
    with pytest.raises(ValueError, match="layer residual1/path/conv1: initial = 'whitening' is for"):
        build_model(None, [inside, HEAD], shape, 4)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"kernels": 12, "size": 2}, (8, 8, 3), r"2·size²·channels = 24 kernels, not 12; set kernels = 24"),
        ({"kernels": 50, "size": 5, "pad": 2}, (4, 8, 1), "images of 4x8 have no patches of size 5; lower size"),
    ],
)
def test_kernels_that_cannot_whiten_are_refused(
    options: dict[str, Any], shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(None, [conv(**options, initial="whitening"), HEAD], shape, 4)


# --- layouts ---


def layers() -> list[tuple[Layer, Shape]]:
    shape = (64, 64, 3)
    return [*COMPOSITES, *((build_model(name, None, shape, 10), shape) for name in ("fast", "resnet20", "vgg16"))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("model", "in_shape"), layers(), ids=label)
def test_a_layout_without_drawing_is_that_of_the_initial_weights(model: Layer, in_shape: Shape, dtype: str) -> None:
    if model.numbers(in_shape) < 3_000_000:
        assert layout_of(model, in_shape, dtype) == Layout.of(*init_network(model, 0, in_shape, dtype))
    assert layout_of(model, in_shape, dtype).size == model.numbers(in_shape)
