"""Laws that every convolution algorithm keeps, on every backend."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device, Pool, single_threaded_blas
from daskcnn.conv import ALGORITHMS, ConvAlgorithm, Convolution, ConvSpec, plan
from daskcnn.conv.fourier import Tiling
from daskcnn.conv.spectral import Sizes
from tests.rounding import assert_rounds, limits, of_direction, of_pass
from tests.standin import device_of

OBJECTS = 1 << 19
"""Bytes of a pass beside its arrays, at most: the tasks of its threads."""
SPECS = {
    "5x5 same": ConvSpec(N=3, H=8, W=8, C=4, K=6, R=5, S=5, pad=(2, 2)),
    "3x3 valid": ConvSpec(N=2, H=7, W=6, C=3, K=5, R=3, S=3),
    "1x1": ConvSpec(N=2, H=4, W=5, C=3, K=4, R=1, S=1),
    "1x1 stride 2": ConvSpec(N=2, H=5, W=6, C=3, K=4, R=1, S=1, stride=(2, 2)),
    "1x1, several blocks": ConvSpec(N=40, H=9, W=40, C=40, K=50, R=1, S=1, stride=(2, 1)),
    "1x1 padded, strided over it": ConvSpec(N=1, H=1, W=2, C=2, K=2, R=1, S=1, stride=(3, 3), pad=(1, 1)),
    "even kernel": ConvSpec(N=2, H=6, W=6, C=2, K=3, R=2, S=4, pad=(1, 2)),
    "one row of taps": ConvSpec(N=2, H=6, W=5, C=3, K=2, R=1, S=3, pad=(0, 1)),
    "one column of taps": ConvSpec(N=2, H=6, W=5, C=9, K=2, R=4, S=1, pad=(2, 0)),
    "stride 2": ConvSpec(N=2, H=9, W=8, C=3, K=4, R=3, S=3, stride=(2, 2), pad=(1, 1)),
    "stride 2, several tiles, padding at the end": ConvSpec(
        N=3, H=17, W=20, C=5, K=4, R=3, S=3, stride=(2, 2), pad=(1, 3), pad_end=(2, 1)
    ),
    "stride 4, 11x11": ConvSpec(N=2, H=23, W=23, C=3, K=4, R=11, S=11, stride=(4, 4), pad=(2, 2)),
    "unequal strides": ConvSpec(N=2, H=9, W=10, C=2, K=3, R=4, S=3, stride=(2, 3), pad=(1, 0)),
    "stride beyond the kernel": ConvSpec(N=2, H=10, W=9, C=2, K=3, R=2, S=2, stride=(3, 4)),
    "last rows unread": ConvSpec(N=2, H=8, W=8, C=2, K=3, R=3, S=3, stride=(3, 3)),
    "padding beyond the kernel": ConvSpec(N=2, H=3, W=4, C=2, K=3, R=2, S=3, pad=(4, 3)),
    "kernel beyond the map": ConvSpec(N=2, H=3, W=2, C=2, K=3, R=5, S=6, pad=(1, 2)),
    "kernel as the map": ConvSpec(N=2, H=4, W=3, C=2, K=3, R=4, S=3),
    "one of each": ConvSpec(N=1, H=1, W=1, C=1, K=1, R=1, S=1),
    "one channel": ConvSpec(N=2, H=6, W=6, C=1, K=3, R=3, S=3, pad=(1, 1)),
    "one sample": ConvSpec(N=1, H=6, W=7, C=3, K=4, R=3, S=3, pad=(1, 1)),
    "one kernel": ConvSpec(N=2, H=6, W=6, C=3, K=1, R=3, S=3, pad=(1, 1)),
    "many channels": ConvSpec(N=2, H=3, W=3, C=40, K=2, R=3, S=3, pad=(1, 1)),
    "32 to 64, 5x5": ConvSpec(N=2, H=6, W=9, C=32, K=64, R=5, S=5, pad=(2, 2)),
    "64 to 16, stride 2": ConvSpec(N=3, H=7, W=6, C=64, K=16, R=3, S=3, stride=(2, 2), pad=(1, 1)),
    "64 to 48": ConvSpec(N=2, H=5, W=6, C=64, K=48, R=3, S=3, pad=(1, 1)),
    "1,024 channels": ConvSpec(N=2, H=3, W=4, C=1024, K=20, R=3, S=3, pad=(1, 1)),
    "1,024 channels to 1,024": ConvSpec(N=1, H=2, W=2, C=1024, K=1024, R=1, S=1),
    "many samples": ConvSpec(N=1100, H=2, W=3, C=2, K=3, R=2, S=2, pad=(1, 0)),
    "many pixels": ConvSpec(N=3, H=5, W=400, C=2, K=3, R=3, S=3, pad=(1, 1)),
    "large map": ConvSpec(N=2, H=19, W=37, C=3, K=4, R=5, S=3, pad=(2, 1)),
    "large map without padding": ConvSpec(N=2, H=34, W=17, C=2, K=3, R=4, S=5),
    "many kernels": ConvSpec(N=2, H=4, W=4, C=2, K=600, R=2, S=3, pad=(1, 1)),
    "thin": ConvSpec(N=9, H=9, W=7, C=16, K=32, R=3, S=3, pad=(1, 1)),
    "thin, 5x5": ConvSpec(N=5, H=9, W=7, C=32, K=16, R=5, S=5, pad=(2, 2)),
    "1024 kernels": ConvSpec(N=2, H=3, W=2, C=20, K=1024, R=3, S=3, pad=(1, 1)),
    "padding beyond a 3x3 kernel": ConvSpec(N=2, H=3, W=4, C=2, K=3, R=3, S=3, pad=(4, 3)),
    "padding of one side": ConvSpec(N=2, H=9, W=6, C=3, K=4, R=5, S=5, pad=(0, 2)),
    "a row and a column more at the end": ConvSpec(N=2, H=6, W=9, C=3, K=4, R=3, S=3, pad=(1, 0), pad_end=(1, 2)),
    "more at the end than the kernel has taps": ConvSpec(N=2, H=4, W=5, C=2, K=3, R=2, S=2, pad=(1, 0), pad_end=(2, 3)),
    "dilation": ConvSpec(N=2, H=9, W=8, C=3, K=4, R=3, S=3, pad=(2, 2), dilation=(2, 2)),
    "dilation as the stride": ConvSpec(N=2, H=9, W=8, C=3, K=4, R=3, S=2, stride=(2, 3), pad=(2, 1), dilation=(2, 3)),
    "dilation, stride": ConvSpec(N=2, H=13, W=16, C=2, K=3, R=3, S=3, stride=(2, 4), pad=(3, 0), dilation=(3, 6)),
    "dilation beyond the map": ConvSpec(N=2, H=3, W=4, C=2, K=3, R=3, S=2, pad=(5, 4), dilation=(5, 9)),
    "dilation, phases of one size": ConvSpec(N=2, H=8, W=12, C=3, K=4, R=3, S=3, pad=(2, 3), dilation=(2, 3)),
    "dilation, padding of a part": ConvSpec(
        N=2, H=11, W=13, C=3, K=4, R=3, S=3, pad=(3, 1), dilation=(2, 3), pad_end=(1, 0)
    ),
    "dilation, 5x5": ConvSpec(N=2, H=13, W=16, C=3, K=4, R=5, S=5, pad=(6, 4), dilation=(3, 2)),
    "dilation along one axis": ConvSpec(N=2, H=7, W=9, C=3, K=4, R=1, S=3, pad=(0, 3), dilation=(2, 3)),
    "groups, dilation": ConvSpec(N=2, H=9, W=8, C=4, K=6, R=3, S=3, pad=(2, 2), dilation=(2, 2), groups=2),
    "few channels": ConvSpec(N=7, H=9, W=8, C=3, K=16, R=3, S=3, pad=(1, 1)),
    "few channels, stride": ConvSpec(N=4, H=13, W=12, C=3, K=32, R=7, S=5, stride=(2, 3), pad=(3, 2), pad_end=(1, 0)),
    "few channels, dilation": ConvSpec(N=13, H=9, W=7, C=2, K=16, R=3, S=2, pad=(3, 1), dilation=(2, 3)),
    "few channels, padding beyond the kernel": ConvSpec(N=2, H=3, W=4, C=1, K=48, R=2, S=3, pad=(4, 3)),
    "few channels, many samples": ConvSpec(N=700, H=3, W=4, C=3, K=16, R=3, S=3, pad=(1, 1)),
    "few channels in groups": ConvSpec(N=3, H=5, W=6, C=4, K=64, R=3, S=3, pad=(1, 1), groups=2),
    "two groups": ConvSpec(N=2, H=7, W=6, C=4, K=6, R=3, S=3, pad=(1, 1), groups=2),
    "groups, dilation, stride": ConvSpec(
        N=2, H=8, W=9, C=6, K=3, R=2, S=3, stride=(1, 2), pad=(1, 2), dilation=(3, 2), groups=3, pad_end=(1, 0)
    ),
    "groups of one kernel": ConvSpec(N=2, H=5, W=4, C=6, K=3, R=1, S=1, groups=3),
    "depthwise": ConvSpec(N=3, H=6, W=7, C=5, K=5, R=3, S=3, pad=(1, 1), groups=5),
    "depthwise, stride": ConvSpec(N=2, H=7, W=8, C=4, K=4, R=3, S=2, stride=(2, 3), pad=(1, 0), groups=4),
    "depthwise, dilation": ConvSpec(
        N=2, H=9, W=6, C=3, K=3, R=3, S=1, stride=(2, 1), pad=(2, 0), dilation=(2, 1), groups=3, pad_end=(1, 0)
    ),
    "depthwise, three kernels a channel": ConvSpec(N=2, H=5, W=6, C=2, K=6, R=3, S=3, pad=(1, 1), groups=2),
    "depthwise, many samples": ConvSpec(N=400, H=3, W=2, C=3, K=3, R=2, S=2, pad=(1, 1), groups=3),
    "depthwise, many channels": ConvSpec(N=2, H=3, W=3, C=1100, K=1100, R=3, S=3, pad=(1, 1), groups=1100),
    "depthwise, several runs": ConvSpec(N=9, H=7, W=11, C=260, K=260, R=3, S=3, pad=(1, 1), groups=260),
    "depthwise, runs with dilation and stride": ConvSpec(
        N=4, H=9, W=9, C=400, K=400, R=3, S=5, stride=(2, 1), pad=(2, 2), dilation=(2, 1), groups=400
    ),
    "depthwise, last rows unread": ConvSpec(N=2, H=8, W=8, C=2, K=2, R=2, S=2, stride=(3, 3), groups=2),
}
PAPERS = {
    f"{C}:{K}": ConvSpec(N=1, H=16, W=16, C=C, K=K, R=5, S=5, pad=(2, 2))
    for C, K in ((50, 500), (150, 800), (300, 1000), (500, 1500))
}
TORCH_ORDER = ((2, 3, 0, 1), (3, 2, 0, 1), (2, 3, 0, 1))
"""From (H, W, N, C), (R, S, C, K) and (H, W, N, K) to PyTorch's NCHW, KCRS and NKHW."""
DIRECTIONS = ("forward", "backward_data", "backward_filter")


