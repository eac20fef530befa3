"""Local response normalising of rows of C channels that lie one after the other.

A row of C numbers is short, so loops run over all rows at once: every window is a sum of neighbours. Windows that reach
into the next row are then summed again, as far as they go.
"""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.loop import Array, inner
from daskcnn.compiled.runs import copy


@inner
def forward(x: Array, y: Array, kept: Array, C: int, numbers: Array) -> None:
    """y = x · s^-β with s = k + scale · Σ x² over the window.

    numbers: channels before c in its window, size, scale, k, β. kept: s^-β, s^(-β-1) and two spare arrays.
    """
    before, size, length = int(numbers[0]), int(numbers[1]), len(x)
    power, slope = kept[:length], kept[length : 2 * length]
    spare = kept[2 * length : 3 * length + size]
    squares = spare[before : before + length]
    for i in range(length):
        squares[i] = x[i] * x[i]
    _window_sums(spare, power, C, before, size)
    _powers(power, slope, numbers)
    for i in range(length):
        y[i] = x[i] * power[i]


@inner
def backward(x: Array, kept: Array, C: int, numbers: Array, dy: Array) -> None:
    """Replace dy by dx_c = dy_c · s_c^-β - 2 · scale · β · x_c · Σ dy · x · s^(-β-1).

    The sum is over the channels whose window holds c.
    """
    before, size, length = int(numbers[0]), int(numbers[1]), len(x)
    after, factor = size - 1 - before, x.dtype.type(2) * numbers[2] * numbers[4]
    power, slope = kept[:length], kept[length : 2 * length]
    spare, total = kept[2 * length : 3 * length + size], kept[3 * length + size :][:length]
    crossed = spare[after : after + length]
    for i in range(length):
        crossed[i] = dy[i] * x[i] * slope[i]
    _window_sums(spare, total, C, after, size)
    for i in range(length):
        dy[i] = dy[i] * power[i] - factor * x[i] * total[i]


@inner
def _window_sums(values: Array, sums: Array, C: int, before: int, size: int) -> None:
    """sums[i] = the sum of the window of channel i % C in its row of values, which begin after `before` others."""
    if size == 5 and size <= C:
        _windows_of_5(values, sums, C)
    else:
        copy(values, sums)
        for shift in range(1, size):
            others = values[shift : shift + len(sums)]
            for i in range(len(sums)):
                sums[i] += others[i]
        _edges(values, sums, C, before, size)


@inner
def _windows_of_5(values: Array, sums: Array, C: int) -> None:
    """The usual size, in one pass and without a loop for each edge."""
    for i in range(len(sums)):
        sums[i] = values[i] + values[i + 1] + values[i + 2] + values[i + 3] + values[i + 4]
    for first in range(0, len(sums), C):
        last = first + C - 1
        low, high = values[first + 2] + values[first + 3] + values[first + 4], values[last] + values[last + 1]
        high += values[last + 2]
        sums[first], sums[first + 1] = low, low + values[first + 5]
        sums[last], sums[last - 1] = high, high + values[last - 1]


@inner
def _edges(values: Array, sums: Array, C: int, before: int, size: int) -> None:
    """Sum the windows again that reach into another row."""
    first, last = min(before, C), max(min(before, C), C - (size - 1 - before))
    for start in range(0, len(sums), C):
        row = values[start + before : start + before + C]
        for c in range(first):
            sums[start + c] = _window(row, c - before, c - before + size)
        for c in range(last, C):
            sums[start + c] = _window(row, c - before, c - before + size)


@inner
def _window(row: Array, start: int, stop: int) -> float:
    total = row.dtype.type(0)
    for c in range(max(0, start), min(len(row), stop)):
        total += row[c]
    return total


@inner
def _powers(sums: Array, slope: Array, numbers: Array) -> None:
    """Replace window sums by s^-β; slope: s^(-β-1)."""
    T = sums.dtype.type
    one, scale, k, beta = T(1), numbers[2], numbers[3], numbers[4]
    if beta == T(0.75):  # roots compile to vectors, powers do not
        for i in range(len(sums)):
            s = k + scale * sums[i]
            root = np.sqrt(s)
            power = one / (root * np.sqrt(root))
            sums[i] = power
            slope[i] = power * power * power * root  # s^-9/4 · s^1/2
    else:
        for i in range(len(sums)):
            s = k + scale * sums[i]
            power = s**-beta
            sums[i] = power
            slope[i] = power / s
