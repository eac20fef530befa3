"""Pooling of blocks (rows, columns, samples · channels): runs of samples · channels are what loops go over.

A window's places are counted by rows. The first place's run begins the result, and the others join it in turn.
"""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.loop import Array, inner
from daskcnn.compiled.program import AVERAGE, MAX
from daskcnn.compiled.runs import copy


@inner
def forward(
    code: int,
    x: Array,
    width: int,
    y: Array,
    sides: tuple[int, int],
    size: int,
    step: int,
    kept: Array,
    goes_back: bool,
) -> None:
    """y of all windows. kept: for the greatest number its place, for the root of squares its inverse."""
    T, (rows, columns) = x.dtype.type, sides
    run = len(y) // (rows * columns)
    for row in range(rows):
        for column in range(columns):
            at = (row * columns + column) * run
            out, note = y[at : at + run], kept[at : at + run]
            for place in range(size * size):
                at = ((row * step + place // size) * width + column * step + place % size) * run
                _join(code, x[at : at + run], out, note, place, goes_back)
    if code == AVERAGE:
        share = T(1) / T(size * size)
        for i in range(len(y)):
            y[i] *= share
    elif code != MAX:
        zero = T(0)
        for i in range(len(y)):
            y[i] = np.sqrt(y[i])
            kept[i] = T(1) / y[i] if y[i] > zero else zero


@inner
def _join(code: int, x: Array, y: Array, note: Array, place: int, goes_back: bool) -> None:
    """A place's run joins the result of those before."""
    T = x.dtype.type
    if code == MAX:
        if place == 0:
            copy(x, y)
            note[:] = 0
        else:
            here = T(place)
            if goes_back:
                for i in range(len(x)):
                    note[i] = here if x[i] > y[i] else note[i]
            for i in range(len(x)):
                one, other = x[i], y[i]
                y[i] = other if (one <= other) | (other != other) else one  # what is not a number goes through
    elif code == AVERAGE:
        if place == 0:
            copy(x, y)
        else:
            for i in range(len(x)):
                y[i] += x[i]
    else:
        zero = T(0)
        for i in range(len(x)):
            y[i] = x[i] * x[i] + (zero if place == 0 else y[i])


@inner
def backward(
    code: int, x: Array, width: int, dy: Array, sides: tuple[int, int], size: int, step: int, kept: Array, dx: Array
) -> None:
    """dx of all windows, where windows overlap added up; 0 where there is none."""
    (rows, columns), adds = sides, size != step
    run = len(dy) // (rows * columns)
    if adds:
        dx[:] = 0
    for row in range(rows):
        for column in range(columns):
            at = (row * columns + column) * run
            back, note = dy[at : at + run], kept[at : at + run]
            for place in range(size * size):
                at = ((row * step + place // size) * width + column * step + place % size) * run
                _give(code, x[at : at + run], back, note, place, size, dx[at : at + run], adds)


@inner
def _give(code: int, x: Array, dy: Array, note: Array, place: int, size: int, dx: Array, adds: bool) -> None:
    """A place's run gets its part of the gradient, added to what other windows gave it, if there may be others."""
    T = x.dtype.type
    zero = T(0)
    if code == MAX:
        here = T(place)
        for i in range(len(dy)):
            dx[i] = (dx[i] if adds else zero) + (dy[i] if note[i] == here else zero)
    elif code == AVERAGE:
        share = T(1) / T(size * size)
        for i in range(len(dy)):
            dx[i] = (dx[i] if adds else zero) + dy[i] * share
    else:
        for i in range(len(dy)):
            dx[i] = (dx[i] if adds else zero) + x[i] * (dy[i] * note[i])