def cases(specs: dict[str, ConvSpec]) -> list[Any]:
    """Every problem with every algorithm that supports it. A Fourier transform of a million kernels takes a second."""
    pairs = [(s, a) for s, a in itertools.product(specs, ALGORITHMS) if ALGORITHMS[a].supports(specs[s])]
    slow = {(s, a) for s, a in pairs if a.startswith("spectral") and specs[s].C * specs[s].K >= 1 << 20}
    return [pytest.param(a, specs[s], id=f"{a}-{s}", marks=[pytest.mark.slow] * ((s, a) in slow)) for s, a in pairs]


every_case = pytest.mark.parametrize(("algorithm", "spec"), cases(SPECS))


def arrays(spec: ConvSpec) -> list[np.ndarray]:
    """x, w, dy."""
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(spec.dtype) for shape in (spec.x_shape, spec.w_shape, spec.y_shape)]


def assert_close(
    algorithm: ConvAlgorithm,
    spec: ConvSpec,
    direction: str,
    found: np.ndarray,
    expected: np.ndarray,
    *,
    compiled: bool = True,
) -> None:
    """Two results of an algorithm in the problem's dtype, each within its rounding."""
    most = 2 * of_direction(algorithm.name, spec, direction, compiled=compiled).largest * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=most, err_msg=direction)


