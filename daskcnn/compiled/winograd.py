"""Winograd's minimal filtering (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015) as loops.

A transform brings a tile of a map to its points by one small matrix along the height and the same one along the width.
It is the same for every sample and channel, so each step is a loop over a run of a pixel's contiguous samples and
channels (`minimal`).

A group is some tiles of some samples: its rows, one for each tile and sample, are multiplied together at each point.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from daskcnn.compiled.loop import boolean, inner, inner_in_order, integers, intp, loop, uintp
from daskcnn.compiled.minimal import folded_8_5, from_points, kernels_5_8, places, to_points
from daskcnn.compiled.products import Matrix, multiply
from daskcnn.compiled.runs import add_at, copy_at
from daskcnn.compiled.sizes import MOST_POINTS, RUN, STEP, STEPS, Tile, apart


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
    """The place of products: at each point the rows of a group, `apart` numbers after those of the point before."""

    numbers: Any
    apart: int


points_apart, TILE = inner(apart), integers(Tile)


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, ::1], boolean, T[::1], T[:, :, :, ::1], T[::1]),
        *(TILE, intp, intp, intp, intp, intp, intp, intp, intp, intp, T[::1]),
    )
)
def correlate(
    x: Any,
    u: Any,
    turned: bool,
    bias: Any,
    y: Any,
    m: Any,
    f: Any,
    top: int,
    left: int,
    tiles: int,
    samples: int,
    first: int,
    last: int,
    begin: int,
    end: int,
    small: int,
    scratch: Any,
) -> None:
    """Write the groups first … last of y = x ⋆ w + bias; if not of all points, then their products alone.

    x : (H, W, N, C), with `top` and `left` rows and columns of padding
    u : kernels at the points begin … end along the height, (… · kernels, C, K), or (…, K, C) if `turned`
    bias : (K,)
    y : (out_H, out_W, N, K), made in tiles of outputs × outputs
    m : products of a group, points² · `apart(rows, K)` numbers
    f, tiles, samples : what a tile has; tiles and samples of a group
    small : of `multiply`
    scratch : STEPS + (end - begin)·points · `apart(rows, C)` numbers
    """
    N, C, K = x.shape[2], x.shape[3], y.shape[3]
    source = Map(x.reshape(x.size), x.shape[0], x.shape[1], N * C)
    rows, of_first, kernels = tiles * samples, kernels_of(f, begin, 0), u.reshape(u.size)
    v, products = Rows(scratch[STEPS:], points_apart(rows, C)), Rows(m, points_apart(rows, K))
    for number in range(first, last):
        group = _group(number, y, f.outputs, tiles, samples)
        count = (group.last - group.first) * (group.stop - group.start)
        gather(source, C, group, f.step, top, left, f.inputs, f.points, begin, end, v, scratch)
        for i in range(begin, end):
            for j in range(f.points):
                a = Matrix(v.numbers, ((i - begin) * f.points + j) * v.apart, C, False)
                at = (kernels_of(f, i, j) - of_first) * C * K
                b = Matrix(kernels, at, C if turned else K, turned)
                c = Matrix(products.numbers, (i * f.points + j) * products.apart, K, False)
                multiply(a, b, c, count, K, C, False, small)
        if begin <= 1 < end:  # all outputs receive point (1, 1) with factor 1
            _add_bias(_matrix(products, f.points + 1, count, K), bias)
        if begin == 0 and end == f.points:
            _spread(products, y, group, f, scratch)


@loop(lambda T: (T[::1], T[:, :, :, ::1], TILE, intp, intp, T[::1]))
def write_outputs(m: Any, y: Any, f: Any, first: int, last: int, scratch: Any) -> None:
    """Write the rows first … last of tiles × samples of y (out_H, out_W, N, K) from the products m of all of them."""
    N, K, across = y.shape[2], y.shape[3], -(-y.shape[1] // f.outputs)
    products = Rows(m, points_apart(-(-y.shape[0] // f.outputs) * across * N, K))
    target = Map(y.reshape(y.size), y.shape[0], y.shape[1], N * K)
    for tile in range(first // N, -(-last // N)):
        start, stop = max(0, first - tile * N), min(N, last - tile * N)
        row, col, at = tile // across * f.outputs, tile % across * f.outputs, (tile * N + start) * K
        _out_of(products, at, target, start * K, (stop - start) * K, row, col, f, scratch)


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, ::1], TILE, intp, intp),
        *(intp, intp, intp, intp, intp, intp, intp, T[::1]),
    )
)
def correlate_filter(
    x: Any,
    dy: Any,
    du: Any,
    f: Any,
    top: int,
    left: int,
    tiles: int,
    samples: int,
    first: int,
    last: int,
    begin: int,
    end: int,
    small: int,
    scratch: Any,
) -> None:
    """Write du (kernels², C, K) = Σ Vᵀ·Z over the groups first … last, at the points begin … end along the height.

    V are the tiles of x (H, W, N, C), Z those of dy (out_H, out_W, N, K), at their points. small: of `multiply`.
    """
    N, C, K = x.shape[2], x.shape[3], dy.shape[3]
    source = Map(x.reshape(x.size), x.shape[0], x.shape[1], N * C)
    change = Map(dy.reshape(dy.size), dy.shape[0], dy.shape[1], N * K)
    rows, sums = tiles * samples, du.reshape(du.size)
    v = Rows(scratch[STEPS:], points_apart(rows, C))
    z = Rows(scratch[STEPS + (end - begin) * f.points * v.apart :], points_apart(rows, K))
    for number in range(first, last):
        group = _group(number, dy, f.outputs, tiles, samples)
        count = (group.last - group.first) * (group.stop - group.start)
        gather(source, C, group, f.step, top, left, f.inputs, f.points, begin, end, v, scratch)
        gather(change, K, group, f.outputs, 0, 0, f.outputs, f.points, begin, end, z, scratch)
        for i in range(begin, end):
            for j in range(f.points):
                p, kernels = (i - begin) * f.points + j, kernels_of(f, i, j)
                a, b = Matrix(v.numbers, p * v.apart, C, True), Matrix(z.numbers, p * z.apart, K, False)
                adds = number > first or i >= f.kernels or j >= f.kernels
                multiply(a, b, Matrix(sums, kernels * C * K, K, False), C, K, count, adds, small)


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, :, ::1], intp, intp, intp, intp, T[::1]))
def transform_kernels(w: Any, g: Any, u: Any, begin: int, end: int, first: int, last: int, scratch: Any) -> None:
    """Write u ((end - begin)·points, C, K) = g w gᵀ at the points begin … end along the height.

    w (R, S, C, K), g (points, R); of each tap the numbers first … last.
    """
    R, S, points, size = w.shape[0], w.shape[1], g.shape[0], w.shape[2] * w.shape[3]
    taps, target = w.reshape(w.size), u.reshape(u.size)
    for at in range(first, last, RUN):
        n = min(RUN, last - at)
        if R == S == 5 and end - begin == points == 8:
            for s in range(S):
                kernels_5_8(taps, s * size + at, S * size, g, scratch, s * STEP, S * STEP, n)
            for i in range(points):
                kernels_5_8(scratch, i * S * STEP, STEP, g, target, i * points * size + at, size, n)
            continue
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
    paired = R == S == 5 and points == 8
    for at in range(first, last, RUN):
        n = min(RUN, last - at)
        for i in range(points):
            numbers, here, step = sums, i * points * size + at, size
            if parts > 1:
                numbers, here, step = scratch, 0, STEP
                for j in range(points):
                    _total(sums, (i * points + j) * size + at, points * points * size, parts, scratch, j * STEP, n)
            if paired:
                folded_8_5(numbers, here, step, gt, half, i * S * STEP, STEP, n)
                continue
            for s in range(S):
                _combine(numbers, here, step, gt, s, points, half, (i * S + s) * STEP, n)
        for s in range(S):
            if paired:
                folded_8_5(half, s * STEP, S * STEP, gt, target, s * size + at, S * size, n)
                continue
            for r in range(R):
                _combine(half, s * STEP, S * STEP, gt, r, points, target, (r * S + s) * size + at, n)


@inner
def kernels_of(f: Any, i: int, j: int) -> int:
    """Return the number of the kernels at point (i, j)."""
    return min(i, f.kernels - 1) * f.kernels + min(j, f.kernels - 1)


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
def gather(
    source: Map,
    channels: int,
    group: TileGroup,
    step: int,
    top: int,
    left: int,
    taps: int,
    points: int,
    begin: int,
    end: int,
    rows: Rows,
    scratch: Any,
) -> None:
    """Bring a group's tiles taps × taps, `step` pixels apart, to the points begin … end along the height."""
    start, length = group.start * channels, (group.stop - group.start) * channels
    for tile in range(group.first, group.last):
        row, col = tile // group.across * step - top, tile % group.across * step - left
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
            to_points(numbers, here, step, taps, scratch, j * STEP, taps * STEP, points, n)
        for i in range(begin, end):
            to = (i - begin) * points * rows.apart + at + first
            to_points(scratch, i * taps * STEP, STEP, taps, rows.numbers, to, rows.apart, points, n)


