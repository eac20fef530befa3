"""Options of the layer `conv`: pairs, padding to the same size, groups; shards of a layer with groups."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.arrays import Device
from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve
from daskcnn.nn import Context, sequential_from_spec
from daskcnn.nn.layers import Conv
from daskcnn.nn.spec import spec_of

CONV: dict[str, Any] = {"layer": "conv", "kernels": 6, "size": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"size": [3, 1], "stride": [2, 1], "pad": [1, 0], "dilation": [1, 2]},
        {"pad": "same", "groups": 3},
        {"size": 5, "stride": 2, "pad": 2, "dilation": 3, "bias": False},
    ],
)
def test_a_layer_comes_back_from_its_table(options: dict[str, Any]) -> None:
    network = sequential_from_spec([CONV | options])
    (table,) = json.loads(json.dumps(spec_of(network)))
    assert sequential_from_spec([table]) == network
    assert {name: table[name] for name in options} == options
    layer = network.layers[0][1]
    assert all(isinstance(getattr(layer, name), tuple) for name, value in options.items() if isinstance(value, list))
    assert hash(layer) == hash(sequential_from_spec([table]).layers[0][1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": [3]}, r"size = \[3\]: conv needs int or \[int, int\] here"),
        ({"size": [3, 1, 1]}, r"needs int or \[int, int\]"),
        ({"stride": [1, True]}, r"stride = \[1, True\]"),
        ({"pad": "valid"}, r"pad = 'valid': conv needs int or \[int, int\] or \"same\" here, not str"),
        ({"dilation": [1, 1 << 40]}, "numbers of at most"),
        ({"dilation": [1, 0]}, r"dilation=\(1, 0\): Conv needs at least 1"),
        ({"groups": 4}, "groups=4: 6 kernels cannot be cut"),
        ({"groups": 2.0}, "groups = 2.0: conv needs int"),
    ],
)
def test_wrong_options_are_refused_when_the_job_is_read(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"layers\[1\]: .*{said}"):
        sequential_from_spec([{"layer": "relu"}, CONV | options])
    with pytest.raises(JobError):
        resolve({"model": {"layers": [CONV | options, {"layer": "dense"}]}})


def test_channels_that_groups_do_not_divide_are_refused_by_the_layer_s_name() -> None:
    network = sequential_from_spec([{**CONV, "kernels": 8}, {**CONV, "groups": 3}])
    with pytest.raises(ValueError, match="layer conv2: groups=3: 8 input channels cannot be cut into 3 equal"):
        network.out_shape((8, 8, 3))


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (2, 1), ((4, 1), (1, 3)), (1, 4), (5, (2, 3))])
@pytest.mark.parametrize("shape", [(8, 9, 2), (7, 5, 2)])
def test_same_padding_leaves_the_size_over_the_stride(size: Any, stride: Any, shape: tuple[int, int, int]) -> None:
    layer = Conv(3, size, stride, "same")
    down, right = stride if isinstance(stride, tuple) else (stride, stride)
    assert layer.out_shape(shape) == (-(-shape[0] // down), -(-shape[1] // right), 3)


def test_first_weights_are_drawn_by_the_inputs_of_a_group() -> None:
    asked = []

    def initial(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> np.ndarray:
        asked.append((shape, fan_in, fan_out))
        return np.zeros(shape)

    Conv(8, (3, 2), groups=4).init(np.random.default_rng(0), (5, 5, 12), initial=initial)
    assert asked == [((3, 2, 3, 8), 3 * 2 * 3, 3 * 2 * 2)]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shards_of_kernels_compute_what_the_layer_computes(data: st.DataObject) -> None:
    groups, of_group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    K, C = groups * of_group, groups * data.draw(st.integers(1, 2))
    cuts = sorted({0, K, *data.draw(st.lists(st.integers(0, K), max_size=3))})
    layer, rng = Conv(K, (2, 3), pad="same", groups=groups), np.random.default_rng(0)
    params, _, _ = layer.init(rng, (4, 5, C))
    params["b"] = rng.standard_normal(K)
    x, dy = rng.standard_normal((4, 5, 2, C)), rng.standard_normal((4, 5, 2, K))
    kept: dict[Any, Any] = {}
    ctx = Context(Device(exact=True), training=True, kept=kept)
    y, _, residual = layer.forward(params, {}, x, ctx)
    dx, grads = layer.backward(params, residual, dy, ctx)
    total = np.zeros_like(x)
    for first, last in pairwise(cuts):
        own = {name: value[..., first:last] for name, value in params.items()}
        there = Context(Device(exact=True), training=True, channel=first, kept=kept)
        y_own, _, residual = layer.forward(own, {}, x, there)
        dx_own, grads_own = layer.backward(own, residual, dy[..., first:last], there)
        np.testing.assert_allclose(y_own, y[..., first:last], rtol=1e-11, atol=1e-11)
        for name, value in grads_own.items():
            np.testing.assert_allclose(value, grads[name][..., first:last], rtol=1e-11, atol=1e-11)
        assert dx_own is not None
        total += dx_own
    assert dx is not None
    np.testing.assert_allclose(total, dx, rtol=1e-11, atol=1e-11)
