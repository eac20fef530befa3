"""Local response normalising of rows of C channels that lie one after the other.

A row of C numbers is short, so loops run over all rows at once: the squares are laid out with size - 1 zeros between
the rows, and then every window is a sum of neighbours.
"""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.loop import Array, inner
from daskcnn.compiled.runs import copy


@inner
def forward(x: Array, y: Array, kept: Array, C: int, numbers: Array, goes_back: bool) -> None:
    """y = x · s^-β with s = k + scale · Σ x² over the window.

    numbers: channels before c in its window, size, scale, k, β. kept: s^-β, s^(-β-1) and two spare arrays.
    """
    before, size = int(numbers[0]), int(numbers[1])
    rows, pitch = len(x) // C, C + size - 1
    length = rows * pitch
    power, slope = kept[:length], kept[length : 2 * length]
    squares = kept[2 * length : 3 * length + size]
    squares[:] = 0
    for row in range(rows):
        own, to = x[row * C : (row + 1) * C], squares[row * pitch + before : row * pitch + before + C]
        for c in range(C):
            to[c] = own[c] * own[c]
    _window_sums(squares, power, size)
    _powers(power, slope, numbers, goes_back)
    for row in range(rows):
        own, to, factor = x[row * C : (row + 1) * C], y[row * C : (row + 1) * C], power[row * pitch : row * pitch + C]
        for c in range(C):
            to[c] = own[c] * factor[c]


@inner
def backward(x: Array, kept: Array, C: int, numbers: Array, dy: Array) -> None:
    """Replace dy by dx_c = dy_c · s_c^-β - 2 · scale · β · x_c · Σ dy · x · s^(-β-1).

    The sum is over the channels whose window holds c.
    """
    T = x.dtype.type
    before, size = int(numbers[0]), int(numbers[1])
    after, factor = size - 1 - before, T(2) * numbers[2] * numbers[4]
    rows, pitch = len(x) // C, C + size - 1
    length = rows * pitch
    power, slope = kept[:length], kept[length : 2 * length]
    crossed, total = kept[2 * length : 3 * length + size], kept[3 * length + size :][:length]
    crossed[:] = 0
    for row in range(rows):
        own, back, start = x[row * C : (row + 1) * C], dy[row * C : (row + 1) * C], row * pitch
        to, by = crossed[start + after : start + after + C], slope[start : start + C]
        for c in range(C):
            to[c] = back[c] * own[c] * by[c]
    _window_sums(crossed, total, size)
    for row in range(rows):
        own, back = x[row * C : (row + 1) * C], dy[row * C : (row + 1) * C]
        direct, windows = power[row * pitch : row * pitch + C], total[row * pitch : row * pitch + C]
        for c in range(C):
            back[c] = back[c] * direct[c] - factor * own[c] * windows[c]


@inner
def _window_sums(values: Array, sums: Array, size: int) -> None:
    """sums[i] = values[i] + … + values[i + size - 1]."""
    if size == 5:
        for i in range(len(sums)):
            sums[i] = values[i] + values[i + 1] + values[i + 2] + values[i + 3] + values[i + 4]
        return
    copy(values, sums)
    for shift in range(1, size):
        others = values[shift : shift + len(sums)]
        for i in range(len(sums)):
            sums[i] += others[i]


@inner
def _powers(sums: Array, slope: Array, numbers: Array, goes_back: bool) -> None:
    """Replace window sums by s^-β; slope: s^(-β-1), if the pass goes back."""
    T = sums.dtype.type
    one, scale, k, beta = T(1), numbers[2], numbers[3], numbers[4]
    if beta == T(0.75):  # roots compile to vectors, powers do not
        for i in range(len(sums)):
            s = k + scale * sums[i]
            root = np.sqrt(s)
            sums[i] = one / (root * np.sqrt(root))
            slope[i] = s
    else:
        for i in range(len(sums)):
            s = k + scale * sums[i]
            sums[i] = s**-beta
            slope[i] = s
    if goes_back:
        for i in range(len(sums)):
            slope[i] = sums[i] / slope[i]
