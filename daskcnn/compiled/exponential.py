"""Exponentials that compile to vectors: no library of vector functions is at hand.

Cephes' and every library's way: x = n·ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r - 1, and n goes to the
exponent's bits. A few units in the last place, in float32 and float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskcnn.compiled.loop import inner_in_order


@inner_in_order
def _power_of_two(n: Any, T: Any) -> Any:
    """2ⁿ."""
    if T(1) + T(1e-10) == T(1):  # float32
        return T(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32))
    return T(np.int64((np.int64(n) + 1023) << 52).view(np.float64))


@inner_in_order
def exp(x: Any, T: Any) -> Any:
    """e^x for x <= 0, a number of type T; 0 where its exponent does not fit."""
    power, p = _factors(x, T)
    return power * p + power


@inner_in_order
def expm1(x: Any, T: Any) -> Any:
    """e^x - 1, likewise, exact near 0."""
    power, p = _factors(x, T)
    return power * p + (power - T(1))


@inner_in_order
def _factors(x: Any, T: Any) -> tuple[Any, Any]:
    """2ⁿ and e^r - 1."""
    double = T(1) + T(1e-10) > T(1)
    lowest = T(-709) if double else T(-88)  # where the exponent's bits become 0
    x = lowest if x < lowest else x
    n = np.floor(x * T(1.4426950408889634) + T(0.5))
    r = x - n * T(0.693359375) - n * T(-2.121944400546905827679e-4)
    high = T(0)
    if double:
        high = T(1 / 479001600) + r * T(1 / 6227020800)
        high = T(1 / 362880) + r * (T(1 / 3628800) + r * (T(1 / 39916800) + r * high))
        high = T(1 / 40320) + r * high
    p = T(1 / 24) + r * (T(1 / 120) + r * (T(1 / 720) + r * (T(1 / 5040) + r * high)))
    p = r + r * r * (T(1 / 2) + r * (T(1 / 6) + r * p))
    return _power_of_two(n, T), p
