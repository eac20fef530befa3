"""Transforms and products of convolutions in the frequency domain, as loops.

A transform brings pieces of a map, some columns each, to rows of frequencies: it copies a piece into cache, multiplies
it along the height and along the width by the matrices of `daskcnn.conv.fourier`, and writes it to the rows. A map
may be cut into tiles, which are copied from it with zeros beyond the map.

A complex frequency takes two rows, re and im, and three products (Karatsuba): of re, of im, and of sums or differences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from daskcnn.compiled.loop import inner, integers, intp, loop, uintp
from daskcnn.compiled.products import Matrix, multiply
from daskcnn.compiled.runs import add_at, copy_at


class Cut(NamedTuple):
    """Columns outer × inner of a map (H, W, outer, inner) and the tiles it is cut into.

    Attributes
    ----------
    start, length : outer columns
    begin, size : inner columns
    height, width : of a tile
    across, tiles : tiles side by side, and all
    down, right : from one tile to the next
    top, left : rows and columns of the first tile beyond the map
    """

    start: int
    length: int
    begin: int
    size: int
    height: int
    width: int
    across: int
    tiles: int
    down: int
    right: int
    top: int
    left: int


CUT = integers(Cut)


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, ::1], T[:, ::1], CUT, T[:, :, ::1], intp, intp, intp, intp, T[::1]))
def forth(
    source: Any,
    height: Any,
    real: Any,
    pairs: Any,
    cut: Any,
    target: Any,
    outer: int,
    small: int,
    first: int,
    last: int,
    scratch: Any,
) -> None:
    """Write the pieces first … last, `outer` outer columns each, of a map's transform.

    height, real, pairs : matrices (length, h), (length, w), (2·length, 2·w)
    target : (rows, tiles · length, size)
    """
    long, wide, h, w = len(height), len(real), cut.height, cut.width
    row = target.shape[1] * target.shape[2]
    rows, singles = target.reshape(target.size), _reals(long)
    of_height, of_real, of_pair = _matrix(height), _matrix(real), _matrix(pairs)
    for piece in range(first, last):
        o = piece * outer
        n = min(outer, cut.length - o)
        m = n * cut.size
        half = h * w * m
        for tile in range(cut.tiles):
            _gather(source, cut, tile, o, n, scratch)
            for j in range(w):
                line = Matrix(scratch, j * m, w * m, False)
                multiply(of_height, line, Matrix(scratch, half + j * m, w * m, False), long, m, h, False, small)
            at = (tile * cut.length + o) * cut.size
            for u in range(singles):
                line = Matrix(scratch, half + u * w * m, m, False)
                multiply(of_real, line, Matrix(rows, at + u * wide * row, row, False), wide, m, w, False, small)
            for u in range(singles, long, 2):
                line = Matrix(scratch, half + u * w * m, m, False)
                multiply(of_pair, line, Matrix(rows, at + u * wide * row, row, False), 2 * wide, m, 2 * w, False, small)


@loop(
    lambda T: (
        *(T[:, :, ::1], T[:, ::1], T[:, ::1], T[:, ::1], CUT),
        *(T[:, :, :, ::1], intp, intp, intp, intp, intp, T[::1]),
    )
)
def back(
    source: Any,
    height: Any,
    real: Any,
    pairs: Any,
    cut: Any,
    target: Any,
    add: int,
    outer: int,
    small: int,
    first: int,
    last: int,
    scratch: Any,
) -> None:
    """Write, or add, the pieces first … last of a map from its transform: the transpose of `forth`."""
    long, wide, h, w = len(height), len(real), cut.height, cut.width
    row = source.shape[1] * source.shape[2]
    rows, singles = source.reshape(source.size), _reals(long)
    of_height, of_real, of_pair = _turned(height), _turned(real), _turned(pairs)
    for piece in range(first, last):
        o = piece * outer
        n = min(outer, cut.length - o)
        m = n * cut.size
        half = h * w * m
        for tile in range(cut.tiles):
            at = (tile * cut.length + o) * cut.size
            for u in range(singles):
                line = Matrix(rows, at + u * wide * row, row, False)
                multiply(of_real, line, Matrix(scratch, half + u * w * m, m, False), w, m, wide, False, small)
            for u in range(singles, long, 2):
                line = Matrix(rows, at + u * wide * row, row, False)
                multiply(of_pair, line, Matrix(scratch, half + u * w * m, m, False), 2 * w, m, 2 * wide, False, small)
            for j in range(w):
                line = Matrix(scratch, half + j * m, w * m, False)
                multiply(of_height, line, Matrix(scratch, j * m, w * m, False), h, m, long, False, small)
            _scatter(scratch, cut, tile, o, n, target, add > 0)


@inner
def _matrix(a: Any) -> Matrix:
    return Matrix(a.reshape(a.size), 0, a.shape[1], False)


@inner
def _turned(a: Any) -> Matrix:
    return Matrix(a.reshape(a.size), 0, a.shape[1], True)


@inner
def _reals(length: int) -> int:
    """Return how many frequencies of a real DFT are real: 0, and half the length if that is whole."""
    return 2 - length % 2


@inner
def _gather(source: Any, cut: Cut, tile: int, o: int, n: int, piece: Any) -> None:
    """Copy outer columns o … o + n of a tile, (h, w, n, size)."""
    H, W, _, every = source.shape
    row, col = tile // cut.across * cut.down - cut.top, tile % cut.across * cut.right - cut.left
    # whole pixels are one run
    runs, length = (1, n * every) if cut.size == every else (n, cut.size)
    numbers, to = source.reshape(source.size), 0
    for i in range(row, row + cut.height):
        for j in range(col, col + cut.width):
            if 0 <= i < H and 0 <= j < W:
                at = ((i * W + j) * source.shape[2] + cut.start + o) * every + cut.begin
                for run in range(runs):
                    copy_at(numbers, at + run * every, piece, to + run * length, length)
            else:
                piece[to : to + n * cut.size] = 0
            to += n * cut.size


@inner
def _scatter(piece: Any, cut: Cut, tile: int, o: int, n: int, target: Any, add: bool) -> None:
    """Copy or add a tile's columns to where `_gather` finds them; what is beyond the map is left out."""
    H, W, _, every = target.shape
    row, col = tile // cut.across * cut.down - cut.top, tile % cut.across * cut.right - cut.left
    runs, length = (1, n * every) if cut.size == every else (n, cut.size)
    numbers = target.reshape(target.size)
    for i in range(max(0, row), min(H, row + cut.height)):
        for j in range(max(0, col), min(W, col + cut.width)):
            at = ((i * W + j) * target.shape[2] + cut.start + o) * every + cut.begin
            here = ((i - row) * cut.width + j - col) * n * cut.size
            for run in range(runs):
                if add:
                    add_at(piece, here + run * length, numbers, at + run * every, length)
                else:
                    copy_at(piece, here + run * length, numbers, at + run * every, length)


