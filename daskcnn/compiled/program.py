"""The operations of a chain of local layers on a block of a map, and the places of their numbers in scratch memory.

Plain Python, without Numba: layers name their operations with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RELU, SIGMOID, TANH, LEAKY_RELU, DROPOUT, LRN, GELU, SILU, SCALE, SCALE_RELU, MAX, AVERAGE, L2 = range(13)
"""The operations that `chain` knows."""

CODE, SIDE, REACH, X, Y, KEPT, DX, DY, SIZE, STEP, SALT, THRESHOLD = range(12)
"""Columns of a program's table. The last row stands for the chain's output."""

BY_OUTPUT, BY_INPUT = (RELU, SIGMOID, TANH, LEAKY_RELU), (GELU, SILU)
"""Activations that go back with their output, and those that go back with their input. Loops compare with tuples."""
NORMALISES, POOLS = (SCALE, SCALE_RELU), (MAX, AVERAGE, L2)
KEEPS_PLACE = (*BY_OUTPUT, DROPOUT)
"""Operations that may write over their input: they go back with their output, or with what they keep."""
NEEDS_OUTPUT = (*BY_OUTPUT, SCALE_RELU)
"""Operations that go back with their output."""

TILED = 7
"""Numbers by channel of batch normalising at a chain's head: `batchnorm`'s five, and two sums."""

PARTS = 16
"""Parts of a map, for threads to share: the same for any number of threads, because sums are taken part by part."""
LEAST_PART = 1 << 14
"""Numbers in a part worth a thread's while: about ten microseconds."""
RUN = 512
"""Numbers of one pixel in a block whose windows overlap: enough for vectors, few enough for many pixels."""


class Operation(NamedTuple):
    """One layer's part of a chain.

    Attributes
    ----------
    code : which loop
    numbers : its constants, in the network's dtype
    size, step : pixels a side of a window, and from one to the next
    salt, threshold : of dropout: of its keys, and the least of 2²⁴ drawn numbers that is kept
    """

    code: int
    numbers: tuple[float, ...] = ()
    size: int = 1
    step: int = 1
    salt: int = 0
    threshold: int = 0


