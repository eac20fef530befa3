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
    lambda T: (T[:, :, :, ::1], float64[:, ::1], float64[::1], float64[::1], float64[::1], float64[:, ::1]),
    as_written=True,
)
def recolour(x: Any, factors: Any, mean: Any, deviation: Any, limits: Any, means: Any) -> None:
    """Change brightness, contrast and saturation in place, of pixels as they are stored: x·deviation + mean.

    factors : (N, 3)
    mean, deviation : (C,)
    limits : (2,), the least and the largest that a pixel may be
    means : (N, C), scratch memory
    """
    H, W, N, C = x.shape
    made = x.reshape(H * W, N, C)
    _brightened_means(made, factors, mean, deviation, means)
    for p in range(H * W):
        for n in range(N):
            _recoloured(made[p, n], factors[n], mean, deviation, limits, means[n])


@inner_as_written
def _brightened_means(made: Any, factors: Any, mean: Any, deviation: Any, means: Any) -> None:
    """means (N, C) = those of each image's channels after its change of brightness; made: (H·W, N, C)."""
    count, N, C = made.shape
    means[:] = 0
    for p in range(count):
        for n in range(N):
            for c in range(C):
                means[n, c] += made[p, n, c]
    for n in range(N):
        for c in range(C):
            means[n, c] = factors[n, 0] * (means[n, c] / count * deviation[c] + mean[c])


@inner_as_written
def _recoloured(pixel: Any, factors: Any, mean: Any, deviation: Any, limits: Any, means: Any) -> None:
    """Change a pixel (C,) by the factors of its image; means: those of the image's channels."""
    grey, colour = 0.0, 1.0
    if len(pixel) == 3:
        colour = factors[2]
        grey += 0.299 * _toned(pixel[0], 0, factors, mean, deviation, means)
        grey += 0.587 * _toned(pixel[1], 1, factors, mean, deviation, means)
        grey += 0.114 * _toned(pixel[2], 2, factors, mean, deviation, means)
    for c in range(len(pixel)):
        value = grey + colour * (_toned(pixel[c], c, factors, mean, deviation, means) - grey)
        pixel[c] = (min(max(value, limits[0]), limits[1]) - mean[c]) / deviation[c]


@inner_as_written
def _toned(value: Any, c: int, factors: Any, mean: Any, deviation: Any, means: Any) -> Any:
    """Return a channel of a pixel, as it is stored, after brightness and contrast."""
    return means[c] + factors[1] * (factors[0] * (value * deviation[c] + mean[c]) - means[c])


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
