"""Between float32 and float16, the very numbers of NumPy's own casts, at the speed of memory.

NumPy casts one number after the other and raises a flag for each that is too small: a vector of increments takes it
tens of times longer than sending it. Here blocks that stay in the processor's cache go through a few operations on
their bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.ps.requests import Vector

_BLOCK = 1 << 15  # elements
_FINITE = np.uint32((127 + 16) << 23)  # bits of 2^16: below, no float16 is infinite before rounding
_NORMAL = np.uint32((127 - 14) << 23)  # of 2^-14, the least normal float16
_SMALL = np.uint32((127 - 15 + 23 - 10 + 1) << 23)  # of 0.5: added to a smaller number, it leaves its float16 bits
_REBASE = np.uint32((((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF)  # of the exponent; and half of the last place, less one
_FLOATS = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def cast(vector: Any, dtype: npt.DTypeLike) -> Any:
    """The array in this dtype, itself where it has it. Overflow gives infinity, without a warning."""
    if isinstance(vector, np.ndarray) and vector.flags.c_contiguous:
        if (vector.dtype.name, np.dtype(dtype).name) == ("float32", "float16"):
            return _to_half(vector.reshape(-1)).reshape(vector.shape)
        if (vector.dtype.name, np.dtype(dtype).name) == ("float16", "float32"):
            return _from_half(vector.reshape(-1)).reshape(vector.shape)
    with np.errstate(over="ignore"):
        return vector.astype(dtype, copy=False)


def _to_half(vector: Vector) -> Vector:
    result = np.empty(vector.shape, np.float16)
    scratch = np.empty((3, _BLOCK), np.uint32)
    for lo in range(0, vector.size, _BLOCK):
        block, half = vector[lo : lo + _BLOCK], result[lo : lo + _BLOCK]
        magnitude, bits, small = scratch[:, : block.size]
        np.bitwise_and(block.view(np.uint32), np.uint32(0x7FFFFFFF), out=magnitude)
        if magnitude.max() >= _FINITE:  # infinity and NaN are left to NumPy
            with np.errstate(over="ignore"):
                half[...] = block
            continue
        np.right_shift(magnitude, 13, out=bits)
        bits &= 1  # to the nearest, of two equally near ones to the even
        bits += _REBASE
        bits += magnitude
        bits >>= 13
        np.add(magnitude.view(np.float32), _SMALL.view(np.float32), out=small.view(np.float32))
        small -= _SMALL
        np.copyto(bits, small, where=magnitude < _NORMAL)
        np.bitwise_xor(block.view(np.uint32), magnitude, out=magnitude)  # the sign
        magnitude >>= 16
        np.bitwise_or(bits, magnitude, out=half.view(np.uint16), casting="unsafe")
    return result


def _from_half(vector: Vector) -> Vector:
    result = np.empty(vector.shape, np.float32)
    for lo in range(0, vector.size, _BLOCK):
        np.take(_FLOATS, vector[lo : lo + _BLOCK].view(np.uint16), out=result[lo : lo + _BLOCK], mode="clip")
    return result