@dataclass(frozen=True)
class Program:
    """Operations on maps of one shape, laid out for a block.

    Attributes
    ----------
    table : (operations + 1, columns) int64
    numbers : (operations, 8), of each operation, in the network's dtype
    block : rows and columns of the output, and samples, of a block
    parts : (parts, 4): first and last row of the output and first and last sample
    scratch : scratch numbers of a thread
    tiled : rows and columns that batch normalising needs besides: by channel, for each sample of a block
    bits : keys of random numbers that dropout needs besides
    out_shape : (H, W, N, C) of the output
    tiles : True where windows meet without overlap and leave no pixel out
    """

    table: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.floating]
    block: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    scratch: int
    tiled: tuple[int, int]
    bits: int
    out_shape: tuple[int, int, int, int]
    tiles: bool

    @classmethod
    def of(
        cls, operations: Sequence[Operation], shape: tuple[int, ...], dtype: np.dtype, limit: int, *, goes_back: bool
    ) -> Program:
        """Return the program for maps of this shape (H, W, N, C) whose blocks take about `limit` bytes."""
        operations = [_clipped(operation, shape[-1]) for operation in _fused(operations)]
        (H, W, N, C), windows = shape, _windows(operations)
        side, reach = windows[0]
        out_H, out_W = (H - reach) // side + 1, (W - reach) // side + 1
        overlaps = any(o.size > o.step for o in operations)
        layout = _Layout(operations, windows, C, goes_back)
        block = _block(layout, (out_H, out_W, N), limit // dtype.itemsize, overlaps)
        table, scratch = layout.table(*block)
        numbers = np.zeros((len(operations), 8), dtype)
        for row, operation in zip(numbers, operations, strict=True):
            row[: len(operation.numbers)] = operation.numbers
        fits = side * out_H == H and side * out_W == W and all(o.size == o.step for o in operations)
        parts = _parts(out_H, N, prod(shape), rows=not overlaps)
        codes = {operation.code for operation in operations}
        tiled = TILED if codes & {*NORMALISES} else 0, block[2] * C
        bits = 2 * block[2] * C if DROPOUT in codes else 0
        return cls(table, numbers, np.array(block), parts, scratch, tiled, bits, (out_H, out_W, N, C), fits)


def _fused(operations: Sequence[Operation]) -> Sequence[Operation]:
    """Return the operations with the ReLU that follows batch normalising made a part of it."""
    if [operation.code for operation in operations[:2]] == [SCALE, RELU]:
        return Operation(SCALE_RELU), *operations[2:]
    return operations


def _clipped(operation: Operation, C: int) -> Operation:
    """Return the operation; a window of normalising reaches no further than all channels do, however long it is."""
    if operation.code != LRN:
        return operation
    before, size, *others = operation.numbers
    first, last = min(before, C - 1), min(size - 1 - before, C - 1)
    return operation._replace(numbers=(first, first + last + 1, *others))


def _windows(operations: Sequence[Operation]) -> list[tuple[int, int]]:
    """Return the window of a pixel of the output in the input of each operation, and in the output.

    A window is (pixels from one to the next, pixels a side).
    """
    windows = [(1, 1)]
    for operation in reversed(operations):
        side, reach = windows[-1]
        windows.append((side * operation.step, (reach - 1) * operation.step + operation.size))
    return windows[::-1]


@dataclass(frozen=True)
class _Layout:
    """The places of a block's numbers, one array after the other."""

    operations: Sequence[Operation]
    windows: list[tuple[int, int]]
    C: int
    goes_back: bool

    def table(self, rows: int, columns: int, samples: int) -> tuple[npt.NDArray[np.int64], int]:
        """Return the table for blocks of this size, in pixels and samples of the output, and the scratch numbers."""
        table = np.zeros((len(self.operations) + 1, 12), np.int64)
        table[:, SIDE], table[:, REACH] = zip(*self.windows, strict=True)
        used = 0

        def take(size: int) -> int:
            nonlocal used
            start, used = used, used + size + -size % 16
            return start

        sizes = [_extent(w, rows) * _extent(w, columns) * samples * self.C for w in self.windows]
        x, dx, before = take(sizes[0]), take(sizes[0]) if self.goes_back else 0, SCALE
        for row, operation, size, out in zip(table, self.operations, sizes, sizes[1:], strict=False):
            code, same = operation.code, operation.code not in POOLS
            y = x if code in KEEPS_PLACE and before not in NEEDS_OUTPUT else take(out)
            dy = dx if same or not self.goes_back else take(out)
            row[[CODE, X, Y, DX, DY]] = code, x, y, dx, dy
            row[KEPT] = take(_kept(operation, size, out))
            row[SIZE:] = operation.size, operation.step, operation.salt, operation.threshold
            x, dx, before = y, dy, code
        table[-1, X], table[-1, DX] = x, dx
        return table, used


def _kept(operation: Operation, size: int, out: int) -> int:
    """Return the count of numbers that an operation keeps for its way back, spare ones included."""
    if operation.code == LRN:
        return 4 * size + int(operation.numbers[1])
    return {DROPOUT: size, MAX: out, L2: out}.get(operation.code, 0)


def _extent(window: tuple[int, int], pixels: int) -> int:
    side, reach = window
    return (pixels - 1) * side + reach


def _block(layout: _Layout, extents: tuple[int, int, int], limit: int, overlaps: bool) -> tuple[int, int, int]:
    """Return the largest block within the limit: many samples of few pixels, or many pixels if windows overlap."""
    H, W, N = extents
    samples = min(N, ceil(RUN / layout.C)) if overlaps else N
    while samples > 1 and layout.table(1, 1, samples)[1] > limit:
        samples = (samples + 1) // 2
    rows = columns = 1
    while columns < W and layout.table(1, min(W, 2 * columns), samples)[1] <= limit:
        columns = min(W, 2 * columns)
    while rows < H and layout.table(min(H, 2 * rows), columns, samples)[1] <= limit:
        rows = min(H, 2 * rows)
    return rows, columns, samples


def _parts(H: int, N: int, numbers: int, *, rows: bool) -> npt.NDArray[np.int64]:
    """Return the parts of a map: bands of rows of the output if it may be cut there, and samples."""
    wanted = max(1, min(PARTS, numbers // LEAST_PART))
    bands = min(H, wanted) if rows else 1
    groups = min(N, ceil(wanted / bands))
    return np.array(
        [
            (H * i // bands, H * (i + 1) // bands, N * j // groups, N * (j + 1) // groups)
            for j in range(groups)
            for i in range(bands)
        ],
        np.int64,
    )