# --- products of rows ---


@loop(lambda T: (intp[:, ::1], T[:, :, ::1], T[:, :, ::1], intp, T[::1], T[:, :, ::1], intp, intp, intp, T[::1]))
def multiply_rows(
    units: Any, X: Any, W: Any, begin: int, constant: Any, Y: Any, small: int, first: int, last: int, scratch: Any
) -> None:
    """Write the frequencies first … last of Y = X·W, with a constant (k,) added to the first, or (0,).

    units : (frequencies, 2): the first row, and how many
    X : (rows, n, C); W : (rows, C, K), whose kernels from `begin` on are used; Y : (rows, n, k)
    """
    _, n, C = X.shape
    every, k = W.shape[2], Y.shape[2]
    x, w, y = X.reshape(X.size), W.reshape(W.size), Y.reshape(Y.size)
    xs, ws, t = Matrix(scratch, 0, C, False), Matrix(scratch, n * C, k, False), Matrix(scratch, n * C + C * k, k, False)
    for i in range(first, last):
        row, paired = units[i, 0], units[i, 1] == 2
        a, b = Matrix(x, row * n * C, C, False), Matrix(w, row * C * every + begin, every, False)
        c = Matrix(y, row * n * k, k, False)
        multiply(a, b, c, n, k, C, False, small)
        if paired:
            a2, b2 = Matrix(x, a.start + n * C, C, False), Matrix(w, b.start + C * every, every, False)
            c2 = Matrix(y, c.start + n * k, k, False)
            multiply(a2, b2, t, n, k, C, False, small)
            _combine(a, a2, xs, n, C, 1)
            _combine(b, b2, ws, C, k, 1)
            multiply(xs, ws, c2, n, k, C, False, small)
            for at in range(n * k):  # re = t1 - t2, im = t3 - t1 - t2
                one, two = y[uintp(c.start + at)], scratch[uintp(t.start + at)]
                y[uintp(c2.start + at)] -= one + two
                y[uintp(c.start + at)] = one - two
        if row == 0 and constant.size > 0:
            for s in range(n):
                for j in range(k):
                    y[s * k + j] += constant[j]


