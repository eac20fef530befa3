"""Cutting a map along its leading axis: a block a thread at a time, small enough that its temporaries stay in cache."""

from __future__ import annotations

from collections.abc import Callable

from daskcnn.arrays import Device

BLOCK_BYTES = {"numpy": 1 << 18}
"""Bytes of a map that one block holds, by backend; others (GPUs) take the whole map, to launch few kernels."""


def blocks(device: Device, rows: int, row_bytes: int) -> list[slice]:
    """Slices of range(rows), at least one a thread where rows allow, each about `BLOCK_BYTES` of the map."""
    limit = BLOCK_BYTES.get(device.backend.name, rows * row_bytes)
    height = max(1, min(-(-rows // device.pool.threads), limit // max(1, row_bytes)))
    return [slice(a, min(a + height, rows)) for a in range(0, rows, height)]


def over_rows(device: Device, function: Callable[[slice], None], rows: int, row_bytes: int) -> None:
    """Call `function` on every block, on the device's threads; it must write to its own rows only."""
    device.pool.map(function, blocks(device, rows, row_bytes))
