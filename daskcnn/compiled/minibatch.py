"""A minibatch from images as they are stored: normalised, shifted and mirrored, read where they lie in their chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskcnn.compiled.copies import copy
from daskcnn.compiled.loop import boolean, inner_as_written, int64, loop, uint8, uint64, uintp, vector_at

ROWS = 4
"""Rows of an image that are normalised at once, so that the processor reads further bytes of the image ahead."""


@loop(lambda T: (uint64[::1], uint8[:, ::1]))
def gather(addresses: Any, samples: Any) -> None:
    """Copy samples, (N, bytes of each), from where they lie; addresses (N,)."""
    count, size = samples.shape
    made = samples.reshape(samples.size)
    for n in range(count):
        copy(vector_at(addresses[n], samples, size), 0, made, n * size, size)


@loop(lambda T: (uint64[::1], T[::1], T[::1], int64[:, ::1], boolean, T[:, :, ::1], T[:, :, :, ::1]), as_written=True)
def normalise(addresses: Any, mean: Any, factor: Any, places: Any, reflect: bool, rows: Any, x: Any) -> None:
    """Write x (H, W, N, C) = (images - mean)·factor, 0 beyond an image.

    addresses : (N,), of the images, each (H, W, C) bytes
    mean, factor : (W·C,), those of the channels for a row of pixels
    places : (N, 3), the row and the column of an image that are x's first ones, and 1, or -1 from right to left
    reflect : whether the image's mirror image is beyond it, without its outermost pixels again, and not 0
    rows : (N, ROWS, W·C), scratch memory
    """
    H, W, N, C = x.shape
    made = x.reshape(x.size)
    for row in range(0, H, ROWS):
        for n in range(N):
            image = vector_at(addresses[n], np.uint8, H * W * C)
            for r in range(ROWS):
                i = row + r + places[n, 0]
                _normalise_row(image, _reflected(i, H) if reflect else i, H, mean, factor, rows[n, r])
        for r in range(min(ROWS, H - row)):
            to = (row + r) * W * N * C
            if C == 3:  # a number that the compiler knows: twice as fast
                _place(rows, r, places, reflect, 3, made, to)
            elif C == 1:
                _place(rows, r, places, reflect, 1, made, to)
            else:
                _place(rows, r, places, reflect, C, made, to)


@inner_as_written
def _reflected(at: int, size: int) -> int:
    """Return the place within an axis whose mirror image is at this place beyond it, by less than the axis' size."""
    return -at if at < 0 else at if at < size else 2 * size - 2 - at


@inner_as_written
def _normalise_row(image: Any, i: int, H: int, mean: Any, factor: Any, row: Any) -> None:
    """row = that row of the image, normalised; whatever it was beyond the image, it becomes 0."""
    run = uintp(len(mean))
    if 0 <= i < H:
        at = uintp(i) * run
        for k in range(run):
            row[k] = (image[at + k] - mean[k]) * factor[k]
    else:
        for k in range(run):
            row[k] = 0


@inner_as_written
def _place(rows: Any, r: int, places: Any, reflect: bool, C: int, made: Any, to: int) -> None:
    """Write a row of all images at their places to `made`, from `to` on."""
    N, W = len(rows), rows.shape[2] // C
    for col in range(W):
        for n in range(N):
            at = places[n, 1] + places[n, 2] * col
            if reflect:
                at = _reflected(at, W)
            here = uintp(to + (col * N + n) * C)
            if 0 <= at < W:
                for c in range(C):
                    made[here + uintp(c)] = rows[uintp(n), uintp(r), uintp(at * C + c)]
            else:
                for c in range(C):
                    made[here + uintp(c)] = 0