@inner
def _spread(rows: Rows, y: Any, group: TileGroup, f: Any, scratch: Any) -> None:
    """Write the tiles of a group into y (out_H, out_W, N, K)."""
    N, K = y.shape[2], y.shape[3]
    target, length = Map(y.reshape(y.size), y.shape[0], y.shape[1], N * K), (group.stop - group.start) * K
    for tile in range(group.first, group.last):
        row, col = tile // group.across * f.outputs, tile % group.across * f.outputs
        at = (tile - group.first) * length
        _out_of(rows, at, target, group.start * K, length, row, col, f, scratch)


@inner
def _out_of(
    rows: Rows, at: int, target: Map, start: int, length: int, row: int, col: int, f: Any, scratch: Any
) -> None:
    """Write the tile outputs × outputs at (row, col), as far as it lies on the map, from its points."""
    edge, points, outputs = scratch[MOST_POINTS * MOST_POINTS * STEP : STEPS], f.points, f.outputs
    inside = min(outputs, target.width - col)
    for first in range(0, length, RUN):
        n = min(RUN, length - first)
        for j in range(points):
            here = j * rows.apart + at + first
            from_points(rows.numbers, here, points * rows.apart, points, scratch, j * STEP, points * STEP, outputs, n)
        for i in range(min(outputs, target.height - row)):
            to = ((row + i) * target.width + col) * target.size + start + first
            numbers, here, step = edge, 0, STEP
            if inside == outputs:
                numbers, here, step = target.numbers, to, target.size
            from_points(scratch, i * points * STEP, STEP, points, numbers, here, step, outputs, n)
            if inside < outputs:
                for j in range(inside):
                    copy_at(edge, j * STEP, target.numbers, to + j * target.size, n)