def bound(algorithm: ConvAlgorithm, spec: ConvSpec, device: Device) -> Convolution:
    """The algorithm for a problem on this device."""
    return algorithm.bind(spec, device.backend, device.workspace_limit)


def run(algorithm: ConvAlgorithm, spec: ConvSpec, host: list[np.ndarray], device: Device) -> dict[str, np.ndarray]:
    """All three directions, on the host."""
    x, w, dy = (device.backend.from_host(a) for a in host)
    conv = bound(algorithm, spec, device)
    prepared, kept = conv.prepare(w, device), conv.prepare(w, device, keep=True)
    results = {
        "forward": conv.forward(x, prepared, device),
        "backward_data": conv.backward_data(dy, prepared, device),
        "backward_filter": conv.backward_filter(x, dy, device),
    }
    again = {"forward": conv.forward(x, kept, device), "backward_data": conv.backward_data(dy, kept, device)}
    for name, result in again.items():
        found, expected = (device.backend.to_host(a) for a in (result, results[name]))
        assert_close(algorithm, spec, name, found, expected, compiled=device.backend.compiled)
    both = conv.backward(x, dy, prepared, device)
    for name, result in zip(DIRECTIONS[1:], both, strict=True):
        found, expected = (device.backend.to_host(a) for a in (result, results[name]))
        if "winograd" in algorithm.name:  # makes both in another way than each by itself
            assert_close(algorithm, spec, name, found, expected, compiled=device.backend.compiled)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)
    assert all(isinstance(r, device.xp.ndarray) for r in results.values())
    return {name: device.backend.to_host(result) for name, result in results.items()}


