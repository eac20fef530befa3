"""Exponentials that compile to vectors: no library of vector functions is at hand.

Cephes' and every library's way: x = n·ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r - 1, and n goes to the
exponent's bits. A few units in the last place, in float32 and float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskcnn.compiled.loop import inner_as_written


@inner_as_written
def _power_of_two(n: Any, T: Any) -> Any:
    """2ⁿ."""
    if T(1) + T(1e-10) == T(1):  # float32
        return T(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32))
    return T(np.int64((np.int64(n) + 1023) << 52).view(np.float64))


@inner_as_written
def expm1(x: Any, T: Any) -> Any:
    """e^x - 1 for x <= 0, a number of type T; below -80 as at -80."""
    lowest = T(-80)
    x = lowest if x < lowest else x
    n = np.floor(x * T(1.4426950408889634) + T(0.5))
    r = x - n * T(0.693359375) - n * T(-2.121944400546905827679e-4)
    high = T(0)
    if T(1) + T(1e-10) > T(1):  # float64
        high = T(1 / 479001600) + r * T(1 / 6227020800)
        high = T(1 / 362880) + r * (T(1 / 3628800) + r * (T(1 / 39916800) + r * high))
        high = T(1 / 40320) + r * high
    p = T(1 / 24) + r * (T(1 / 120) + r * (T(1 / 720) + r * (T(1 / 5040) + r * high)))
    p = r + r * r * (T(1 / 2) + r * (T(1 / 6) + r * p))
    power = _power_of_two(n, T)
    return power * p + (power - T(1))
