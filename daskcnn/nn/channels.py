"""Sums over the pixels and samples of maps and vectors, channel by channel (the last axis).

On processors they are compiled loops over fixed parts, so that sums do not depend on the number of threads.
"""

from __future__ import annotations

from math import prod

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn.scaled import THREAD_NUMBERS

RUN = 1024
"""About how many numbers are added to as many sums at once: enough for vectors, few enough for the first cache."""


def channel_sum(x: Array, device: Device) -> Array:
    """Return the sum of x (..., N, C) over all axes but the last: (C,)."""
    if not device.backend.compiled:
        return x.sum(axis=tuple(range(x.ndim - 1)))
    from daskcnn.compiled import runs

    C = x.shape[-1]
    run = _run(C)
    flat = device.backend.contiguous(x).reshape(-1)
    parts = np.empty((-(-x.size // (runs.RUNS * run)), C))

    def work(part: slice) -> None:
        scratch = device.workspace.take(f"sums {device.pool.thread}", (run,), x.dtype)
        runs.channel_sums(flat, C, run, part.start, part.stop, parts, scratch)

    device.pool.map(work, device.pool.slices(len(parts)))
    return parts.sum(axis=0).astype(x.dtype)


def moments(x: Array, device: Device) -> tuple[Array, Array, Array]:
    """Return mean, what rounding leaves of it, and variance of each channel of x (..., N, C): (C,) each.

    Squares are taken about the mean, so they are exact however far it lies from 0.
    """
    if not device.backend.compiled:
        axes = tuple(range(x.ndim - 1))
        mean = x.mean(axis=axes)
        rest = (x - mean).mean(axis=axes)
        return mean, rest, ((x - mean - rest) ** 2).mean(axis=axes)
    from daskcnn.compiled import batchnorm

    C, count = x.shape[-1], prod(x.shape[:-1])
    run = _run(C)
    flat = device.backend.contiguous(x).reshape(-1)
    parts, whole = np.empty((batchnorm.part_count(x.size, run), 2, C)), np.empty((2, C))

    def work(part: slice) -> None:
        scratch = device.workspace.take(f"moments {device.pool.thread}", (3, run), x.dtype)
        batchnorm.moments(flat, C, run, part.start, part.stop, parts, scratch)

    device.pool.map(work, device.pool.slices(len(parts), at_least=-(-THREAD_NUMBERS // batchnorm.PART)))
    batchnorm.joined(parts, C, run, count, whole)
    mean = whole[0].astype(x.dtype)
    return mean, (whole[0] - mean).astype(x.dtype), whole[1].astype(x.dtype)


def _run(C: int) -> int:
    """Return a multiple of C."""
    return max(1, RUN // C) * C
