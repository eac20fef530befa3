"""Minibatches x (H, W, N, C): images are read where they lie in their chunks, normalised, moved and augmented.

Each image is treated by itself, and all operations are rounded as written, so that an image comes out the same in any
minibatch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskcnn.compiled.loop import float64, inner_as_written, int64, loop, uint8, uint64, uintp, vector_at
from daskcnn.compiled.runs import copy_at

ROWS = 4
"""Rows of an image that are normalised at once, so that the processor reads further bytes of the image ahead."""


@loop(lambda T: (uint64[::1], uint8[:, ::1]))
def gather(addresses: Any, samples: Any) -> None:
    """Copy samples, (N, bytes of each), from where they lie; addresses (N,)."""
    count, size = samples.shape
    made = samples.reshape(samples.size)
    for n in range(count):
        copy_at(vector_at(addresses[n], samples, size), 0, made, n * size, size)


@loop(lambda T: (uint64[::1], T[::1], T[::1], int64[:, ::1], T[:, :, ::1], T[:, :, :, ::1]), as_written=True)
def normalise(addresses: Any, mean: Any, factor: Any, places: Any, rows: Any, x: Any) -> None:
    """Write x (H, W, N, C) = (images - mean)·factor, 0 beyond an image.

    addresses : (N,), of the images, each (H, W, C) bytes
    mean, factor : (W·C,), those of the channels for a row of pixels
    places : (N, 3), the row and the column of an image that are x's first ones, and 1, or -1 from right to left
    rows : (N, ROWS, W·C), scratch memory
    """
    H, W, N, C = x.shape
    made = x.reshape(x.size)
    for row in range(0, H, ROWS):
        for n in range(N):
            image = vector_at(addresses[n], np.uint8, H * W * C)
            for r in range(ROWS):
                _normalise_row(image, row + r + places[n, 0], H, mean, factor, rows[n, r])
        for r in range(min(ROWS, H - row)):
            to = (row + r) * W * N * C
            if C == 3:  # a number that the compiler knows: twice as fast
                _place(rows, r, places, 3, made, to)
            elif C == 1:
                _place(rows, r, places, 1, made, to)
            else:
                _place(rows, r, places, C, made, to)


@loop(lambda T: (uint64[::1], T[::1], T[::1], int64[:, ::1], T[:, :, ::1], T[:, :, :, ::1]), as_written=True)
def normalise_reflected(addresses: Any, mean: Any, factor: Any, places: Any, rows: Any, x: Any) -> None:
    """Normalise likewise, with the mirror image beyond an image in place of 0. Its outermost pixels are not repeated.

    One loop that does both would make the other case slower by an eighth.
    """
    H, W, N, C = x.shape
    made = x.reshape(x.size)
    for row in range(0, H, ROWS):
        for n in range(N):
            image = vector_at(addresses[n], np.uint8, H * W * C)
            for r in range(ROWS):
                _normalise_row(image, _reflected(row + r + places[n, 0], H), H, mean, factor, rows[n, r])
        for r in range(min(ROWS, H - row)):
            to = (row + r) * W * N * C
            if C == 3:
                _place_reflected(rows, r, places, 3, made, to)
            else:
                _place_reflected(rows, r, places, C, made, to)


@inner_as_written
def _place_reflected(rows: Any, r: int, places: Any, C: int, made: Any, to: int) -> None:
    """Write a row of all images at their places, or at the mirror images of those beyond it."""
    N, W = len(rows), rows.shape[2] // C
    for col in range(W):
        for n in range(N):
            at = _reflected(places[n, 1] + places[n, 2] * col, W)
            here = uintp(to + (col * N + n) * C)
            for c in range(C):
                made[here + uintp(c)] = rows[uintp(n), uintp(r), uintp(at * C + c)]


@inner_as_written
def _reflected(at: int, size: int) -> int:
    """Return the place on an axis whose mirror image is at this place beyond it."""
    return -at if at < 0 else at if at < size else 2 * size - 2 - at


@inner_as_written
def _normalise_row(image: Any, i: int, H: int, mean: Any, factor: Any, row: Any) -> None:
    """row = row i of the image, normalised; 0 beyond the image."""
    run = uintp(len(mean))
    if 0 <= i < H:
        at = uintp(i) * run
        for k in range(run):
            row[k] = (image[at + k] - mean[k]) * factor[k]
    else:
        for k in range(run):
            row[k] = 0


@inner_as_written
def _place(rows: Any, r: int, places: Any, C: int, made: Any, to: int) -> None:
    """Write a row of all images at their places to `made`, from `to` on."""
    N, W = len(rows), rows.shape[2] // C
    for col in range(W):
        for n in range(N):
            at = places[n, 1] + places[n, 2] * col
            here = uintp(to + (col * N + n) * C)
            if 0 <= at < W:
                for c in range(C):
                    made[here + uintp(c)] = rows[uintp(n), uintp(r), uintp(at * C + c)]
            else:
                for c in range(C):
                    made[here + uintp(c)] = 0


@loop(lambda T: (T[:, :, :, ::1], int64[:, ::1]), as_written=True)
def erase(x: Any, boxes: Any) -> None:
    """Set each image to 0 in its box; boxes (N, 4): the first row and column in it, and those behind it."""
    _, W, N, C = x.shape
    made = x.reshape(x.size)
    for n in range(N):
        for i in range(boxes[n, 0], boxes[n, 2]):
            for j in range(boxes[n, 1], boxes[n, 3]):
                at = uintp(((i * W + j) * N + n) * C)
                for c in range(uintp(C)):
                    made[at + c] = 0


@loop(lambda T: (T[:, :, :, ::1], int64[:, ::1], T[:, ::1], int64[:, ::1], T[:, ::1], T[:, :, :, ::1]), as_written=True)
def resample(x: Any, rows: Any, down: Any, columns: Any, right: Any, y: Any) -> None:
    """Write y (H, W, N, C): pixels in between those of x, bilinear.

    rows, columns : (H, N) and (W, N), the pixel of x before each of y
    down, right : the part of the way to the next one
    """
    H, W, N, C = x.shape
    given, made = x.reshape(x.size), y.reshape(y.size)
    for i in range(H):
        for j in range(W):
            to = (i * W + j) * N
            for n in range(N):
                above, before = rows[i, n], columns[j, n]
                below, behind = min(above + 1, H - 1), min(before + 1, W - 1)
                u, v = down[i, n], right[j, n]
                ab, ad = uintp(((above * W + before) * N + n) * C), uintp(((above * W + behind) * N + n) * C)
                bb, bd = uintp(((below * W + before) * N + n) * C), uintp(((below * W + behind) * N + n) * C)
                here = uintp((to + n) * C)
                for c in range(uintp(C)):
                    upper = given[ab + c] + (given[ad + c] - given[ab + c]) * v
                    lower = given[bb + c] + (given[bd + c] - given[bb + c]) * v
                    made[here + c] = upper + (lower - upper) * u


@loop(
    lambda T: (T[:, :, :, ::1], float64[:, ::1], float64[::1], float64[::1], float64[::1], float64[:, :, ::1]),
    as_written=True,
)
def recolour(x: Any, factors: Any, mean: Any, deviation: Any, limits: Any, lines: Any) -> None:
    """Change brightness, contrast and saturation in place, of pixels as they are stored: x·deviation + mean.

    factors : (N, 3)
    mean, deviation : (C,)
    limits : (2,), the least and the largest that a pixel may be
    lines : (2, N, C), scratch memory
    """
    H, W, N, C = x.shape
    made = x.reshape(x.size)
    _tones(made.reshape(H * W, N, C), factors, mean, deviation, lines)
    for p in range(H * W):
        for n in range(N):
            at, grey, colour = uintp((p * N + n) * C), 0.0, 1.0
            if C == 3:
                colour = factors[n, 2]
                grey = 0.299 * (lines[0, n, 0] * made[at] + lines[1, n, 0])
                grey += 0.587 * (lines[0, n, 1] * made[at + uintp(1)] + lines[1, n, 1])
                grey += 0.114 * (lines[0, n, 2] * made[at + uintp(2)] + lines[1, n, 2])
            for c in range(uintp(C)):
                pixel = grey + colour * (lines[0, n, c] * made[at + c] + lines[1, n, c] - grey)
                made[at + c] = (_within(pixel, limits[0], limits[1]) - mean[c]) / deviation[c]


@inner_as_written
def _tones(x: Any, factors: Any, mean: Any, deviation: Any, lines: Any) -> None:
    """lines = factor and summand by which brightness and contrast change a number of x (H·W, N, C)."""
    count, N, C = x.shape
    lines[:] = 0
    for p in range(count):
        for n in range(N):
            for c in range(C):
                lines[1, n, c] += x[p, n, c]
    for n in range(N):
        bright, contrast = factors[n, 0], factors[n, 1]
        for c in range(C):
            average = bright * (lines[1, n, c] / count * deviation[c] + mean[c])
            lines[0, n, c] = contrast * bright * deviation[c]
            lines[1, n, c] = contrast * bright * mean[c] + (1 - contrast) * average


@inner_as_written
def _within(value: float, least: float, most: float) -> float:
    """Return the value, or the limit that it lies beyond."""
    return least if value < least else most if value > most else value


@loop(lambda T: (T[:, :, :, ::1], int64[::1], T[::1], T[:, :, :, ::1]), as_written=True)
def mix(x: Any, partners: Any, shares: Any, y: Any) -> None:
    """Write y (H, W, N, C): each image times its share, and its partner's times the rest; partners, shares: (N,)."""
    H, W, N, C = x.shape
    T = x.dtype.type
    given, made = x.reshape(H * W, N, C), y.reshape(H * W, N, C)
    for p in range(H * W):
        for n in range(N):
            own, other = shares[n], partners[n]
            rest = T(1) - own
            for c in range(C):
                made[p, n, c] = given[p, n, c] * own + given[p, other, c] * rest
