"""Winograd's minimal filtering (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015) as loops.

A transform brings a tile of a map to its points by one small matrix along the height and the same one along the width.
It is the same for every sample and channel, so each step is a loop over a run of a pixel's contiguous samples and
channels. The matrices are those of `daskcnn.conv.winograd.Minimal`, written out.

A group is some tiles of some samples: its rows, one for each tile and sample, are multiplied together at each point.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from daskcnn.compiled.loop import boolean, inner, intp, loop, uintp
from daskcnn.compiled.winograd_scratch import MOST_POINTS, RUN, STEP, STEPS, apart


class Map(NamedTuple):
    """A map as one row of numbers: its rows and columns, and the numbers of a pixel."""

    numbers: Any
    height: int
    width: int
    size: int


class TileGroup(NamedTuple):
    """Tiles first … last, row by row of a grid this wide, of samples start … stop."""

    first: int
    last: int
    across: int
    start: int
    stop: int


class Rows(NamedTuple):
    """Where products are made: at each point the rows of a group, `apart` numbers after those of the point before."""

    numbers: Any
    apart: int


_apart = inner(apart)


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, ::1], boolean, T[::1], T[:, :, :, ::1], T[::1]),
        *(intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, T[::1]),
    )
)
def correlate(
    x: Any,
    u: Any,
    turned: bool,
    bias: Any,
    y: Any,
    m: Any,
    outputs: int,
    points: int,
    top: int,
    left: int,
    tiles: int,
    samples: int,
    first: int,
    last: int,
    begin: int,
    end: int,
    scratch: Any,
) -> None:
    """Write the groups first … last of y = x ⋆ w + bias; if not of all points, then their products alone.

    x : (H, W, N, C), with `top` and `left` rows and columns of padding
    u : kernels at the points begin … end along the height, ((end - begin)·points, C, K), or (…, K, C) if `turned`
    bias : (K,)
    y : (out_H, out_W, N, K), made in tiles of outputs × outputs
    m : products of a group, points² · `apart(rows, K)` numbers
    tiles, samples : of a group
    scratch : STEPS + (end - begin)·points · `apart(rows, C)` numbers
    """
    N, C, K = x.shape[2], x.shape[3], y.shape[3]
    source = Map(x.reshape(x.size), x.shape[0], x.shape[1], N * C)
    rows, ahead = tiles * samples, begin * points
    v, products = Rows(scratch[STEPS:], _apart(rows, C)), Rows(m, _apart(rows, K))
    for number in range(first, last):
        group = _group(number, y, outputs, tiles, samples)
        count = (group.last - group.first) * (group.stop - group.start)
        _gather(source, C, group, outputs, top, left, points, points, begin, end, v, scratch)
        for p in range((end - begin) * points):
            a, b = _matrix(v, p, count, C), _matrix(products, ahead + p, count, K)
            if turned:
                np.dot(a, u[p].T, b)
            else:
                np.dot(a, u[p], b)
        if begin <= 1 < end:  # all outputs receive point (1, 1) with factor 1
            _add_bias(_matrix(products, points + 1, count, K), bias)
        if begin == 0 and end == points:
            _spread(products, y, group, points, outputs, scratch)


@loop(lambda T: (T[::1], T[:, :, :, ::1], intp, intp, intp, intp, T[::1]))
def write_outputs(m: Any, y: Any, outputs: int, points: int, first: int, last: int, scratch: Any) -> None:
    """Write the rows first … last of tiles × samples of y (out_H, out_W, N, K) from the products m of all of them."""
    N, K, across = y.shape[2], y.shape[3], -(-y.shape[1] // outputs)
    products = Rows(m, _apart(-(-y.shape[0] // outputs) * across * N, K))
    target = Map(y.reshape(y.size), y.shape[0], y.shape[1], N * K)
    for tile in range(first // N, -(-last // N)):
        start, stop = max(0, first - tile * N), min(N, last - tile * N)
        row, col, at = tile // across * outputs, tile % across * outputs, (tile * N + start) * K
        _out_of(products, at, target, start * K, (stop - start) * K, row, col, points, outputs, scratch)


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, ::1], intp, intp, intp, intp),
        *(intp, intp, intp, intp, intp, intp, T[::1]),
    )
)
def correlate_filter(
    x: Any,
    dy: Any,
    du: Any,
    outputs: int,
    points: int,
    top: int,
    left: int,
    tiles: int,
    samples: int,
    first: int,
    last: int,
    begin: int,
    end: int,
    scratch: Any,
) -> None:
    """Write du (points², C, K) = Σ Vᵀ·Z over the groups first … last, at the points begin … end along the height.

    V are the tiles of x (H, W, N, C), Z those of dy (out_H, out_W, N, K), at their points.
    """
    N, C, K = x.shape[2], x.shape[3], dy.shape[3]
    source = Map(x.reshape(x.size), x.shape[0], x.shape[1], N * C)
    change = Map(dy.reshape(dy.size), dy.shape[0], dy.shape[1], N * K)
    rows, used = tiles * samples, (end - begin) * points
    v = Rows(scratch[STEPS:], _apart(rows, C))
    z = Rows(scratch[STEPS + used * v.apart :], _apart(rows, K))
    product = scratch[STEPS + used * (v.apart + z.apart) :][: C * K].reshape(C, K)
    for number in range(first, last):
        group = _group(number, dy, outputs, tiles, samples)
        count = (group.last - group.first) * (group.stop - group.start)
        _gather(source, C, group, outputs, top, left, points, points, begin, end, v, scratch)
        _gather(change, K, group, outputs, 0, 0, outputs, points, begin, end, z, scratch)
        for p in range(used):
            a, b, total = _matrix(v, p, count, C), _matrix(z, p, count, K), du[begin * points + p]
            if number == first:
                np.dot(a.T, b, total)
            else:
                np.dot(a.T, b, product)
                _add(product.reshape(C * K), total.reshape(C * K))


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, :, ::1], intp, intp, intp, intp, T[::1]))
def transform_kernels(w: Any, g: Any, u: Any, begin: int, end: int, first: int, last: int, scratch: Any) -> None:
    """Write u ((end - begin)·points, C, K) = g w gᵀ at the points begin … end along the height.

    w (R, S, C, K), g (points, R); of each tap the numbers first … last.
    """
    R, S, points, size = w.shape[0], w.shape[1], g.shape[0], w.shape[2] * w.shape[3]
    taps, target = w.reshape(w.size), u.reshape(u.size)
    for at in range(first, last, RUN):
        n = min(RUN, last - at)
        for i in range(begin, end):
            for s in range(S):
                _combine(taps, s * size + at, S * size, g, i, R, scratch, s * STEP, n)
            for j in range(points):
                _combine(scratch, 0, STEP, g, j, S, target, ((i - begin) * points + j) * size + at, n)


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, :, :, ::1], intp, intp, T[::1]))
def fold_kernels(du: Any, gt: Any, dw: Any, first: int, last: int, scratch: Any) -> None:
    """Write dw (R, S, C, K) = gt (Σ du) gtᵀ for the numbers first … last of each tap; du (parts, points², C, K)."""
    parts, (R, points), size = du.shape[0], gt.shape, dw.shape[2] * dw.shape[3]
    S, sums, target, half = dw.shape[1], du.reshape(du.size), dw.reshape(dw.size), scratch[MOST_POINTS * STEP :]
    for at in range(first, last, RUN):
        n = min(RUN, last - at)
        for i in range(points):
            for j in range(points):
                _total(sums, (i * points + j) * size + at, points * points * size, parts, scratch, j * STEP, n)
            for s in range(S):
                _combine(scratch, 0, STEP, gt, s, points, half, (i * S + s) * STEP, n)
        for r in range(R):
            for s in range(S):
                _combine(half, s * STEP, S * STEP, gt, r, points, target, (r * S + s) * size + at, n)


@inner
def _group(number: int, y: Any, outputs: int, tiles: int, samples: int) -> TileGroup:
    """Return a group of the map y (out_H, out_W, N, K), which is cut into tiles of outputs × outputs."""
    N, across = y.shape[2], -(-y.shape[1] // outputs)
    every, blocks = -(-y.shape[0] // outputs) * across, -(-N // samples)
    tile, sample = number // blocks * tiles, number % blocks * samples
    return TileGroup(tile, min(tile + tiles, every), across, sample, min(sample + samples, N))


@inner
def _matrix(rows: Rows, p: int, count: int, channels: int) -> Any:
    """Return `count` rows of point p as a matrix (count, channels)."""
    return rows.numbers[p * rows.apart : p * rows.apart + count * channels].reshape(count, channels)


@inner
def _gather(
    source: Map,
    channels: int,
    group: TileGroup,
    outputs: int,
    top: int,
    left: int,
    taps: int,
    points: int,
    begin: int,
    end: int,
    rows: Rows,
    scratch: Any,
) -> None:
    """Bring a group's tiles taps × taps to the points begin … end along the height."""
    start, length = group.start * channels, (group.stop - group.start) * channels
    for tile in range(group.first, group.last):
        row, col = tile // group.across * outputs - top, tile % group.across * outputs - left
        at = (tile - group.first) * length
        _into(source, start, length, row, col, taps, points, begin, end, rows, at, scratch)


