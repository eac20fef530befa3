"""Between float32 and float16, the very numbers of NumPy's own casts, at the speed of memory.

NumPy casts one number after the other and raises a flag for each that is too small: a vector of increments takes it
tens of times longer than sending it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.compiled.given import readable
from daskcnn.ps.requests import Vector


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
    from daskcnn.compiled import merges

    result = np.empty(vector.shape, np.float16)
    merges.to_half(readable(vector).view(np.uint32), result.view(np.uint16))
    return result


def _from_half(vector: Vector) -> Vector:
    from daskcnn.compiled import merges

    result = np.empty(vector.shape, np.float32)
    merges.from_half(readable(vector).view(np.uint16), result.view(np.uint32))
    return result
