"""Groups, dilation, strides, padding and kernels of any shape, drawn at random: every algorithm computes the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.conv import ALGORITHMS, Convolution, ConvSpec
from tests.conv.test_conv_laws import DIRECTIONS, TORCH_ORDER, arrays, bound, naive, run, torch_conv2d
from tests.standin import device_of

GENERAL = ("im2col", "grouped-im2col", "depthwise")


def _pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def problems(draw: st.DrawFn) -> ConvSpec:
    """Small problems in float64 that have an output."""
    (R, S), dilation, pad, pad_end = draw(_pairs(1, 4)), draw(_pairs(1, 4)), draw(_pairs(0, 3)), draw(_pairs(0, 2))
    least = [
        max(1, (taps - 1) * apart + 1 - 2 * zeros - more)
        for taps, apart, zeros, more in zip((R, S), dilation, pad, pad_end, strict=True)
    ]
    H, W = (n + draw(st.integers(0, 6)) for n in least)
    groups = draw(st.integers(1, 4))
    C, K = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    shape: dict[str, Any] = {"N": draw(st.integers(1, 3)), "H": H, "W": W, "C": C, "K": K, "R": R, "S": S}
    more: dict[str, Any] = {"pad": pad, "dilation": dilation, "pad_end": pad_end, "stride": draw(_pairs(1, 5))}
    return ConvSpec(**shape, **more, groups=groups, dtype="float64")


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_algorithm_computes_the_definition(spec: ConvSpec) -> None:
    host, supported = arrays(spec), [name for name, a in ALGORITHMS.items() if a.supports(spec)]
    assert any(name in GENERAL for name in supported)
    expected = naive(spec, *host)
    for name in supported:
        for device in ("numpy", "standin"):
            for direction, found in run(ALGORITHMS[name], spec, host, device_of(device)).items():
                error = f"{name} on {device}, {direction}"
                np.testing.assert_allclose(found, expected[direction], rtol=1e-10, atol=1e-10, err_msg=error)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_agrees_with_torch(spec: ConvSpec) -> None:
    torch = pytest.importorskip("torch")
    host = arrays(spec)
    x, w, dy = (torch.tensor(a.transpose(order)) for a, order in zip(host, TORCH_ORDER, strict=True))
    x.requires_grad_()
    w.requires_grad_()
    y = torch_conv2d(spec, x, w)
    y.backward(dy)
    theirs: dict[str, Any] = dict(zip(DIRECTIONS, (y.detach(), x.grad, w.grad), strict=True))
    back = dict(zip(DIRECTIONS, ((2, 3, 0, 1), (2, 3, 0, 1), (2, 3, 1, 0)), strict=True))
    for name in (name for name in GENERAL if ALGORITHMS[name].supports(spec)):
        for direction, found in run(ALGORITHMS[name], spec, host, device_of("numpy")).items():
            expected = theirs[direction].numpy().transpose(back[direction])
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10, err_msg=f"{name}, {direction}")


@settings(max_examples=30, deadline=None)
@given(problems())
def test_a_convolution_is_linear_in_the_map_and_in_the_kernels(spec: ConvSpec) -> None:
    device, (x, w, _), rng = device_of("numpy"), arrays(spec), np.random.default_rng(3)
    more_x, more_w = rng.standard_normal(x.shape), rng.standard_normal(w.shape)
    for name in (name for name in GENERAL if ALGORITHMS[name].supports(spec)):
        conv = bound(ALGORITHMS[name], spec, device)

        def y(x: np.ndarray, w: np.ndarray, conv: Convolution = conv) -> np.ndarray:
            return np.asarray(conv.forward(x, conv.prepare(w, device), device))

        np.testing.assert_allclose(y(2 * x - more_x, w), 2 * y(x, w) - y(more_x, w), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(y(x, 3 * w + more_w), 3 * y(x, w) + y(x, more_w), rtol=1e-9, atol=1e-9)


def test_groups_are_problems_of_their_own_side_by_side() -> None:
    spec = ConvSpec(N=2, H=6, W=5, C=8, K=12, R=3, S=2, pad=(1, 1), groups=4, dtype="float64")
    (x, w, dy), device = arrays(spec), device_of("numpy")
    whole = run(ALGORITHMS["grouped-im2col"], spec, [x, w, dy], device)
    alone = replace(spec, C=2, K=3, groups=1)
    for g in range(4):
        c, k = slice(2 * g, 2 * g + 2), slice(3 * g, 3 * g + 3)
        own = run(ALGORITHMS["im2col"], alone, [x[..., c], w[..., k], dy[..., k]], device)
        for name, part in zip(DIRECTIONS, (k, c, k), strict=True):
            np.testing.assert_allclose(whole[name][..., part], own[name], rtol=1e-12, atol=1e-12, err_msg=name)