@inner
def _into(
    source: Map,
    start: int,
    length: int,
    row: int,
    col: int,
    taps: int,
    points: int,
    begin: int,
    end: int,
    rows: Rows,
    at: int,
    scratch: Any,
) -> None:
    """Bring the tile at (row, col), numbers start … start + length of a pixel, to its points."""
    edge = scratch[MOST_POINTS * MOST_POINTS * STEP : STEPS]
    inside = row >= 0 and row + taps <= source.height
    for first in range(0, length, RUN):
        n = min(RUN, length - first)
        for j in range(taps):
            numbers, here, step = edge, 0, STEP
            if inside and 0 <= col + j < source.width:
                numbers, step = source.numbers, source.width * source.size
                here = (row * source.width + col + j) * source.size + start + first
            else:
                _copy_column(source, row, col + j, taps, start + first, edge, n)
            _to_points(numbers, here, step, taps, scratch, j * STEP, taps * STEP, points, n)
        for i in range(begin, end):
            to = (i - begin) * points * rows.apart + at + first
            _to_points(scratch, i * taps * STEP, STEP, taps, rows.numbers, to, rows.apart, points, n)


@inner
def _spread(rows: Rows, y: Any, group: TileGroup, points: int, outputs: int, scratch: Any) -> None:
    """Write the tiles of a group into y (out_H, out_W, N, K)."""
    N, K = y.shape[2], y.shape[3]
    target, length = Map(y.reshape(y.size), y.shape[0], y.shape[1], N * K), (group.stop - group.start) * K
    for tile in range(group.first, group.last):
        row, col = tile // group.across * outputs, tile % group.across * outputs
        at = (tile - group.first) * length
        _out_of(rows, at, target, group.start * K, length, row, col, points, outputs, scratch)


