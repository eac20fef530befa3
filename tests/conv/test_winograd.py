"""Winograd's loops are held to its expressions over arrays, at what its tiles and groups are cut by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daskcnn.arrays import Device, Pool
from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.minimal import Minimal
from daskcnn.conv.winograd import _portions
from tests.conv.test_conv_laws import DIRECTIONS, arrays, assert_close, bound, cases, run
from tests.standin import device_of

SPECS = {
    f"{C} to {K}, {H}x{W}, {N} samples, {R}x{R}": ConvSpec(N=N, H=H, W=W, C=C, K=K, R=R, S=R, pad=(R // 2, R // 2))
    for R in (3, 5)
    for N, H, W, C, K in (
        *(
            (1, 5, 5, 1, 1),
            (7, 1, 9, 2, 3),
            (130, 3, 5, 3, 2),
            (3, 13, 6, 17, 5),
            (5, 8, 8, 16, 64),
            (2, 4, 4, 1024, 8),
        ),
        *((2, 2, 2, 8, 1024), (40, 9, 4, 64, 16), (16, 20, 20, 32, 48)),
    )
}
SPECS |= {
    f"{name}, every second": replace(spec, stride=(2, 2), pad=(1 + 2 * (spec.H == 13), 1))
    for name, spec in SPECS.items()
    if spec.R == 3
}
WINOGRAD = {name: a for name, a in ALGORITHMS.items() if name.startswith("winograd")}
OF_NAME = {
    "winograd-2x3": Minimal.of(2, 3),
    "winograd-4x3": Minimal.of(4, 3),
    "winograd-4x5": Minimal.of(4, 5),
    "winograd-4x3-stride2": Minimal.halving(4),
}
MINIMAL = {name: OF_NAME[name.removesuffix("-whole")] for name in WINOGRAD}


@pytest.mark.parametrize(("algorithm", "spec"), [c for c in cases(SPECS) if c.values[0] in WINOGRAD])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loops_compute_what_the_expressions_say(algorithm: str, spec: ConvSpec, dtype: str) -> None:
    spec = replace(spec, dtype=dtype)
    host, chosen = arrays(spec), ALGORITHMS[algorithm]
    loops, expressions = (run(chosen, spec, host, device_of(name)) for name in ("numpy", "standin"))
    for name in DIRECTIONS:
        assert_close(chosen, spec, name, loops[name], expressions[name], compiled=False)


def shared(name: str, N: int, H: int, W: int) -> ConvSpec:
    """A problem whose samples are shared out for both gradients at once."""
    f = MINIMAL[name]
    stride, pad = (f.stride, f.stride), (f.taps // 2, f.taps // 2)
    return ConvSpec(N=N, H=H, W=W, C=8, K=12, R=f.taps, S=f.taps, pad=pad, stride=stride, dtype="float64")


@pytest.mark.parametrize("algorithm", WINOGRAD)
@pytest.mark.parametrize(("N", "H", "W"), [(130, 17, 9), (41, 18, 36), (600, 8, 16), (2000, 5, 4)])
def test_both_gradients_at_once_are_those_of_the_expressions(algorithm: str, N: int, H: int, W: int) -> None:
    spec, chosen = shared(algorithm, N, H, W), WINOGRAD[algorithm]
    portions = _portions(MINIMAL[algorithm], spec, 1 << 30)
    assert portions is not None
    assert len(portions.samples) in (4, 8, 16)
    host = arrays(spec)

    def both(device: Device) -> list[np.ndarray]:
        x, w, dy = map(device.backend.from_host, host)
        conv = bound(chosen, spec, device)
        return [device.backend.to_host(a) for a in conv.backward(x, dy, conv.prepare(w, device), device)]

    found = map(both, (Device(), Device(pool=Pool(3)), device_of("standin")))
    for one, three, expected, name in zip(*found, DIRECTIONS[1:], strict=True):
        np.testing.assert_array_equal(one, three)
        assert_close(chosen, spec, name, one, expected, compiled=False)


@pytest.mark.parametrize("algorithm", WINOGRAD)
def test_kept_kernels_and_little_memory_change_both_gradients_by_no_more_than_rounding(algorithm: str) -> None:
    spec, chosen = shared(algorithm, 130, 17, 9), WINOGRAD[algorithm]
    x, w, dy = arrays(spec)

    def both(device: Device, *, keep: bool = False) -> tuple[np.ndarray, np.ndarray]:
        conv = bound(chosen, spec, device)
        return conv.backward(x, dy, conv.prepare(w, device, keep=keep), device)

    expected, limits = both(Device()), [chosen.workspace(spec) * k // 4 for k in (4, 8, 16, 40)]
    for pair in (*(both(Device(workspace_limit=limit)) for limit in limits), both(Device(), keep=True)):
        for one, other, name in zip(pair, expected, DIRECTIONS[1:], strict=True):
            assert_close(chosen, spec, name, one, other)


@pytest.mark.parametrize("algorithm", WINOGRAD)
def test_a_tight_limit_changes_no_more_than_rounding_does(algorithm: str) -> None:
    f = MINIMAL[algorithm]
    spec = ConvSpec(N=50, H=12, W=12, C=16, K=24, R=f.taps, S=f.taps, pad=(1, 1), stride=(f.stride, f.stride))
    host, chosen = arrays(spec), WINOGRAD[algorithm]
    expected = run(chosen, spec, host, Device())
    for limit in (chosen.workspace(spec), 2 * chosen.workspace(spec), 3 << 20):
        for name, result in run(chosen, spec, host, Device(workspace_limit=limit)).items():
            assert_close(chosen, spec, name, result, expected[name])


@pytest.mark.parametrize(("outputs", "taps"), [(2, 3), (4, 2), (4, 3), (4, 5)])
def test_the_matrices_are_minimal_filtering_to_the_last_digits(outputs: int, taps: int) -> None:
    f, rng = Minimal.of(outputs, taps), np.random.default_rng(0)
    d, g = rng.standard_normal(f.tile.points), rng.standard_normal(taps)
    np.testing.assert_allclose(f.a.T @ ((f.g @ g) * (f.bt @ d)), np.correlate(d, g, "valid"), rtol=1e-12)


@pytest.mark.parametrize("turned", [False, True])
def test_points_of_kernels_of_five_taps_come_in_pairs(turned: bool) -> None:
    """Loops compute even and odd taps once for both points of a pair."""
    g = Minimal.of(4, 5).kernel_matrix(turned)
    np.testing.assert_array_equal(g[2:7:2], g[1:7:2] * [1, -1, 1, -1, 1])
    assert (g[0, 1:4] == 0).all()
    assert (g[7, 1:4] == 0).all()


@pytest.mark.parametrize("name", ["winograd-2x3", "winograd-4x3", "winograd-4x5"])
@pytest.mark.parametrize("N", [1, 3, 12])
def test_a_whole_minibatch_makes_the_gradients_of_portions(name: str, N: int) -> None:
    spec = shared(name, N, 17, 9)
    x, w, dy = arrays(spec)
    for device in (Device(), Device(pool=Pool(3))):
        found, expected = (
            conv.backward(x, dy, conv.prepare(w, device), device)
            for conv in (bound(ALGORITHMS[each], spec, device) for each in (f"{name}-whole", name))
        )
        for one, other, direction in zip(found, expected, DIRECTIONS[1:], strict=True):
            assert_close(ALGORITHMS[name], spec, direction, one, other)


def test_every_second_output_needs_as_many_points_as_inputs() -> None:
    f, rng = Minimal.halving(4), np.random.default_rng(0)
    d, g, own = rng.standard_normal(9), rng.standard_normal(3), f.kernels_of[: f.tile.points]
    y = f.a.T @ ((f.g @ g)[own] * (f.bt @ d))
    np.testing.assert_allclose(y, np.correlate(d, g, "valid")[::2], rtol=1e-12)
    assert (f.tile.points, f.tile.kernels, f.tile.step) == (9, 6, 8)


def test_its_gradient_is_what_inputs_receive_from_outputs() -> None:
    """A tile of the gradient begins at an odd input, for a padding of 1."""
    f, rng = Minimal.halving(4).backward, np.random.default_rng(0)
    assert f is not None
    dy, g = rng.standard_normal(5), rng.standard_normal(3)
    dx = np.zeros(11)
    for i, change in enumerate(dy):
        dx[2 * i : 2 * i + 3] += change * g
    made = f.a.T @ ((f.kernel_matrix(turned=True) @ g)[f.kernels_of[: f.tile.points]] * (f.bt @ dy))
    np.testing.assert_allclose(made, dx[1:9], rtol=1e-12)
