"""Sums over the channels (last axis) of maps and vectors, in blocks on the device's threads.

Broadcasting a few channels is a loop of a few steps for every pixel and sample. Joined with the sample axis it is a
loop of N·C steps for every pixel, which is several times faster. Sums are products with a row of ones, for which BLAS
reads memory at full speed. The blocks are fixed, so sums do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskcnn.arrays import Array, Device
from daskcnn.nn.blocks import each, over_rows, row_blocks


def pixel_rows(x: Array) -> Array:
    """Return x (..., N, C) with one row for every pixel: (pixels, N·C)."""
    return x.reshape(-1, x.shape[-2] * x.shape[-1])


def over_pixels(device: Device, function: Callable[[slice], object], rows: Array) -> None:
    """Call `function` on blocks of the rows (pixels, N·C), on the device's threads."""
    over_rows(device, function, len(rows), rows[0].nbytes)


def pixel_blocks(device: Device, rows: Array) -> list[slice]:
    """Return the blocks of `over_pixels`, which depend only on the map's size."""
    return row_blocks(device, len(rows), rows[0].nbytes)


def sum_rows(xp: Any, rows: Array, C: int) -> Array:
    """Return the sum of (pixels, N·C) over pixels and samples: (C,)."""
    vectors = rows.reshape(-1, C)
    return xp.matmul(xp.ones(len(vectors), rows.dtype), vectors)


def channel_sum(x: Array, device: Device | None = None) -> Array:
    """Return the sum of x (..., N, C) over all axes but the last: (C,)."""
    N, C = x.shape[-2:]
    rows = pixel_rows(x)
    if device is None:
        return rows.sum(axis=0).reshape(N, C).sum(axis=0)
    xp = device.xp
    sums = each(device, lambda block: sum_rows(xp, rows[block], C), pixel_blocks(device, rows))
    return xp.stack(sums).sum(axis=0)