@inner
def _out_of(
    rows: Rows,
    at: int,
    target: Map,
    start: int,
    length: int,
    row: int,
    col: int,
    points: int,
    outputs: int,
    scratch: Any,
) -> None:
    """Write the tile outputs × outputs at (row, col), as far as it lies on the map, from its points."""
    edge = scratch[MOST_POINTS * MOST_POINTS * STEP : STEPS]
    inside = min(outputs, target.width - col)
    for first in range(0, length, RUN):
        n = min(RUN, length - first)
        for j in range(points):
            here = j * rows.apart + at + first
            _from_points(rows.numbers, here, points * rows.apart, points, scratch, j * STEP, points * STEP, n)
        for i in range(min(outputs, target.height - row)):
            to = ((row + i) * target.width + col) * target.size + start + first
            numbers, here, step = edge, 0, STEP
            if inside == outputs:
                numbers, here, step = target.numbers, to, target.size
            _from_points(scratch, i * points * STEP, STEP, points, numbers, here, step, n)
            if inside < outputs:
                for j in range(inside):
                    _copy(edge, j * STEP, target.numbers, to + j * target.size, n)


@inner
def _copy_column(source: Map, row: int, col: int, taps: int, start: int, edge: Any, n: int) -> None:
    """Copy a column of a tile, with zeros beyond the map."""
    for i in range(taps):
        if 0 <= row + i < source.height and 0 <= col < source.width:
            _copy(source.numbers, ((row + i) * source.width + col) * source.size + start, edge, i * STEP, n)
        else:
            edge[i * STEP : i * STEP + n] = 0


@inner
def _copy(source: Any, at: int, target: Any, to: int, n: int) -> None:
    given, run = source[at : at + n], target[to : to + n]
    for i in range(n):
        run[i] = given[i]


@inner
def _add(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] += source[i]


@inner
def _add_bias(m: Any, bias: Any) -> None:
    for row in m:
        for k in range(bias.size):
            row[k] += bias[k]