@inner
def _copy_column(source: Map, row: int, col: int, taps: int, start: int, edge: Any, n: int) -> None:
    """Copy a column of a tile, with zeros beyond the map."""
    for i in range(taps):
        if 0 <= row + i < source.height and 0 <= col < source.width:
            copy_at(source.numbers, ((row + i) * source.width + col) * source.size + start, edge, i * STEP, n)
        else:
            edge[i * STEP : i * STEP + n] = 0


@inner
def _add_bias(m: Any, bias: Any) -> None:
    for row in m:
        for k in range(bias.size):
            row[k] += bias[k]


@inner
def _combine(source: Any, at: int, step: int, factors: Any, row: int, count: int, target: Any, to: int, n: int) -> None:
    """Write the sum of `count` runs, each times its factor of this row: at once for the usual numbers of them."""
    if count == 3:
        _combine_3(source, at, step, factors[row], target, to, n)
    elif count == 5:
        _combine_5(source, at, step, factors[row], target, to, n)
    elif count == 6:
        _combine_6(source, at, step, factors[row], target, to, n)
    else:
        total = target[to : to + n]
        for k in range(count):
            factor, run = factors[row, k], source[at + k * step : at + k * step + n]
            for i in range(n):
                total[i] = factor * run[i] + (total[i] if k > 0 else 0)


@inner_in_order
def _combine_3(d: Any, at: int, step: int, f: Any, v: Any, to: int, n: int) -> None:
    a, b, f0, f1, f2 = places(at, step), uintp(to), f[0], f[1], f[2]
    for i in range(uintp(n)):
        v[b + i] = f0 * d[a[0] + i] + f1 * d[a[1] + i] + f2 * d[a[2] + i]


@inner_in_order
def _combine_5(d: Any, at: int, step: int, f: Any, v: Any, to: int, n: int) -> None:
    a, b, f0, f1, f2, f3, f4 = places(at, step), uintp(to), f[0], f[1], f[2], f[3], f[4]
    for i in range(uintp(n)):
        first = f0 * d[a[0] + i] + f1 * d[a[1] + i] + f2 * d[a[2] + i]
        v[b + i] = first + f3 * d[a[3] + i] + f4 * d[a[4] + i]


@inner_in_order
def _combine_6(d: Any, at: int, step: int, f: Any, v: Any, to: int, n: int) -> None:
    a, b, f0, f1, f2, f3, f4, f5 = places(at, step), uintp(to), f[0], f[1], f[2], f[3], f[4], f[5]
    for i in range(uintp(n)):
        first = f0 * d[a[0] + i] + f1 * d[a[1] + i] + f2 * d[a[2] + i]
        v[b + i] = first + f3 * d[a[3] + i] + f4 * d[a[4] + i] + f5 * d[a[5] + i]


@inner
def _total(source: Any, at: int, step: int, count: int, target: Any, to: int, n: int) -> None:
    """Write the sum of `count` runs."""
    copy_at(source, at, target, to, n)
    for k in range(1, count):
        add_at(source, at + k * step, target, to, n)
