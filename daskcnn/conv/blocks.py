"""Blocks of output pixels of a convolution without padding, and the memory that their columns take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from daskcnn.arrays import Array
from daskcnn.conv.spec import ConvSpec

ALL = slice(None)
FEWEST_PIXELS = 32
"""Rows of the smallest block's matrix: GEMM does not pay with fewer."""
COLUMN_BYTES = 32 << 20
"""Columns of a block beyond which its rows are halved, to stay near the cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The place of a block in the output map: slices of its rows, columns and samples."""

    rows: slice
    cols: slice
    samples: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """(output rows, output columns, samples)."""
        rows, cols, samples = (s.stop - s.start for s in (self.rows, self.cols, self.samples))
        return rows, cols, samples

    def of(self, y: Array, kernels: slice = ALL) -> Array:
        """Return this block of y (out_H, out_W, N, K) as matrices (rows, pixels, K), a view."""
        rows, cols, samples = self.shape
        return y[self.rows, self.cols, self.samples, kernels].reshape(rows, cols * samples, -1)


@dataclass(frozen=True, slots=True)
class Block:
    """The size of a block: output rows, output columns, samples."""

    rows: int
    cols: int
    samples: int

    def numbers(self, spec: ConvSpec) -> int:
        """Return the numbers in the block's columns (pixels, input rows, S·C)."""
        input_rows = (self.rows - 1) * spec.stride[0] + spec.R
        return input_rows * self.cols * self.samples * spec.S * spec.C

    def tiles(self, spec: ConvSpec) -> list[Tile]:
        """Return the whole output, cut into blocks of this size or less."""
        rows = ranges_of(spec.out_H, self.rows)
        pixels = product(ranges_of(spec.out_W, self.cols), ranges_of(spec.N, self.samples))
        return [Tile(r, *p) for p, r in product(pixels, rows)]

    def cut(self, spec: ConvSpec, tiles: int) -> Block:
        """Return the block with its rows halved until the output has `tiles` tiles, or one row each."""
        block = self
        while len(block.tiles(spec)) < tiles and block.rows > 1:
            block = replace(block, rows=-(-block.rows // 2))
        return block


def choose(spec: ConvSpec, pixels: int, room: int) -> Block:
    """Return a block of `pixels` pixels and all rows.

    Fewer rows, then fewer pixels, if its columns exceed `room` bytes.
    """
    block = _of_pixels(spec, pixels, spec.out_H)
    while block.rows > 1 and block.numbers(spec) * spec.itemsize > min(room, COLUMN_BYTES):
        block = replace(block, rows=-(-block.rows // 2))
    while pixels > FEWEST_PIXELS and block.numbers(spec) * spec.itemsize > room:
        pixels //= 2
        block = _of_pixels(spec, pixels, block.rows)
    return block


def least_bytes(spec: ConvSpec) -> int:
    """Return the bytes of the smallest block's columns."""
    return _of_pixels(spec, FEWEST_PIXELS, 1).numbers(spec) * spec.itemsize


def ranges_of(size: int, step: int) -> list[slice]:
    """Cut range(size) into slices of `step`; the last one may be shorter."""
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]


def nearly_equal(size: int, at_most: int) -> int:
    """Return the step that cuts range(size) into as few slices of `at_most` as possible, nearly equal."""
    return -(-size // -(-size // at_most))


def _of_pixels(spec: ConvSpec, pixels: int, rows: int) -> Block:
    samples = nearly_equal(spec.N, pixels)
    # a block of several columns holds all samples: its output is one matrix then
    cols = nearly_equal(spec.out_W, max(1, pixels // spec.N)) if samples == spec.N else 1
    return Block(rows, cols, samples)
