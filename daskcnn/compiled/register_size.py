"""Sizes of the tiles whose sums stay in registers. No Numba: planners ask for them."""

from __future__ import annotations

ROWS, BYTES = 6, 64
"""Rows of a tile, and bytes of each: with AVX2 twelve of sixteen registers."""
LANES = BYTES // 4
"""Numbers of which the columns of a product are a multiple: those of a row of float32, or two of float64."""