@cache
def as_ever(algorithm: str, spec: ConvSpec) -> dict[str, np.ndarray]:
    """What an algorithm makes of a problem on one thread, computed once for all laws that compare with it."""
    return run(ALGORITHMS[algorithm], spec, arrays(spec), device_of("numpy"))


def naive(spec: ConvSpec, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    """The definition, one tap and output pixel after the other, in float64; the adjoints are its derivative."""
    (ph, pw), (sh, sw), (dh, dw), (eh, ew), g = spec.pad, spec.stride, spec.dilation, spec.pad_end, spec.groups
    padded = np.pad(x.astype(np.float64), ((ph, ph + eh), (pw, pw + ew), (0, 0), (0, 0)))
    # the numbers of every group before those of its samples: one product of matrices for each group
    padded = padded.reshape(*padded.shape[:3], g, -1).swapaxes(2, 3)
    w = w.astype(np.float64).reshape(*w.shape[:3], g, -1).swapaxes(2, 3)
    dy = dy.astype(np.float64).reshape(*dy.shape[:3], g, -1).swapaxes(2, 3)
    y, dws, dpadded = np.zeros_like(dy), np.zeros_like(w), np.zeros_like(padded)
    for i, j, r, s in itertools.product(*(range(n) for n in (spec.out_H, spec.out_W, spec.R, spec.S))):
        at = i * sh + r * dh, j * sw + s * dw
        y[i, j] += padded[at] @ w[r, s]
        dws[r, s] += padded[at].mT @ dy[i, j]
        dpadded[at] += dy[i, j] @ w[r, s].mT
    dx = dpadded[ph : ph + spec.H, pw : pw + spec.W]
    found = {"forward": (y, spec.y_shape), "backward_data": (dx, spec.x_shape), "backward_filter": (dws, spec.w_shape)}
    return {name: array.swapaxes(2, 3).reshape(shape) for name, (array, shape) in found.items()}


@cache
def by_definition(spec: ConvSpec) -> dict[str, np.ndarray]:
    """All directions of a problem, computed once for all algorithms and devices."""
    return naive(spec, *arrays(spec))


@every_case
def test_adds_a_bias_to_every_output(algorithm: str, spec: ConvSpec, device: Device) -> None:
    x, w, _ = (device.backend.from_host(a) for a in arrays(replace(spec, dtype="float64")))
    bias = device.backend.from_host(np.arange(1.0, spec.K + 1))
    conv = bound(ALGORITHMS[algorithm], replace(spec, dtype="float64"), device)
    prepared = conv.prepare(w, device)
    plain, shifted = conv.forward(x, prepared, device), conv.forward(x, prepared, device, bias=bias)
    found, expected = (device.backend.to_host(a) for a in (shifted, plain + bias))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@every_case
def test_computes_the_definition_and_its_adjoints(algorithm: str, spec: ConvSpec, device: Device) -> None:
    exact = replace(spec, dtype="float64")
    x, w, dy = host = arrays(exact)
    results, expected = run(ALGORITHMS[algorithm], exact, host, device), by_definition(exact)
    for name in DIRECTIONS:
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-11, atol=1e-11, err_msg=name)
    product = np.vdot(results["forward"], dy)
    scale = float(np.linalg.norm(results["forward"]) * np.linalg.norm(dy))
    assert np.vdot(x, results["backward_data"]) == pytest.approx(product, abs=1e-12 * scale)
    assert np.vdot(w, results["backward_filter"]) == pytest.approx(product, abs=1e-12 * scale)


