"""Winograd's loops are held to its expressions over arrays, at what its tiles and groups are cut by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.conv.minimal import Minimal
from tests.conv.test_conv_laws import DIRECTIONS, arrays, assert_close, cases, run
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
WINOGRAD = {name: a for name, a in ALGORITHMS.items() if name.startswith("winograd")}


@pytest.mark.parametrize(("algorithm", "spec"), [c for c in cases(SPECS) if c.values[0] in WINOGRAD])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loops_compute_what_the_expressions_say(algorithm: str, spec: ConvSpec, dtype: str) -> None:
    spec = replace(spec, dtype=dtype)
    host, chosen = arrays(spec), ALGORITHMS[algorithm]
    loops, expressions = (run(chosen, spec, host, device_of(name)) for name in ("numpy", "standin"))
    for name in DIRECTIONS:
        if dtype == "float32":
            assert_close(chosen, loops[name], expressions[name], name)
        else:
            np.testing.assert_allclose(loops[name], expressions[name], rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("algorithm", WINOGRAD)
def test_a_tight_limit_changes_no_more_than_rounding_does(algorithm: str) -> None:
    R = int(algorithm[-1])
    spec = ConvSpec(N=50, H=12, W=12, C=16, K=24, R=R, S=R, pad=(1, 1))
    host, chosen = arrays(spec), WINOGRAD[algorithm]
    expected = run(chosen, spec, host, Device())
    for limit in (chosen.workspace(spec), 2 * chosen.workspace(spec), 3 << 20):
        for name, result in run(chosen, spec, host, Device(workspace_limit=limit)).items():
            assert_close(chosen, result, expected[name], name)


@pytest.mark.parametrize(("outputs", "taps"), [(2, 3), (4, 3), (4, 5)])
def test_the_matrices_are_minimal_filtering_to_the_last_digits(outputs: int, taps: int) -> None:
    f, rng = Minimal(outputs, taps), np.random.default_rng(0)
    d, g = rng.standard_normal(f.points), rng.standard_normal(taps)
    np.testing.assert_allclose(f.a.T @ ((f.g @ g) * (f.bt @ d)), np.correlate(d, g, "valid"), rtol=1e-12)
