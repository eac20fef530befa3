"""What travels between the tasks of a sharded step, and what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed.protocol import deserialize_bytes, serialize_bytelist
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from daskcnn.cluster.layers.task_context import Claim, OutOfStep, Shelf, TaskResult, wire_bytes
from daskcnn.sharded.plan_parts import ALL


def _sent(result: TaskResult) -> TaskResult:
    """As Dask sends it."""
    arrived: TaskResult = deserialize_bytes(b"".join(serialize_bytelist(result)))
    return arrived


def test_parts_and_edges_travel_as_they_are() -> None:
    x = np.arange(12, dtype=np.float64).reshape(3, 4)
    edge: Any = ({"conv1": {"w": x}}, {})
    came = _sent(TaskResult("cpu-0", {ALL: x, "cpu-1": -x}, {"left": edge}))
    np.testing.assert_array_equal(came.part("cpu-1"), -x)
    np.testing.assert_array_equal(came.part("cpu-2"), x)
    np.testing.assert_array_equal(came.edges["left"][0]["conv1"]["w"], x)
    assert (came.maker, came.arrived) == ("cpu-0", True)


def test_a_claim_travels_in_place_of_the_parts() -> None:
    claim = Claim("tcp://10.0.0.7:4000", "run", 2, 17, ("part", 0, 1))
    came = _sent(TaskResult("cpu-0", {}, wire="float16", claim=claim))
    assert (came.claim, came.parts, came.arrived) == (claim, {}, True)


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_the_maker_may_have_a_part_as_it_arrives_elsewhere(wire: str) -> None:
    result = TaskResult("cpu-0", {ALL: np.random.default_rng(0).standard_normal(100).astype(np.float32)}, wire=wire)
    there = _sent(result)
    np.testing.assert_array_equal(result.as_sent("cpu-0"), there.as_sent("cpu-1"))
    np.testing.assert_array_equal(there.as_sent("cpu-1"), there.part("cpu-1"))
    assert np.array_equal(result.as_sent("cpu-0"), result.part("cpu-0")) == (wire == "float32")


numbers = st.floats(-1, 1, width=32, allow_subnormal=False)


@given(arrays(np.float32, st.integers(1, 40), elements=numbers), st.integers(-80, 60))
@example(np.array([2.0**-60, 0.0], np.float32), -80)  # a factor of 2^155, which float32 has not
def test_float16_keeps_three_digits_of_any_scale(x: np.ndarray, exponent: int) -> None:
    """Gradients are often below the least number that float16 has."""
    x = (x * np.float32(2.0**exponent)).astype(np.float32)
    came = _sent(TaskResult("cpu-0", {ALL: x}, wire="float16")).part("cpu-1")
    assert came.dtype == np.float32
    largest = np.abs(x).max()
    np.testing.assert_allclose(came, x, rtol=2**-11, atol=max(largest * 2.0**-38, 2.0**-144))


def test_what_is_not_finite_stays_so_on_float16() -> None:
    x = np.array([1.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_sent(TaskResult("cpu-0", {ALL: x}, wire="float16")).part("cpu-1"), x)


def test_float16_takes_half_of_the_bytes() -> None:
    x = np.random.default_rng(0).standard_normal((100, 1000), np.float32)
    assert (wire_bytes(x, "float32"), wire_bytes(x, "float16")) == (x.nbytes, x.nbytes // 2)
    for wire in ("float32", "float16"):
        sent = sum(memoryview(frame).nbytes for frame in serialize_bytelist(TaskResult("cpu-0", {ALL: x}, wire=wire)))
        assert 0 <= sent - wire_bytes(x, wire) < 1500


def test_a_shelf_has_what_was_put_there_for_this_step() -> None:
    shelf = Shelf(1)
    shelf.put("kept", 3, "residual")
    assert shelf.get("kept", 3) == "residual"
    with pytest.raises(OutOfStep, match=r"step 4: kept is of step 3; a task was run twice"):
        shelf.get("kept", 4)
    assert shelf.take("kept", 3) == "residual"
    with pytest.raises(OutOfStep, match="step 3: kept is of step None"):
        shelf.take("kept", 3)