@every_case
def test_results_are_new_contiguous_arrays_of_the_dtype_and_inputs_stay(algorithm: str, spec: ConvSpec) -> None:
    device, host = device_of("numpy"), arrays(spec)
    before = [a.copy() for a in host]
    first = run(ALGORITHMS[algorithm], spec, host, device)
    kept = {name: a.copy() for name, a in first.items()}
    run(ALGORITHMS[algorithm], spec, [a + 1 for a in host], device)
    for name, shape in zip(DIRECTIONS, (spec.y_shape, spec.x_shape, spec.w_shape), strict=True):
        assert (first[name].shape, first[name].dtype) == (shape, np.dtype(spec.dtype))
        assert first[name].flags.c_contiguous
        np.testing.assert_array_equal(first[name], kept[name], err_msg=f"{name} is scratch memory")
    for array, old in zip(host, before, strict=True):
        np.testing.assert_array_equal(array, old)


@every_case
def test_inputs_may_be_strided(algorithm: str, spec: ConvSpec) -> None:
    strided = [np.repeat(a, 2, axis=2)[:, :, ::2] for a in arrays(spec)]
    for name, result in run(ALGORITHMS[algorithm], spec, strided, device_of("numpy")).items():
        assert_close(ALGORITHMS[algorithm], spec, name, result, as_ever(algorithm, spec)[name])


@every_case
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_compiled_loops_agree_with_the_expressions_over_arrays(algorithm: str, spec: ConvSpec, dtype: str) -> None:
    typed = replace(spec, dtype=dtype)
    chosen = ALGORITHMS[algorithm]
    expressions = run(chosen, typed, arrays(typed), device_of("standin"))
    for name in DIRECTIONS:
        assert_close(chosen, typed, name, as_ever(algorithm, typed)[name], expressions[name], compiled=False)


@every_case
@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("room", [pytest.param("plenty", marks=pytest.mark.slow), "the least"])
def test_results_do_not_depend_on_the_number_of_threads(algorithm: str, spec: ConvSpec, room: str) -> None:
    host, limit = arrays(spec), 1 << 30 if room == "plenty" else ALGORITHMS[algorithm].workspace(spec)
    with single_threaded_blas():
        expected = run(ALGORITHMS[algorithm], spec, host, Device(workspace_limit=limit))
        for threads in (2, 3):
            device = Device(pool=Pool(threads), workspace_limit=limit)
            results = run(ALGORITHMS[algorithm], spec, host, device)
            device.pool.close()
            for name in DIRECTIONS:
                np.testing.assert_array_equal(results[name], expected[name], err_msg=f"{name}, {threads} threads")


