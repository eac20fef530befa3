"""Sizes of tiles in registers and of scratch memory, for planners. Nothing here needs Numba."""

from __future__ import annotations

from typing import NamedTuple

ROWS, BYTES = 6, 64
"""Rows of a tile, and bytes of each: with AVX2 twelve of sixteen registers."""
LANES = BYTES // 4
"""Numbers of which the columns of a product are a multiple: those of a row of float32, or two of float64."""


RUN = 128
"""Numbers of a pixel that go through both steps of a transform at once, so that they stay in the first-level cache."""
STEP = RUN + 16
"""Distance of runs in scratch memory: powers of two would meet in the same lines of the cache."""
MOST_POINTS = 9
"""Points of the largest tile along one axis."""
STEPS = (MOST_POINTS * MOST_POINTS + MOST_POINTS) * STEP
"""Numbers of scratch memory between the two steps of a transform, and for what of a tile lies beyond the map."""


class Tile(NamedTuple):
    """A tile along one axis: inputs, points and outputs; `step` pixels of the input lie from one tile to the next.

    kernels : points that have kernels of their own; those behind the last of these share its kernels
    """

    inputs: int
    step: int
    points: int
    kernels: int
    outputs: int


def apart(rows: int, channels: int) -> int:
    """Return the numbers from the rows of a point to those of the next: full cache lines, but no power of two."""
    return -(-rows * channels // 16) * 16 + 16
