"""The compiled steps of every optimizer against the expressions over arrays that GPUs compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device, Pool
from daskcnn.nn import SGD, Optimizer, OptimizerState
from daskcnn.nn.optimizers import LARS, AdamW, Averaged, Lookahead
from daskcnn.nn.optimizers.optimizer import AT_LEAST, BLOCK, OneStep, clip, sum_of_squares

OPTIMIZERS = [
    SGD(),
    SGD(0.9),
    SGD(0.9, True, 1e-3),
    SGD(0.0, False, 1e-3),
    AdamW(weight_decay=0.01),
    AdamW(0.5, 0.7, 1e-3),
    LARS(weight_decay=0.01),
    LARS(trust=0.1, momentum=0.0),
    Lookahead(AdamW(weight_decay=0.01), 2, 0.3),
    Lookahead(SGD(0.9), 2, 1.0, last=0.2),
    Averaged(Lookahead(SGD(0.9), 3)),
]
every = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


def given(optimizer: Optimizer, size: int, dtype: str = "float32", count: int = 5) -> tuple[Any, Any, OptimizerState]:
    """Parameters, gradients, and a state after so many steps."""
    rng = np.random.default_rng(0)
    params, grads = (rng.standard_normal(size).astype(dtype) for _ in range(2))
    vectors = np.abs(rng.standard_normal((len(optimizer.vectors), size))).astype(dtype)
    return params, grads, OptimizerState(vectors, count)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decays", [True, False])
@every
def test_a_step_is_the_expression(optimizer: Optimizer, decays: bool, dtype: str) -> None:
    """To the bit: workers that divide samples make the same step on devices of all kinds."""
    params, grads, state = given(optimizer, 1001, dtype)
    kept, (expected, _, new) = grads.copy(), given(optimizer, 1001, dtype)
    optimizer.by_arrays(
        OneStep(params, grads, tuple(state.vectors), 5, 0.1, 0.5, decays, expected, new.vectors), Device()
    )
    found = optimizer.step(params, grads, state, 0.1, Device(), progress=0.5, decays=decays)
    np.testing.assert_array_equal(params, expected)
    np.testing.assert_array_equal(found.vectors, new.vectors)
    np.testing.assert_array_equal(grads, kept)
    assert found.count == 6


@every
def test_any_number_of_threads_gives_the_same_bits(optimizer: Optimizer) -> None:
    one, three = (given(optimizer, 5 * AT_LEAST + 7) for _ in range(2))
    optimizer.step(*one, 0.1, Device())
    optimizer.step(*three, 0.1, Device(pool=Pool(3)))
    np.testing.assert_array_equal(three[0], one[0])
    np.testing.assert_array_equal(three[2].vectors, one[2].vectors)


@every
def test_a_step_to_somewhere_else_leaves_the_old_weights(optimizer: Optimizer) -> None:
    params, grads, state = given(optimizer, 1001)
    before, old, new = params.copy(), state.vectors.copy(), (np.empty_like(params), np.empty_like(state.vectors))
    found = optimizer.step(params, grads, state, 0.1, Device(), out=new)
    np.testing.assert_array_equal(params, before)
    np.testing.assert_array_equal(state.vectors, old)
    optimizer.step(params, grads, state, 0.1, Device())
    np.testing.assert_array_equal(new[0], params)
    np.testing.assert_array_equal(found.vectors, state.vectors)
    assert found.vectors is new[1]


@every
def test_what_comes_from_other_processes_is_read_only(optimizer: Optimizer) -> None:
    """No loop is compiled anew for it: the suite looks at all that were called."""
    params, grads, state = given(optimizer, 1001)
    for array in (params, grads, state.vectors):
        array.flags.writeable = False
    out = np.empty_like(params), np.empty_like(state.vectors)
    optimizer.step(params, grads, state, 0.1, Device(), out=out)
    assert np.isfinite(out[1]).all()


@every
@pytest.mark.parametrize("cut", [slice(0, 400), slice(400, 1001)])
def test_a_part_of_the_parameters_is_stepped_as_a_vector_of_its_own(optimizer: Optimizer, cut: slice) -> None:
    whole, (params, grads, state) = given(optimizer, 1001), given(optimizer, 1001)
    optimizer.step(params[cut], grads[cut], state.part(cut), 0.1, Device())
    own = whole[0][cut].copy(), whole[1][cut].copy(), OptimizerState(whole[2].vectors[:, cut].copy(), 5)
    optimizer.step(*own, 0.1, Device())
    np.testing.assert_array_equal(params[cut], own[0])
    np.testing.assert_array_equal(state.vectors[:, cut], own[2].vectors)
    rest = np.delete(np.arange(1001), np.arange(1001)[cut])
    np.testing.assert_array_equal(params[rest], whole[0][rest])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 5])
def test_sums_of_squares_are_the_same_for_any_number_of_threads(size: int, dtype: str) -> None:
    vector = np.random.default_rng(1).standard_normal(size).astype(dtype)
    one = sum_of_squares(vector, Device())
    assert one == sum_of_squares(vector, Device(pool=Pool(3)))
    assert one == pytest.approx(np.square(vector.astype("float64")).sum(), rel=1e-12)


def test_sums_of_squares_do_not_overflow_in_float32() -> None:
    assert sum_of_squares(np.full(4, 1e30, "float32"), Device()) == pytest.approx(4e60, rel=1e-6)


@pytest.mark.parametrize(("most", "expected"), [(5.0, [3, 0, 7, 4]), (2.5, [1.5, 0, 7, 2]), (10.0, [3, 0, 7, 4])])
def test_gradients_are_clipped_by_the_norm_of_all_places_together(most: float, expected: list[float]) -> None:
    grads = np.array([3.0, 0, 7, 4])
    clip(grads, [slice(0, 2), slice(3, 4)], most, Device())
    assert grads.tolist() == expected