@pytest.mark.parametrize("spec", [pytest.param(s, id=n) for n, s in SPECS.items() if ALGORITHMS["im2col"].supports(s)])
def test_taps_stand_in_for_columns_where_these_do_not_fit(spec: ConvSpec) -> None:
    double = replace(spec, dtype="float64")
    at_once, by_taps = (
        run(ALGORITHMS["im2col"], double, arrays(double), replace(device_of("standin"), workspace_limit=limit))
        for limit in (1 << 30, 0)
    )
    for name in DIRECTIONS:
        np.testing.assert_allclose(by_taps[name], at_once[name], rtol=1e-9, atol=1e-9, err_msg=name)


@every_case
@pytest.mark.usefixtures("eager_threads")
def test_what_a_pass_is_given_is_freed_without_the_garbage_collector(algorithm: str, spec: ConvSpec) -> None:
    device, given = Device(pool=Pool(2)), arrays(spec)
    maps = [weakref.ref(a) for a in given]
    gc.disable()
    try:
        run(ALGORITHMS[algorithm], spec, given, device)
        device.pool.close()  # a thread may have been woken for work that the caller took back
        del given
        assert [a() is None for a in maps] == [True, True, True]
    finally:
        gc.enable()


@every_case
@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_keeps_to_the_workspace_it_says_it_needs(algorithm: str, spec: ConvSpec, threads: int) -> None:
    chosen, host = ALGORITHMS[algorithm], arrays(spec)
    device = Device(pool=Pool(threads), workspace_limit=chosen.workspace(spec))
    x, w, dy = host
    expected = as_ever(algorithm, spec)
    run(chosen, spec, host, device)  # what is made once in a process, as threads and compiled loops, is no workspace
    conv = bound(chosen, spec, device)
    prepared = conv.prepare(w, device)
    for name, arguments in (
        ("forward", (x, prepared)),
        ("backward_data", (dy, prepared)),
        ("backward_filter", (x, dy)),
        ("backward", (x, dy, prepared)),
    ):
        fresh = replace(device, workspace=type(device.workspace)())
        tracemalloc.start()
        result = getattr(conv, name)(*arguments, fresh)
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        results = result if name == "backward" else (result,)
        assert fresh.workspace.nbytes <= device.workspace_limit, name
        assert allocated <= device.workspace_limit + sum(a.nbytes for a in results) + OBJECTS, name
        for part, of in zip(results, DIRECTIONS[1:] if name == "backward" else [name], strict=True):
            assert_close(chosen, spec, of, part, expected[of])
    device.pool.close()


def once(algorithm: str, spec: ConvSpec, host: list[np.ndarray], device: Device | None = None) -> dict[str, np.ndarray]:
    """All three directions, each computed once, on the host."""
    device = device or Device()
    x, w, dy = map(device.backend.from_host, host)
    conv = bound(ALGORITHMS[algorithm], spec, device)
    prepared = conv.prepare(w, device)
    y, gradients = conv.forward(x, prepared, device), conv.backward(x, dy, prepared, device)
    return dict(zip(DIRECTIONS, map(device.backend.to_host, (y, *gradients)), strict=True))


@cache
def in_double(single: ConvSpec) -> dict[str, np.ndarray]:
    """All directions in float64, of the values in float32."""
    reference = next(name for name in ("im2col", "grouped-im2col", "depthwise") if ALGORITHMS[name].supports(single))
    return once(reference, replace(single, dtype="float64"), [a.astype(np.float64) for a in arrays(single)])


