"""The plan: chosen within the limit, explained, refused with a remedy, and only for the shapes it was made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.conv import ALGORITHMS, ConvSpec, plan

SPEC = ConvSpec(N=8, H=16, W=16, C=8, K=16, R=5, S=5, pad=(2, 2))


def test_a_plan_computes_with_the_algorithm_it_names(device: Device) -> None:
    chosen = plan(SPEC, device)
    rng = np.random.default_rng(0)
    shapes = (SPEC.x_shape, SPEC.w_shape, SPEC.y_shape)
    x, w, dy = (device.backend.from_host(rng.standard_normal(s, dtype=np.float32)) for s in shapes)
    algorithm, prepared = ALGORITHMS[chosen.algorithm], chosen.prepare(w, device)
    pairs = [
        (chosen.forward(x, prepared, device), algorithm.forward(SPEC, x, prepared, device)),
        (chosen.backward_data(dy, prepared, device), algorithm.backward_data(SPEC, dy, prepared, device)),
        (chosen.backward_filter(x, dy, device), algorithm.backward_filter(SPEC, x, dy, device)),
    ]
    for planned, direct in pairs:
        np.testing.assert_array_equal(device.backend.to_host(planned), device.backend.to_host(direct))


def test_the_same_problem_is_planned_once() -> None:
    assert plan(SPEC, Device()) is plan(replace(SPEC), Device())
    assert plan(SPEC, Device()) is not plan(SPEC, Device(), workspace_limit=1 << 29)


def test_explains_problem_choice_and_memory() -> None:
    text = plan(SPEC, Device(workspace_limit=1 << 28)).explain()
    for words in ("5×5 8→16 on 16×16, batch 8", plan(SPEC, Device()).algorithm, "GFLOP", "256.0 MiB"):
        assert words in text


def test_the_least_that_is_enough_is_enough_and_one_byte_less_is_refused() -> None:
    need = min(a.workspace(SPEC) for a in ALGORITHMS.values() if a.supports(SPEC))
    assert plan(SPEC, Device(workspace_limit=need)).workspace == need
    with pytest.raises(ValueError, match=rf"workspace_limit={need - 1} bytes: .* needs {need} .*smaller batch"):
        plan(SPEC, Device(), workspace_limit=need - 1)


def test_computes_within_the_plans_own_limit_where_the_device_has_more() -> None:
    limit = min(a.workspace(SPEC) for a in ALGORITHMS.values() if a.supports(SPEC))
    device = Device()
    chosen = plan(SPEC, device, workspace_limit=limit)
    chosen.forward(np.zeros(SPEC.x_shape, "f"), chosen.prepare(np.zeros(SPEC.w_shape, "f"), device), device)
    assert device.workspace.nbytes <= limit


@pytest.mark.parametrize(
    ("wrong", "call"),
    [
        ("w", lambda p, x, w, dy, d: p.prepare(w[..., :1], d)),
        ("x", lambda p, x, w, dy, d: p.forward(x[:1], p.prepare(w, d), d)),
        ("dy", lambda p, x, w, dy, d: p.backward_data(dy[:1], p.prepare(w, d), d)),
        ("x", lambda p, x, w, dy, d: p.backward_filter(x[:1], dy, d)),
        ("dy", lambda p, x, w, dy, d: p.backward_filter(x, dy[:1], d)),
    ],
)
def test_refuses_arrays_of_another_shape(wrong: str, call: Callable[..., Any]) -> None:
    device = Device()
    x, w, dy = (np.zeros(s, "f") for s in (SPEC.x_shape, SPEC.w_shape, SPEC.y_shape))
    with pytest.raises(ValueError, match=rf"^{wrong} has shape .*; plan again"):
        call(plan(SPEC, device), x, w, dy, device)
