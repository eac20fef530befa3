"""Steps of augmentation on a minibatch x (H, W, N, C) of normalised images, each image by itself.

All operations are rounded as written, so that an image comes out the same in any minibatch.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import float64, inner_as_written, int64, loop, uintp


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
    """lines = what brightness and contrast make of a number of x (H·W, N, C): the first times it, plus the second."""
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
