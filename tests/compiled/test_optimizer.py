"""The compiled steps of an optimiser against the expressions over arrays that GPUs compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device, Pool
from daskcnn.nn import SGD
from daskcnn.nn.optimizer import AT_LEAST, _step

OPTIONS = [(0.0,), (0.9,), (0.9, True), (0.9, True, 1e-3), (0.0, False, 1e-3)]


def vectors(size: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(size).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", OPTIONS)
def test_descent_is_the_expression(options: tuple[Any, ...], dtype: str) -> None:
    params, grads, velocity = whole = vectors(1001, dtype)
    before, expected = [v.copy() for v in whole], vectors(1001, dtype)
    _step(SGD(*options), before[0], before[1], before[2], 0.1, expected[0], expected[2])
    SGD(*options).step(params, grads, velocity, 0.1, Device())
    np.testing.assert_equal([params, velocity], expected[::2])
    np.testing.assert_equal(grads, before[1])


@pytest.mark.parametrize("options", OPTIONS)
def test_any_number_of_threads_gives_the_same_bits(options: tuple[Any, ...]) -> None:
    one, three = vectors(5 * AT_LEAST + 7, "float32"), vectors(5 * AT_LEAST + 7, "float32")
    SGD(*options).step(one[0], one[1], one[2], 0.1, Device())
    SGD(*options).step(three[0], three[1], three[2], 0.1, Device(pool=Pool(3)))
    np.testing.assert_equal(three, one)


@pytest.mark.parametrize("options", OPTIONS)
def test_descent_to_somewhere_else_leaves_the_old_weights(options: tuple[Any, ...]) -> None:
    params, grads, velocity = whole = vectors(1001, "float32")
    before, new = [v.copy() for v in whole], (np.empty_like(params), np.empty_like(velocity))
    SGD(*options).step(params, grads, velocity, 0.1, Device(), out=new)
    np.testing.assert_equal([params, velocity], before[::2])
    SGD(*options).step(before[0], before[1], before[2], 0.1, Device())
    np.testing.assert_equal(new, tuple(before[::2]))
