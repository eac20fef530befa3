"""Windows of 2×2 pixels that meet without overlap, behind batch normalising and an activation, in one pass.

A map is (H, W, samples · channels). A run is the numbers of one pixel of the output, or a piece of them as long as
`tiled`, whose five rows are those of `batchnorm`, repeated. Without batch normalising mean and shift are 0 and the
factor is 1. Runs are counted by pixels, then by pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskcnn.compiled.activations import tanh
from daskcnn.compiled.loop import Array, boolean, float64, inner, intp, loop
from daskcnn.compiled.program import MAX, RELU, TANH
from daskcnn.compiled.runs import fold

Places = tuple[Array, Array, Array, Array]
"""The same run of the window's four pixels, by rows."""


@loop(lambda T: (intp, intp, T[:, :, ::1], T[:, ::1], T[:, :, ::1], intp, intp))
def forward(pool: int, activation: int, x: Array, tiled: Array, y: Array, first: int, last: int) -> None:
    """The runs first, …, last - 1 of y; pool: MAX or AVERAGE; activation: RELU or none (-1), of averages also TANH."""
    to = y.reshape(y.size)
    for run in range(first, last):
        place, n = _place(run, y.shape, tiled)
        window, out = _window(x, run, y.shape, tiled), to[place : place + n]
        if pool == MAX:
            _greatest(window, tiled, activation, out)
        elif activation == TANH:
            _mean_of_tanh(window, out)
        else:
            _mean(window, activation, out)


