"""The stand-in refuses what CuPy refuses, and computes what NumPy computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.standin import STANDIN, DeviceArray

xp = STANDIN.xp
HOST = np.arange(6.0).reshape(2, 3)

REFUSED: dict[str, Callable[[Any], Any]] = {
    "device + host": lambda a: a + HOST,
    "host + device": lambda a: HOST + a,
    "device @ host": lambda a: a @ HOST.T,
    "comparison": lambda a: a == HOST,
    "in place": lambda a: a.__iadd__(HOST),
    "function": lambda a: xp.maximum(a, HOST),
    "function of a host array": lambda a: xp.exp(HOST),
    "list": lambda a: xp.concatenate([a, HOST]),
    "out on the host": lambda a: xp.exp(a, out=HOST.copy()),
    "method": lambda a: a.dot(HOST.T),
    "index": lambda a: a[np.array([0, 1])],
    "mask": lambda a: a[HOST > 1],
    "index among others": lambda a: a[:, np.array([0, 1])],
    "value": lambda a: a.__setitem__(slice(None), HOST),
    "index to set": lambda a: a.__setitem__(np.array([0]), 1.0),
    "host from device": lambda a: np.asarray(a),
    "device into host": lambda a: HOST.copy().__setitem__(slice(None), a),
    "numpy's ufunc": lambda a: np.exp(a),
    "numpy's function": lambda a: np.concatenate([a, a]),
    "numpy's out": lambda a: np.exp(HOST, out=a),
    "strided": lambda a: xp.lib.stride_tricks.as_strided(HOST, (2,), (8,)),
    "hash": lambda a: hash(a),
    "buffer": lambda a: memoryview(a),
}


@pytest.fixture
def a() -> DeviceArray:
    array: Any = STANDIN.from_host(HOST)
    return array


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, a: DeviceArray) -> None:
    with pytest.raises(TypeError):
        REFUSED[case](a)


COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "operators": lambda xp, a: (2 * a - a / 3) ** 2 @ a.T,
    "numpy numbers": lambda xp, a: np.float64(2) * a + np.float64(1),
    "functions": lambda xp, a: xp.where(a > 2, xp.exp(-a), xp.tanh(a)),
    "reductions": lambda xp, a: a.sum(axis=0) + xp.max(a) + a.mean(),
    "views": lambda xp, a: a.reshape(3, 2).transpose(1, 0)[:, ::-1].astype("float32"),
    "indexing": lambda xp, a: a[xp.asarray([1, 0])][:, 1:][a[:, 1:] > 1],
    "lists": lambda xp, a: xp.concatenate([a, xp.zeros((1, 3))]),
    "einsum": lambda xp, a: xp.einsum("ij,kj->ik", a, a),
    "out": lambda xp, a: xp.matmul(a, a.T, out=xp.empty((2, 2))),
    "strided": lambda xp, a: xp.lib.stride_tricks.as_strided(a, (2, 2), (8, 8)),
    "ufunc methods": lambda xp, a: xp.add.reduce(a, axis=1),
    "rows": lambda xp, a: sum(row * i for i, row in enumerate(a)),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_computes_as_numpy_and_stays_on_the_device(case: str, a: DeviceArray) -> None:
    result = COMPUTED[case](xp, a)
    on_host = STANDIN.to_host(result)
    assert isinstance(result, DeviceArray)
    np.testing.assert_array_equal(on_host, COMPUTED[case](np, HOST))


def test_a_single_element_is_still_an_array_of_the_device(a: DeviceArray) -> None:
    for x in (a[1, 2], a.max(), xp.sum(a)):
        assert isinstance(x, DeviceArray)
        assert x.shape == ()


def test_numbers_come_to_the_host_when_asked_for(a: DeviceArray) -> None:
    assert (float(a[1, 0]), int(a.sum()), bool(a[0, 0]), a[0, 1].item()) == (3.0, 15, False, 1.0)
    assert STANDIN.scalar(a.mean()) == 2.5


def test_writes_in_place_through_views_and_out(a: Any) -> None:
    b, row = a, a[0]
    b += 1.0
    row[1:] = a[1, 1:]
    xp.multiply(a, 2.0, out=a)
    assert b is a
    np.testing.assert_array_equal(STANDIN.to_host(a), [[2, 10, 12], [8, 10, 12]])


def test_copies_at_the_border() -> None:
    host = HOST.copy()
    a = STANDIN.from_host(host)
    back = STANDIN.to_host(a)
    a[...] = 0.0
    np.testing.assert_array_equal(host, HOST)
    np.testing.assert_array_equal(back, HOST)
