"""The plan: chosen within the limit, explained, refused with a remedy, and only for the shapes it was made for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import NUMPY, Device, Pool
from daskcnn.conv import ALGORITHMS, ConvSpec, plan, planner
from daskcnn.conv.planner import candidates, forget_plans, readable, versions
from daskcnn.conv.timings import Entry, key, memory_of
from tests.conv.fake_algorithm import FakeAlgorithm, Only
from tests.conv.test_conv_laws import bound

SPEC = ConvSpec(N=8, H=16, W=16, C=8, K=16, R=5, S=5, pad=(2, 2))


@pytest.mark.parametrize("names", [("spectral", "spectral"), ("winograd-4x5", "spectral"), ("spectral", "im2col")])
def test_a_plan_computes_each_way_with_the_algorithm_it_names(device: Device, names: tuple[str, str]) -> None:
    chosen = replace(plan(SPEC, device), forward_algorithm=names[0], backward_algorithm=names[1])
    rng = np.random.default_rng(0)
    shapes = (SPEC.x_shape, SPEC.w_shape, SPEC.y_shape)
    x, w, dy = (device.backend.from_host(rng.standard_normal(s, dtype=np.float32)) for s in shapes)
    there, back = (bound(ALGORITHMS[name], SPEC, device) for name in names)
    own, form, conv = there.prepare(w, device), back.prepare(w, device), chosen.bind(device.backend)
    prepared = conv.prepare(w, device)
    pairs = [
        (conv.forward(x, prepared, device), there.forward(x, own, device)),
        (conv.backward_data(dy, prepared, device), back.backward_data(dy, form, device)),
        (conv.backward_filter(x, dy, device), back.backward_filter(x, dy, device)),
        *zip(conv.backward(x, dy, prepared, device), back.backward(x, dy, form, device), strict=True),
    ]
    for planned, direct in pairs:
        np.testing.assert_array_equal(device.backend.to_host(planned), device.backend.to_host(direct))


def test_kernels_kept_for_many_passes_are_kept_for_the_way_there_alone(device: Device) -> None:
    chosen = replace(plan(SPEC, device), forward_algorithm="im2col", backward_algorithm="spectral")
    w = device.backend.from_host(np.ones(SPEC.w_shape, "f"))
    assert chosen.bind(device.backend).prepare(w, device, keep=True).backward.transformed is None
    spectral = replace(chosen, forward_algorithm="spectral").bind(device.backend)
    assert spectral.prepare(w, device, keep=True).forward.transformed is not None


def test_the_same_problem_is_planned_once() -> None:
    assert plan(SPEC, Device()) is plan(replace(SPEC), Device())
    assert plan(SPEC, Device()) is not plan(SPEC, Device(), workspace_limit=1 << 29)
    assert plan(SPEC, Device(pool=Pool(2))) is not plan(SPEC, Device())


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
    conv = plan(SPEC, device, workspace_limit=limit).bind(device.backend)
    conv.forward(np.zeros(SPEC.x_shape, "f"), conv.prepare(np.zeros(SPEC.w_shape, "f"), device), device)
    assert device.workspace.nbytes <= limit


@pytest.mark.parametrize(
    ("wrong", "call"),
    [
        ("w", lambda p, x, w, dy, d: p.prepare(w[..., :1], d)),
        ("x", lambda p, x, w, dy, d: p.forward(x[:1], p.prepare(w, d), d)),
        ("dy", lambda p, x, w, dy, d: p.backward_data(dy[:1], p.prepare(w, d), d)),
        ("x", lambda p, x, w, dy, d: p.backward_filter(x[:1], dy, d)),
        ("dy", lambda p, x, w, dy, d: p.backward_filter(x, dy[:1], d)),
        ("x", lambda p, x, w, dy, d: p.backward(x[:1], dy, p.prepare(w, d), d)),
        ("dy", lambda p, x, w, dy, d: p.backward(x, dy[:1], p.prepare(w, d), d)),
    ],
)
def test_refuses_arrays_of_another_shape(wrong: str, call: Callable[..., Any]) -> None:
    device = Device()
    x, w, dy = (np.zeros(s, "f") for s in (SPEC.x_shape, SPEC.w_shape, SPEC.y_shape))
    with pytest.raises(ValueError, match=rf"^{wrong} has shape .*; plan again"):
        call(planner.bound(SPEC, device), x, w, dy, device)


# --- the choice, among algorithms made up for it ---


def remember(
    spec: ConvSpec = SPEC, threads: int = 1, limit: int = 1 << 30, **seconds: tuple[float, float, float]
) -> None:
    entry = Entry(versions=versions(spec), seconds=seconds)
    memory_of(NUMPY).remember({key(spec, threads, limit): entry})
    forget_plans()


def test_the_predicted_best_is_chosen_and_said(only: Only) -> None:
    only(FakeAlgorithm("slow", 0.3), FakeAlgorithm("fast", 0.1), FakeAlgorithm("middle", 0.2))
    chosen = plan(SPEC, Device())
    assert (chosen.algorithm, chosen.measured) == ("fast", False)
    assert chosen.reason == "predicted 200 ms against middle's 400 ms"
    assert chosen.seconds == pytest.approx(0.2, rel=1e-3)
    assert chosen.flops_per_second == 3 * SPEC.flops / chosen.seconds
    assert [c.name for c in candidates(SPEC, Device())] == ["fast", "middle", "slow"]


def test_a_measurement_goes_before_predictions(tuned: None, only: Only) -> None:
    only(FakeAlgorithm("a", 0.1), FakeAlgorithm("b", 0.2), FakeAlgorithm("c", 0.05))
    remember(a=(1.0, 1.0, 0.1), b=(0.5, 1.0, 5.0))
    chosen = plan(SPEC, Device())
    assert (chosen.algorithm, chosen.measured, chosen.seconds) == ("b", True, 1.5)
    assert chosen.reason == "measured 1.5 s against a's 2 s"
    assert [c.name for c in candidates(SPEC, Device())] == ["b", "a", "c"]
    first = plan(SPEC, Device(), need_dx=False)
    assert (first.algorithm, first.seconds) == ("b, backward a", 0.6)
    assert first.reason == "measured 600 ms against a's 1.1 s"
    assert first.flops_per_second == 2 * SPEC.flops / 0.6


@pytest.mark.parametrize(
    ("samples", "nearest"), [(8, 8), (9, 8), (16, 24), (4, 8), (23, 24), (48, 24), (3, 0), (49, 0)]
)
def test_a_share_of_a_step_goes_by_the_nearest_size_that_was_measured(
    samples: int, nearest: int, tuned: None, only: Only
) -> None:
    only(FakeAlgorithm("a", 0.1), FakeAlgorithm("b", 0.2), FakeAlgorithm("c", 0.3))
    remember(b=(8.0, 8.0, 1.0), a=(16.0, 16.0, 1.0))
    remember(replace(SPEC, N=24), c=(24.0, 24.0, 1.0), a=(48.0, 48.0, 1.0))
    spec = replace(SPEC, N=samples)
    chosen, best = plan(spec, Device()), candidates(spec, Device())[0]
    assert (chosen.algorithm, chosen.measured) == {8: ("b", True), 24: ("c", True), 0: ("a", False)}[nearest]
    assert best.samples == nearest
    if nearest:
        assert chosen.seconds == pytest.approx(2 * samples)
    if nearest not in (0, samples):
        assert chosen.reason.startswith(f"measured with {nearest} samples, in proportion {readable(2.0 * samples)} ")


def test_a_near_size_of_another_problem_says_nothing(tuned: None, only: Only) -> None:
    only(FakeAlgorithm("a", 0.1), FakeAlgorithm("b", 0.2))
    remember(replace(SPEC, N=9, W=17), a=(2.0, 2.0, 1.0), b=(1.0, 1.0, 1.0))
    remember(replace(SPEC, N=9), threads=2, a=(2.0, 2.0, 1.0), b=(1.0, 1.0, 1.0))
    assert plan(SPEC, Device()).algorithm == "a"


def test_the_fastest_of_each_way_is_chosen(tuned: None, only: Only) -> None:
    only(*(FakeAlgorithm(name, 0.1, workspace=size) for name, size in (("a", 3), ("b", 2), ("c", 1))))
    remember(a=(1.0, 3.0, 1.0), b=(2.0, 1.0, 3.0), c=(1.4, 1.4, 2.0))
    chosen = plan(SPEC, Device())
    assert (chosen.forward_algorithm, chosen.backward_algorithm) == ("a", "b")
    assert (chosen.algorithm, chosen.workspace, chosen.seconds) == ("a, backward b", 3, 2.0)
    assert chosen.reason == "measured 2 s against c's 2.8 s"
    assert plan(SPEC, Device(), need_dx=False).algorithm == "a"


@pytest.mark.parametrize("device", [Device(pool=Pool(2)), Device(workspace_limit=1 << 29)])
def test_a_measurement_under_other_conditions_says_nothing(device: Device, tuned: None, only: Only) -> None:
    only(FakeAlgorithm("a", 0.1), FakeAlgorithm("b", 0.2))
    remember(a=(1.0, 1.0, 1.0), b=(0.5, 0.5, 0.5))
    assert plan(SPEC, Device()).algorithm == "b"
    assert plan(SPEC, device).algorithm == "a"


def test_a_measurement_of_other_versions_says_nothing(tuned: None, only: Only) -> None:
    only(FakeAlgorithm("a", 0.1), FakeAlgorithm("b", 0.2))
    remember(a=(1.0, 1.0, 1.0), b=(0.5, 0.5, 0.5))
    only(FakeAlgorithm("a", 0.1), FakeAlgorithm("b", 0.2, version=2))
    assert plan(SPEC, Device()).algorithm == "a"


def test_who_takes_too_much_memory_is_left_out_measured_or_not(tuned: None, only: Only) -> None:
    only(FakeAlgorithm("large", 0.1, workspace=1001), FakeAlgorithm("small", 0.9, workspace=1000))
    remember(limit=1000, large=(1.0, 1.0, 1.0))
    chosen = plan(SPEC, Device(workspace_limit=1000))
    assert (chosen.algorithm, chosen.measured) == ("small", False)
    assert "more than the workspace limit for large" in chosen.reason


def test_the_fallback_says_what_was_not_supported(only: Only) -> None:
    only(FakeAlgorithm("any", 0.9), FakeAlgorithm("quick", 0.1, strides=False))
    chosen = plan(replace(SPEC, stride=(2, 1)), Device())
    assert chosen.algorithm == "any"
    assert "stride (2, 1) is not supported by quick" in chosen.reason


def test_exact_leaves_out_who_rounds_more_and_says_so(only: Only) -> None:
    only(FakeAlgorithm("rough", 0.1, rounding=1e-5), FakeAlgorithm("fine", 0.9))
    assert plan(SPEC, Device()).algorithm == "rough"
    chosen = plan(SPEC, Device(exact=True))
    assert chosen.algorithm == "fine"
    assert "not exact enough: rough" in chosen.reason
    assert [c.name for c in candidates(SPEC, Device(exact=True))] == ["fine"]


def test_exact_names_no_algorithm_that_it_would_not_take(only: Only) -> None:
    only(FakeAlgorithm("rough", 0.1, workspace=40, rounding=1e-5), FakeAlgorithm("fine", 0.9, workspace=50))
    with pytest.raises(ValueError, match="fine, the least demanding"):
        plan(SPEC, Device(workspace_limit=39, exact=True))


def test_layers_of_3x3_take_winograd_unless_they_are_to_be_exact() -> None:
    spec = ConvSpec(N=128, H=16, W=16, C=128, K=128, R=3, S=3, pad=(1, 1))
    assert plan(spec, Device()).algorithm == "winograd-4x3"
    exact = plan(spec, Device(exact=True))
    assert "winograd-4x3" not in (exact.forward_algorithm, exact.backward_algorithm)


def test_strides_fall_back_to_im2col() -> None:
    strided = plan(replace(SPEC, C=16, stride=(2, 2)), Device())
    assert strided.algorithm == "im2col"
    assert re.search(r"stride \(2, 2\) is not supported by .*spectral", strided.reason)


def test_groups_and_dilation_are_planned_and_said() -> None:
    dilated = plan(replace(SPEC, C=16, dilation=(2, 1)), Device())
    assert dilated.forward_algorithm.startswith("dilated-")
    assert "dilation 2×1" in dilated.explain()
    with_stride = plan(replace(SPEC, C=16, stride=(2, 2), dilation=(2, 1)), Device())
    assert with_stride.algorithm == "im2col"
    assert re.search(r"stride \(2, 2\) with dilation \(2, 1\) is not supported by .*spectral", with_stride.reason)
    assert "grouped" not in with_stride.reason
    depthwise = plan(replace(SPEC, C=16, K=16, groups=16), Device())
    assert depthwise.algorithm == "depthwise"
    assert "groups 16" in depthwise.explain()
    half = plan(replace(SPEC, C=64, K=64), Device())
    in_groups = plan(replace(SPEC, C=128, K=128, groups=2), Device())
    assert in_groups.forward_algorithm == f"grouped-{half.forward_algorithm}"
    assert 1.9 * half.seconds < in_groups.seconds < 4 * half.seconds


def test_the_refusal_names_the_least_demanding(only: Only) -> None:
    only(FakeAlgorithm("a", 0.1, workspace=50), FakeAlgorithm("b", 0.2, workspace=40))
    with pytest.raises(ValueError, match=r"workspace_limit=39 bytes: b, .* needs 40 for .*raise the limit"):
        plan(SPEC, Device(workspace_limit=39))


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.012345, "12.3 ms"), (4.2e-5, "42 µs"), (1.0, "1 s"), (120.0, "120 s")]
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert readable(seconds) == text


def test_a_problem_is_bound_once_until_plans_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    first, device = planner.bound(SPEC, Device()), Device()
    x, w = np.ones(SPEC.x_shape, SPEC.dtype), np.ones(SPEC.w_shape, SPEC.dtype)
    prepared = first.prepare(w, device)
    with monkeypatch.context() as without:
        without.setattr(planner, "ALGORITHMS", {})
        first.forward(x, prepared, device)
        assert planner.bound(replace(SPEC), device) is first
        assert planner.bound(SPEC, Device()).plan is plan(SPEC, device)
    forget_plans()
    assert planner.bound(SPEC, device) is not first