@loop(
    lambda T: (
        *(intp[:, ::1], T[:, :, ::1], T[:, :, ::1], intp, T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], intp),
        *(intp, intp, intp, T[::1]),
    )
)
def differentiate_rows(
    units: Any,
    X: Any,
    W: Any,
    begin: int,
    dY: Any,
    dX: Any,
    dW: Any,
    add: int,
    small: int,
    first: int,
    last: int,
    scratch: Any,
) -> None:
    """Write or add dX = dY·W̄ᵀ (rows, n, C), and write dW = X̄ᵀ·dY (rows, C, k), as far as they are not empty.

    The rest as in `multiply_rows`. dW may lie where W does: its rows are written after those of W are used.
    """
    (_, n, k), C, every = dY.shape, max(dX.shape[2], dW.shape[1]), W.shape[2]
    x, w, dy = X.reshape(X.size), W.reshape(W.size), dY.reshape(dY.size)
    dx, dw = dX.reshape(dX.size), dW.reshape(dW.size)
    dys = Matrix(scratch, 0, k, False)
    factor, t = scratch[n * k :], scratch[n * k + C * max(n, k) :]
    for i in range(first, last):
        row, paired = units[i, 0], units[i, 1] == 2
        a = Matrix(dy, row * n * k, k, False)
        a2 = Matrix(dy, a.start + n * k, k, False)
        if paired:
            _combine(a, a2, dys, n, k, 1)
        if dx.size > 0:
            b = Matrix(w, row * C * every + begin, every, True)
            b2, sums = Matrix(w, b.start + C * every, every, True), Matrix(factor, 0, k, True)
            if paired:
                _combine(b, b2, sums, C, k, -1)
            _conjugate(a, a2, dys, b, b2, sums, dx, row * n * C, n, C, k, paired, add > 0, small, t)
        if dw.size > 0:
            b = Matrix(x, row * n * C, C, True)
            b2, sums = Matrix(x, b.start + n * C, C, True), Matrix(factor, 0, C, True)
            if paired:
                _combine(b, b2, sums, n, C, -1)
            _conjugate(b, b2, sums, a, a2, dys, dw, row * C * k, C, k, n, paired, False, small, t)


@inner
def _conjugate(
    a: Matrix,
    a2: Matrix,
    a3: Matrix,
    b: Matrix,
    b2: Matrix,
    b3: Matrix,
    target: Any,
    to: int,
    rows: int,
    columns: int,
    depth: int,
    paired: bool,
    add: bool,
    small: int,
    scratch: Any,
) -> None:
    """Write or add the product of a complex matrix and a conjugated one: re = t1 + t2, im = t3 - t1 + t2."""
    size = rows * columns
    multiply(a, b, Matrix(scratch, 0, columns, False), rows, columns, depth, False, small)
    if paired:
        multiply(a2, b2, Matrix(scratch, size, columns, False), rows, columns, depth, False, small)
        multiply(a3, b3, Matrix(scratch, 2 * size, columns, False), rows, columns, depth, False, small)
        for at in range(uintp(size)):
            one, two, three = scratch[at], scratch[uintp(size) + at], scratch[uintp(2 * size) + at]
            scratch[at], scratch[uintp(size) + at] = one + two, three - one + two
        size *= 2
    if add:
        add_at(scratch, 0, target, to, size)
    else:
        copy_at(scratch, 0, target, to, size)


@inner
def _combine(a: Matrix, b: Matrix, c: Matrix, rows: int, columns: int, sign: int) -> None:
    """Write c = a + b, or a - b."""
    factor = c.numbers.dtype.type(sign)
    for i in range(rows):
        at, bt, ct = uintp(a.start + i * a.apart), uintp(b.start + i * b.apart), uintp(c.start + i * c.apart)
        for j in range(uintp(columns)):
            c.numbers[ct + j] = a.numbers[at + j] + factor * b.numbers[bt + j]
