"""Convolution as products over columns, whose blocks stay in cache.

Rows of a map are copied into planes first: padded, channel by channel. Then the numbers that one tap of one channel
meets under successive output pixels lie side by side, and the columns of a block of pixels are R·S·C copies of runs.
With a stride along the width every phase of it has a plane of its own, which keeps the runs whole.

Where pixels have many channels, a correlation takes these as runs: R·S copies for each output pixel, without planes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from daskcnn.compiled.loop import inner, integers, intp, loop
from daskcnn.compiled.products import Matrix, multiply
from daskcnn.compiled.runs import copy_at


class Taps(NamedTuple):
    """The kernels' height and width, their stride, the row and column of the map where the first one begins, and the
    rows and columns from one tap to the next.
    """

    height: int
    width: int
    down: int
    right: int
    top: int
    left: int
    rows_apart: int
    columns_apart: int


def plane_rows(taps: Taps, rows: int) -> int:
    """Return the number of rows of the map below this many rows of the output."""
    return (rows - 1) * taps.down + (taps.height - 1) * taps.rows_apart + 1


def plane_width(taps: Taps, width: int) -> int:
    """Return the columns of a plane, for an output of this width."""
    return width + (taps.width - 1) * taps.columns_apart // taps.right


MANY = 32
"""Channels of a pixel that are worth a copy of their own."""

_plane_rows, _plane_width = inner(plane_rows), inner(plane_width)
TAPS = integers(Taps)


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, :, :, ::1], TAPS, intp, intp, intp, intp, intp, T[::1]))
def correlate(
    x: Any, w: Any, y: Any, taps: Any, rows: int, pixels: int, small: int, first: int, last: int, scratch: Any
) -> None:
    """Write the strips first … last of y (out_H, out_W, N, K) = x ⋆ w, `rows` rows each; x (H, W, N, C).

    w : (R·S·C, K), and one row more if there is a bias: that row
    pixels : of a block
    small : of `multiply`
    scratch : planes of a strip, then columns of a block
    """
    K, across, size, target = y.shape[3], y.shape[1] * y.shape[2], len(w), y.reshape(y.size)
    kernels, wide = Matrix(w.reshape(w.size), 0, K, False), x.shape[3] >= MANY
    planes = _planes(x, y, taps, rows, scratch)
    for strip in range(first, last):
        row, end = strip * rows, min((strip + 1) * rows, y.shape[0])
        if not wide:
            _spread(x, row, end, taps, planes)
        for start in range(0, (end - row) * across, pixels):
            n = min(pixels, (end - row) * across - start)
            columns = scratch[planes.size : planes.size + size * n]
            if wide:
                _collect(x, across, row * across + start, taps, columns.reshape(n, size))
            else:
                _expand(planes, across, start, taps, columns.reshape(size, n))
            out = Matrix(target, (row * across + start) * K, K, False)
            multiply(Matrix(columns, 0, size if wide else n, not wide), kernels, out, n, K, size, False, small)


@loop(lambda T: (T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, ::1], TAPS, intp, intp, intp, intp, intp, T[::1]))
def correlate_filter(
    x: Any, dy: Any, sums: Any, taps: Any, rows: int, pixels: int, small: int, first: int, last: int, scratch: Any
) -> None:
    """Write the sums first … last (R·S·C, K) of columnsᵀ·dy, each over an equal share of the strips.

    pixels, small, scratch : as in `correlate`
    """
    (parts, size, K), across, source = sums.shape, dy.shape[1] * dy.shape[2], dy.reshape(dy.size)
    planes = _planes(x, dy, taps, rows, scratch)
    strips, totals = -(-dy.shape[0] // rows), sums.reshape(sums.size)
    sums[first:last] = 0
    for part in range(first, last):
        total = Matrix(totals, part * size * K, K, False)
        for strip in range(strips * part // parts, strips * (part + 1) // parts):
            row, end = strip * rows, min((strip + 1) * rows, dy.shape[0])
            _spread(x, row, end, taps, planes)
            for start in range(0, (end - row) * across, pixels):
                n = min(pixels, (end - row) * across - start)
                columns = scratch[planes.size : planes.size + size * n]
                _expand(planes, across, start, taps, columns.reshape(size, n))
                change = Matrix(source, (row * across + start) * K, K, False)
                multiply(Matrix(columns, 0, n, False), change, total, size, K, n, True, small)


@inner
def _planes(x: Any, y: Any, taps: Any, rows: int, scratch: Any) -> Any:
    """Return memory for the rows of x below `rows` rows of y: (rows, C, phases, columns, N)."""
    height, phases, width = _plane_rows(taps, rows), taps.right, _plane_width(taps, y.shape[1])
    shape = (height, x.shape[3], phases, width, x.shape[2])
    return scratch[: height * shape[1] * phases * width * shape[4]].reshape(shape)


@inner
def _spread(x: Any, row: int, end: int, taps: Any, planes: Any) -> None:
    """Copy what lies below the rows row … end of the output, with zeros beyond the map."""
    H, W = x.shape[:2]
    _, C, phases, width, N = planes.shape
    for i in range(_plane_rows(taps, end - row)):
        above = row * taps.down + taps.top + i
        for phase in range(phases):
            for j in range(width):
                left = j * phases + phase + taps.left
                if 0 <= above < H and 0 <= left < W:
                    pixel = x[above, left]
                    for c in range(C):
                        run = planes[i, c, phase, j]
                        for n in range(N):
                            run[n] = pixel[n, c]
                else:
                    for c in range(C):
                        planes[i, c, phase, j] = 0


@inner
def _expand(planes: Any, across: int, start: int, taps: Any, columns: Any) -> None:
    """Write the columns (R·S·C, n) of n pixels from `start` on, in rows of `across` pixels; a row more is of ones."""
    _, C, phases, width, N = planes.shape
    count, source, target = columns.shape[1], planes.reshape(planes.size), columns.reshape(columns.size)
    pixel = start
    while pixel < start + count:
        row = pixel // across
        n, to = min((row + 1) * across, start + count) - pixel, pixel - start
        for r in range(taps.height):
            for s in range(taps.width):
                below, beside = row * taps.down + r * taps.rows_apart, s * taps.columns_apart
                plane = (below * C * phases + beside % phases) * width + beside // phases
                at = plane * N + pixel - row * across
                for c in range(C):
                    copy_at(source, at + c * phases * width * N, target, to + c * count, n)
                to += C * count
        pixel += n
    for row in range(taps.height * taps.width * C, len(columns)):
        columns[row] = 1


@inner
def _collect(x: Any, across: int, start: int, taps: Any, columns: Any) -> None:
    """Write the numbers below n pixels (n, R·S·C) from the output's pixel `start` on; a column more is of ones."""
    H, W, N, C = x.shape
    source, target, size = x.reshape(x.size), columns.reshape(columns.size), columns.shape[1]
    pixel, end = start, start + columns.shape[0]
    while pixel < end:
        place, sample = pixel // N, pixel % N
        n = min(N - sample, end - pixel)
        row, col = place // (across // N) * taps.down + taps.top, place % (across // N) * taps.right + taps.left
        to = (pixel - start) * size
        for r in range(taps.height):
            for s in range(taps.width):
                above, left = row + r * taps.rows_apart, col + s * taps.columns_apart
                inside = 0 <= above < H and 0 <= left < W
                at = ((above * W + left) * N + sample) * C
                for i in range(n):
                    if inside:
                        copy_at(source, at + i * C, target, to + i * size, C)
                    else:
                        target[to + i * size : to + i * size + C] = 0
                to += C
        for i in range(n):
            target[to + i * size : (pixel - start + i + 1) * size] = 1
        pixel += n