@loop(lambda T: (intp, T[:, :, ::1], T[:, ::1], T[:, :, ::1], float64[:, :, ::1], intp, intp, intp, T[:, ::1]))
def sums(
    activation: int, x: Array, tiled: Array, dy: Array, parts: Array, size: int, first: int, last: int, scratch: Array
) -> None:
    """parts[part] = the sums (2, C) of d and of d·(x - mean) over `size` runs each, first <= part < last.

    d is dy where x is the greatest of its window and, behind a ReLU, above 0; elsewhere 0. scratch: (2, piece).
    """
    change = dy.reshape(dy.size)
    runs = dy.shape[0] * dy.shape[1] * -(-dy.shape[2] // tiled.shape[1])
    for part in range(first, last):
        scratch[:] = 0
        for run in range(part * size, min(runs, (part + 1) * size)):
            place, n = _place(run, dy.shape, tiled)
            _add_greatest(_window(x, run, dy.shape, tiled), tiled, activation, change[place : place + n], scratch)
        fold(scratch[0], parts[part, 0])
        fold(scratch[1], parts[part, 1])


@loop(lambda T: (intp, intp, boolean, T[:, :, ::1], T[:, ::1], T[:, :, ::1], T[:, :, ::1], intp, intp))
def backward(
    pool: int, activation: int, scaled: bool, x: Array, tiled: Array, dy: Array, dx: Array, first: int, last: int
) -> None:
    """dx of the windows of these runs; scaled: d·factor + (x - mean)·by_x + by_all behind batch normalising."""
    change = dy.reshape(dy.size)
    for run in range(first, last):
        place, n = _place(run, dy.shape, tiled)
        window, own = _window(x, run, dy.shape, tiled), change[place : place + n]
        out = _window(dx, run, dy.shape, tiled)
        if pool == MAX and scaled:
            _give_greatest_scaled(window, tiled, activation, own, out)
        elif pool == MAX:
            _give_greatest(window, activation, own, out)
        elif activation == TANH:
            _give_all_of_tanh(window, own, out)
        else:
            _give_all(window, activation, own, out)


@inner
def _place(run: int, shape: tuple[int, int, int], tiled: Array) -> tuple[int, int]:
    """Return the place where a run of the output begins, and its length."""
    length, piece = shape[2], tiled.shape[1]
    pieces = -(-length // piece)
    start = run % pieces * piece
    return run // pieces * length + start, min(piece, length - start)


@inner
def _window(x: Array, run: int, shape: tuple[int, int, int], tiled: Array) -> Places:
    """Return the input's numbers that a run of an output of this shape is made of."""
    flat, width, length, piece = x.reshape(x.size), x.shape[1], x.shape[2], tiled.shape[1]
    pieces = -(-length // piece)
    pixel, start = run // pieces, run % pieces * piece
    n = min(piece, length - start)
    upper = (pixel // shape[1] * 2 * width + pixel % shape[1] * 2) * length + start
    lower = upper + width * length
    return (
        flat[upper : upper + n],
        flat[upper + length : upper + length + n],
        flat[lower : lower + n],
        flat[lower + length : lower + length + n],
    )


@inner
def _least(activation: int, T: Any) -> Any:
    """Return the least value of an output."""
    return T(0) if activation == RELU else T(-np.inf)


@inner
def _greater(one: Any, other: Any) -> Any:
    return one if (one >= other) | (one != one) else other  # what is not a number goes through


@inner
def _greatest(window: Places, tiled: Array, activation: int, y: Array) -> None:
    (a, b, c, d), least = window, _least(activation, y.dtype.type)
    mean, factor, shift = tiled[0], tiled[1], tiled[2]
    for i in range(len(y)):
        upper = _greater((a[i] - mean[i]) * factor[i] + shift[i], (b[i] - mean[i]) * factor[i] + shift[i])
        lower = _greater((c[i] - mean[i]) * factor[i] + shift[i], (d[i] - mean[i]) * factor[i] + shift[i])
        top = _greater(upper, lower)
        y[i] = least if top < least else top


@inner
def _add_greatest(window: Places, tiled: Array, activation: int, dy: Array, sums: Array) -> None:
    zero, least, (a, b, c, d) = dy.dtype.type(0), _least(activation, dy.dtype.type), window
    mean, factor, shift, total, product = tiled[0], tiled[1], tiled[2], sums[0], sums[1]
    for i in range(len(dy)):
        m, f, s = mean[i], factor[i], shift[i]
        apart, other = a[i] - m, b[i] - m
        apart = other if other * f + s > apart * f + s else apart
        other = c[i] - m
        apart = other if other * f + s > apart * f + s else apart
        other = d[i] - m
        apart = other if other * f + s > apart * f + s else apart
        change = dy[i] if apart * f + s > least else zero
        total[i] += change
        product[i] += change * apart


@inner
def _give_greatest(window: Places, activation: int, dy: Array, out: Places) -> None:
    zero, least, (a, b, c, d), (da, db, dc, dd) = dy.dtype.type(0), _least(activation, dy.dtype.type), window, out
    for i in range(len(dy)):
        to_a, to_b, to_c, to_d = _first_of_greatest(a[i], b[i], c[i], d[i], least)
        da[i] = dy[i] if to_a else zero
        db[i] = dy[i] if to_b else zero
        dc[i] = dy[i] if to_c else zero
        dd[i] = dy[i] if to_d else zero


@inner
def _give_greatest_scaled(window: Places, tiled: Array, activation: int, dy: Array, out: Places) -> None:
    zero, least, (a, b, c, d), (da, db, dc, dd) = dy.dtype.type(0), _least(activation, dy.dtype.type), window, out
    mean, factor, shift, by_x, by_all = tiled[0], tiled[1], tiled[2], tiled[3], tiled[4]
    for i in range(len(dy)):
        m, f, s = mean[i], factor[i], shift[i]
        far_a, far_b, far_c, far_d = a[i] - m, b[i] - m, c[i] - m, d[i] - m
        to_a, to_b, to_c, to_d = _first_of_greatest(far_a * f + s, far_b * f + s, far_c * f + s, far_d * f + s, least)
        change = dy[i] * f
        da[i] = (change if to_a else zero) + far_a * by_x[i] + by_all[i]
        db[i] = (change if to_b else zero) + far_b * by_x[i] + by_all[i]
        dc[i] = (change if to_c else zero) + far_c * by_x[i] + by_all[i]
        dd[i] = (change if to_d else zero) + far_d * by_x[i] + by_all[i]


@inner
def _first_of_greatest(a: Any, b: Any, c: Any, d: Any, least: Any) -> tuple[bool, bool, bool, bool]:
    """Return True for the window's greatest: the first of equal ones, and none if it is `least` or not a number."""
    top = _greater(_greater(a, b), _greater(c, d))
    counts = top > least
    is_a = counts & (a == top)
    is_b = counts & (b == top) & (not is_a)
    is_c = counts & (c == top) & (not (is_a | is_b))
    return is_a, is_b, is_c, counts & (not (is_a | is_b | is_c))


@inner
def _mean(window: Places, activation: int, y: Array) -> None:
    (a, b, c, d), least, quarter = window, _least(activation, y.dtype.type), y.dtype.type(0.25)
    for i in range(len(y)):
        upper = (least if a[i] < least else a[i]) + (least if b[i] < least else b[i])
        lower = (least if c[i] < least else c[i]) + (least if d[i] < least else d[i])
        y[i] = (upper + lower) * quarter


@inner
def _mean_of_tanh(window: Places, y: Array) -> None:
    T, (a, b, c, d) = y.dtype.type, window
    for i in range(len(y)):
        y[i] = (tanh(a[i], T) + tanh(b[i], T) + (tanh(c[i], T) + tanh(d[i], T))) * T(0.25)


@inner
def _give_all(window: Places, activation: int, dy: Array, out: Places) -> None:
    T, (a, b, c, d), (da, db, dc, dd) = dy.dtype.type, window, out
    zero, all_of_it = T(0), activation != RELU
    for i in range(len(dy)):
        change = dy[i] * T(0.25)
        da[i] = change if all_of_it | (a[i] > zero) else zero
        db[i] = change if all_of_it | (b[i] > zero) else zero
        dc[i] = change if all_of_it | (c[i] > zero) else zero
        dd[i] = change if all_of_it | (d[i] > zero) else zero


@inner
def _give_all_of_tanh(window: Places, dy: Array, out: Places) -> None:
    T = dy.dtype.type
    for place in range(4):
        x, dx = window[place], out[place]
        for i in range(len(dy)):
            value = tanh(x[i], T)
            dx[i] = dy[i] * T(0.25) * (T(1) - value * value)
