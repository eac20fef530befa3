"""Norms of gradients and weights, the same to the bit for any number of threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device

BLOCK = 1 << 15
"""Numbers that are added up by one thread, whichever it is; the blocks' sums are then added up in their order."""


def sum_of_squares(vector: Array, device: Device) -> Any:
    """Return the sum of the squares of a vector (n,) of the device, in float64; 0-d, and on the device."""
    if not device.backend.compiled:
        return device.xp.sum(device.xp.square(vector), dtype="float64")
    from daskcnn.compiled.optimizer import squares

    own = device.backend.contiguous(vector)
    sums = np.empty(-(-len(own) // BLOCK))
    device.pool.map(lambda part: squares(own, BLOCK, sums, part.start, part.stop), device.pool.slices(len(sums)))
    return sums.sum()


def clip(grads: Array, places: Iterable[slice], most: float, device: Device) -> None:
    """Scale the gradients at these places so that their norm, all taken together, is at most `most`, in place.

    Pascanu, Mikolov and Bengio 2013, algorithm 1. On a GPU the scale stays on the device.
    """
    parts, xp = [grads[place] for place in places], device.xp
    norm = xp.sqrt(sum(sum_of_squares(part, device) for part in parts))
    scale = (most / xp.maximum(norm, most)).astype(grads.dtype)
    if device.backend.compiled and scale == 1:
        return
    for part in parts:

        def scaled(cut: slice, part: Array = part) -> None:
            part[cut] *= scale

        device.pool.map(scaled, device.pool.slices(len(part), at_least=BLOCK))