@inner
def _combine(source: Any, at: int, step: int, factors: Any, row: int, count: int, target: Any, to: int, n: int) -> None:
    """Write the sum of `count` runs, each times its factor of this row."""
    total = target[to : to + n]
    for k in range(count):
        factor, run = factors[row, k], source[at + k * step : at + k * step + n]
        for i in range(n):
            total[i] = factor * run[i] + (total[i] if k > 0 else 0)


@inner
def _total(source: Any, at: int, step: int, count: int, target: Any, to: int, n: int) -> None:
    """Write the sum of `count` runs."""
    _copy(source, at, target, to, n)
    for k in range(1, count):
        _add(source[at + k * step : at + k * step + n], target[to : to + n])


@inner
def _to_points(d: Any, at: int, step: int, taps: int, v: Any, to: int, apart: int, points: int, n: int) -> None:
    """Multiply Bᵀ, or A for fewer taps than points, by runs d[at + i·step …] into v[to + i·apart …], along one axis."""
    if taps == 6:
        _input_6(d, at, step, v, to, apart, n)
    elif taps == 8:
        _input_8(d, at, step, v, to, apart, n)
    elif taps == 4 and points == 4:
        _input_4(d, at, step, v, to, apart, n)
    elif points == 6:
        _change_4_6(d, at, step, v, to, apart, n)
    elif points == 8:
        _change_4_8(d, at, step, v, to, apart, n)
    else:
        _change_2_4(d, at, step, v, to, apart, n)


@inner
def _from_points(m: Any, at: int, step: int, points: int, y: Any, to: int, apart: int, n: int) -> None:
    """Multiply Aᵀ by runs m[at + i·step …] into y[to + i·apart …], along one axis."""
    if points == 6:
        _output_6_4(m, at, step, y, to, apart, n)
    elif points == 8:
        _output_8_4(m, at, step, y, to, apart, n)
    else:
        _output_4_2(m, at, step, y, to, apart, n)


@inner
def _places(at: int, step: int) -> Any:
    """Return where runs begin. Numba tests signed numbers for less than zero at each use, and compiles no vectors."""
    return (
        *(uintp(at), uintp(at + step), uintp(at + 2 * step), uintp(at + 3 * step)),
        *(uintp(at + 4 * step), uintp(at + 5 * step), uintp(at + 6 * step), uintp(at + 7 * step)),
    )


# --- points 0, 1, −1, ∞ ---