SINGLE = {
    "5x5": ConvSpec(N=32, H=20, W=20, C=32, K=48, R=5, S=5, pad=(2, 2)),
    "3x3": ConvSpec(N=32, H=20, W=20, C=32, K=48, R=3, S=3, pad=(1, 1)),
    "3x3, stride 2": ConvSpec(N=32, H=20, W=20, C=32, K=48, R=3, S=3, pad=(1, 1), stride=(2, 2)),
    "3x3 of three channels": ConvSpec(N=32, H=20, W=20, C=3, K=32, R=3, S=3, pad=(1, 1)),
    "3x3 dilated": ConvSpec(N=16, H=20, W=20, C=32, K=48, R=3, S=3, pad=(2, 2), dilation=(2, 2)),
    "3x3 in groups": ConvSpec(N=16, H=20, W=20, C=16, K=24, R=3, S=3, pad=(1, 1), groups=2),
    "3x3 depthwise": ConvSpec(N=32, H=20, W=20, C=8, K=8, R=3, S=3, pad=(1, 1), groups=8),
    "1x1": ConvSpec(N=32, H=20, W=20, C=64, K=48, R=1, S=1),
    "1x1 of three channels": ConvSpec(N=32, H=20, W=20, C=3, K=4, R=1, S=1),
}
FEW = [
    *((name, replace(SINGLE["3x3 of three channels"], N=8, K=16)) for name in ("im2col", "direct")),
    *((name, replace(SINGLE["3x3"], N=8, C=3, K=4)) for name in ("spectral-8", "winograd-2x3", "winograd-4x3")),
    ("winograd-4x5", replace(SINGLE["5x5"], N=8, C=3, K=4)),
    ("winograd-4x3-stride2", replace(SINGLE["3x3, stride 2"], N=8, C=8, K=8)),
    ("depthwise", replace(SINGLE["3x3 depthwise"], N=4)),
    ("pointwise", replace(SINGLE["1x1 of three channels"], N=8, H=40, W=40)),
]
"""A problem of every kind, with long sums, for each kernel of BLAS."""


@pytest.mark.parametrize(("algorithm", "single"), cases(SINGLE))
@pytest.mark.parametrize("part", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_float32_stays_within_its_rounding(algorithm: str, single: ConvSpec, part: int, device: Device) -> None:
    single = replace(single, N=single.N // part)
    results, exact = run(ALGORITHMS[algorithm], single, arrays(single), device), in_double(single)
    for name in DIRECTIONS:
        allowed = of_direction(algorithm, single, name, compiled=device.backend.compiled)
        assert_rounds(results[name], exact[name], allowed, name)


def test_what_an_algorithm_states_is_the_rounding_of_sums_of_256_products() -> None:
    derived: dict[str, float] = {}
    for n in (1, 3, 5):
        few = ConvSpec(N=1, H=17, W=17, C=256 // n**2, K=256 // n**2, R=n, S=n, pad=(n // 2, n // 2))
        problems = few, replace(few, C=3, K=256), replace(few, H=33, W=33, stride=(2, 2)), replace(few, groups=few.C)
        for spec, (name, a) in itertools.product(problems, ALGORITHMS.items()):
            if a.supports(spec) and (n > 1 or name == "pointwise"):
                sums = ("backward_filter",) if spec.C == 3 else DIRECTIONS
                roundings = max(of_pass(name, spec, direction, compiled=True) for direction in sums)
                derived[name] = max(derived.get(name, 0), limits(roundings, 100_000, "float32").largest)
    assert set(derived) == {name for name in ALGORITHMS if not name.startswith(("grouped", "dilated"))}
    for name, largest in derived.items():
        assert largest <= ALGORITHMS[name].rounding <= 2 * largest, name


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, id=name, marks=[pytest.mark.slow] if spec.K >= 800 else []) for name, spec in PAPERS.items()],
)
def test_float32_stays_within_its_rounding_on_the_papers_layers(spec: ConvSpec) -> None:
    exact = in_double(spec)
    for algorithm in (name for name in ALGORITHMS if ALGORITHMS[name].supports(spec)):
        results = once(algorithm, spec, arrays(spec))
        for name in DIRECTIONS:
            allowed = of_direction(algorithm, spec, name, compiled=True)
            assert_rounds(results[name], exact[name], allowed, f"{algorithm}, {name}")


BATCHES = {f"{n}x{n}": ConvSpec(N=4, H=20, W=20, C=3, K=5, R=n, S=n, pad=(1, 1), dtype="float64") for n in (3, 5)}
BATCHES |= {
    "few channels": replace(BATCHES["3x3"], K=16),
    "dilated": replace(BATCHES["3x3"], pad=(2, 2), dilation=(2, 2)),
    "in groups": replace(BATCHES["3x3"], C=4, K=6, groups=2),
    "depthwise": replace(BATCHES["3x3"], K=3, groups=3),
}