@inner
def _input_4(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b = _places(at, step), _places(to, apart)
    for i in range(uintp(n)):
        d1, d2 = d[a[1] + i], d[a[2] + i]
        v[b[0] + i] = d[a[0] + i] - d2
        v[b[1] + i] = d1 + d2
        v[b[2] + i] = d2 - d1
        v[b[3] + i] = d[a[3] + i] - d1


@inner
def _output_4_2(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b = _places(at, step), _places(to, apart)
    for i in range(uintp(n)):
        m1, m2 = m[a[1] + i], m[a[2] + i]
        y[b[0] + i] = m[a[0] + i] + m1 + m2
        y[b[1] + i] = m1 - m2 + m[a[3] + i]


@inner
def _change_2_4(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b = _places(at, step), _places(to, apart)
    for i in range(uintp(n)):
        d0, d1 = d[a[0] + i], d[a[1] + i]
        z[b[0] + i] = d0
        z[b[1] + i] = d0 + d1
        z[b[2] + i] = d0 - d1
        z[b[3] + i] = d1


# --- points 0, 1, −1, ½, −2, ∞ ---


@inner
def _input_6(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b, T = _places(at, step), _places(to, apart), d.dtype.type
    one_and_half, two, three = T(1.5), T(2), T(3)
    for i in range(uintp(n)):
        d2, d3 = d[a[2] + i], d[a[3] + i]
        odd, even = d[a[1] + i] - d3, d2 - d[a[4] + i]
        v[b[0] + i] = d[a[0] + i] - one_and_half * odd - d2 - even
        v[b[1] + i] = three * (d2 + d3) - two * (odd + even)
        v[b[2] + i] = three * (d2 - d3) - two * (odd - even)
        v[b[3] + i] = two * odd + even
        v[b[4] + i] = odd - two * even
        v[b[5] + i] = d[a[5] + i] + odd - d3 - one_and_half * even


@inner
def _output_6_4(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b, T = _places(at, step), _places(to, apart), m.dtype.type
    half, quarter, eighth, two, four, eight = T(0.5), T(0.25), T(0.125), T(2), T(4), T(8)
    for i in range(uintp(n)):
        m1, m2, m3, m4 = m[a[1] + i], m[a[2] + i], m[a[3] + i], m[a[4] + i]
        even, odd = m1 + m2, m1 - m2
        y[b[0] + i] = m[a[0] + i] + even + m3 + m4
        y[b[1] + i] = odd + half * m3 - two * m4
        y[b[2] + i] = even + quarter * m3 + four * m4
        y[b[3] + i] = odd + eighth * m3 - eight * m4 + m[a[5] + i]


@inner
def _change_4_6(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b, T = _places(at, step), _places(to, apart), d.dtype.type
    half, quarter, eighth, two, four, eight = T(0.5), T(0.25), T(0.125), T(2), T(4), T(8)
    for i in range(uintp(n)):
        d0, d1, d2, d3 = d[a[0] + i], d[a[1] + i], d[a[2] + i], d[a[3] + i]
        even, odd = d0 + d2, d1 + d3
        z[b[0] + i] = d0
        z[b[1] + i] = even + odd
        z[b[2] + i] = even - odd
        z[b[3] + i] = d0 + half * d1 + quarter * d2 + eighth * d3
        z[b[4] + i] = d0 - two * d1 + four * d2 - eight * d3
        z[b[5] + i] = d3


# --- points 0, 1, −1, 2, −2, ½, −½, ∞ ---


@inner
def _input_8(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b, T = _places(at, step), _places(to, apart), d.dtype.type
    two, four, five, large, small = T(2), T(4), T(5), T(5.25), T(4.25)
    for i in range(uintp(n)):
        d1, d2, d3, d4, d5, d6 = d[a[1] + i], d[a[2] + i], d[a[3] + i], d[a[4] + i], d[a[5] + i], d[a[6] + i]
        v[b[0] + i] = d[a[0] + i] - d6 + large * (d4 - d2)
        even, odd = small * d4 - d2 - d6, small * d3 - d1 - d5
        v[b[1] + i] = even + odd
        v[b[2] + i] = even - odd
        even, odd = d2 - five * d4 + four * d6, two * (d1 - five * d3 + four * d5)
        v[b[3] + i] = even + odd
        v[b[4] + i] = even - odd
        even, odd = two * (four * d2 - five * d4 + d6), four * d1 - five * d3 + d5
        v[b[5] + i] = even + odd
        v[b[6] + i] = even - odd
        v[b[7] + i] = d[a[7] + i] - d1 + large * (d3 - d5)


@inner
def _output_8_4(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b, T = _places(at, step), _places(to, apart), m.dtype.type
    half, quarter, eighth, two, four, eight = T(0.5), T(0.25), T(0.125), T(2), T(4), T(8)
    for i in range(uintp(n)):
        m1, m2, m3, m4, m5, m6 = m[a[1] + i], m[a[2] + i], m[a[3] + i], m[a[4] + i], m[a[5] + i], m[a[6] + i]
        y[b[0] + i] = m[a[0] + i] + (m1 + m2) + (m3 + m4) + (m5 + m6)
        y[b[1] + i] = (m1 - m2) + two * (m3 - m4) + half * (m5 - m6)
        y[b[2] + i] = (m1 + m2) + four * (m3 + m4) + quarter * (m5 + m6)
        y[b[3] + i] = (m1 - m2) + eight * (m3 - m4) + eighth * (m5 - m6) + m[a[7] + i]


@inner
def _change_4_8(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b, T = _places(at, step), _places(to, apart), d.dtype.type
    half, quarter, two, four = T(0.5), T(0.25), T(2), T(4)
    for i in range(uintp(n)):
        d0, d1, d2, d3 = d[a[0] + i], d[a[1] + i], d[a[2] + i], d[a[3] + i]
        z[b[0] + i] = d0
        z[b[1] + i] = (d0 + d2) + (d1 + d3)
        z[b[2] + i] = (d0 + d2) - (d1 + d3)
        even, odd = d0 + four * d2, two * (d1 + four * d3)
        z[b[3] + i] = even + odd
        z[b[4] + i] = even - odd
        even, odd = d0 + quarter * d2, half * (d1 + quarter * d3)
        z[b[5] + i] = even + odd
        z[b[6] + i] = even - odd
        z[b[7] + i] = d3