@pytest.mark.parametrize(("algorithm", "spec"), cases(BATCHES))
@pytest.mark.parametrize("keep", [False, True])
def test_kernels_prepared_once_serve_every_batch(algorithm: str, spec: ConvSpec, keep: bool, device: Device) -> None:
    chosen, (x, w, _) = ALGORITHMS[algorithm], (device.backend.from_host(a) for a in arrays(spec))
    conv = bound(chosen, spec, device)
    prepared = conv.prepare(w, device, keep=keep)
    whole = conv.forward(x, prepared, device)
    half = bound(chosen, replace(spec, N=2), device).forward(x[:, :, :2], prepared, device)
    half, whole = map(device.backend.to_host, (half, whole))
    assert_close(chosen, spec, "forward", half, whole[:, :, :2], compiled=device.backend.compiled)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("need_dx", [True, False])
def test_every_problem_can_be_planned(spec: ConvSpec, need_dx: bool) -> None:
    for dtype in ("float32", "float64"):
        chosen = plan(replace(spec, dtype=dtype), Device(), need_dx=need_dx)
        assert all(ALGORITHMS[n].supports(spec) for n in (chosen.forward_algorithm, chosen.backward_algorithm))
        assert 0 < chosen.seconds < 1


@pytest.mark.parametrize("tile", [None, 4, 8, 16])
def test_the_least_workspace_leaves_blocks_that_pay(tile: int | None) -> None:
    """Kernels are transformed for every block of samples: with smaller ones that takes longer than the products."""
    spec = ConvSpec(N=64, H=32, W=32, C=64, K=128, R=5, S=5, pad=(2, 2))
    limit = ALGORITHMS["spectral" if tile is None else f"spectral-{tile}"].workspace(spec)
    tiling = Tiling(spec, tile)
    blocks = Sizes(tiling).choose(limit)
    assert blocks.samples * tiling.tiles >= 32
    assert blocks.kernels >= 64


def test_one_kernel_keeps_to_the_least_workspace_too() -> None:
    spec = ConvSpec(N=64, H=16, W=16, C=64, K=1, R=5, S=5, pad=(2, 2))
    x, w, dy = arrays(spec)
    for threads in (1, 2):
        device = Device(pool=Pool(threads), workspace_limit=ALGORITHMS["spectral"].workspace(spec))
        conv = bound(ALGORITHMS["spectral"], spec, device)
        conv.backward(x, dy, conv.prepare(w, device), device)
        device.pool.close()
        assert device.workspace.nbytes <= device.workspace_limit


def torch_conv2d(spec: ConvSpec, x: Any, w: Any) -> Any:
    """The problem in PyTorch, which has the same padding on both sides."""
    F = pytest.importorskip("torch").nn.functional
    (top, left), (below, right) = spec.pad, spec.pad_end
    x = F.pad(x, (left, left + right, top, top + below))
    return F.conv2d(x, w, stride=spec.stride, dilation=spec.dilation, groups=spec.groups)


@every_case
def test_agrees_with_torch(algorithm: str, spec: ConvSpec) -> None:
    torch = pytest.importorskip("torch")
    exact = replace(spec, dtype="float64")
    host = arrays(exact)
    results = run(ALGORITHMS[algorithm], exact, host, device_of("numpy"))
    x, w, dy = (torch.tensor(a.transpose(order)) for a, order in zip(host, TORCH_ORDER, strict=True))
    x.requires_grad_()
    w.requires_grad_()
    y = torch_conv2d(exact, x, w)
    y.backward(dy)
    for name, theirs, back in (
        ("forward", y.detach(), (2, 3, 0, 1)),
        ("backward_data", x.grad, (2, 3, 0, 1)),
        ("backward_filter", w.grad, (2, 3, 1, 0)),
    ):
        np.testing.assert_allclose(results[name], theirs.numpy().transpose(back), atol=1e-11, err_msg=name)
