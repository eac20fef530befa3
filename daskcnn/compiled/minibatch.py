"""A minibatch from images as they are stored: normalised, shifted and mirrored, read where they lie in their chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskcnn.compiled.copies import copy
from daskcnn.compiled.loop import inner_as_written, int64, loop, uint8, uint64, uintp, vector_at

ROWS = 4
"""Rows of an image that are normalised at once, so that the processor reads further bytes of the image ahead."""


@loop(lambda T: (uint64[::1], uint8[:, ::1]))
def gather(addresses: Any, samples: Any) -> None:
    """Copy samples, (N, bytes of each), from where they lie; addresses (N,)."""
    count, size = samples.shape
    made = samples.reshape(samples.size)
    for n in range(count):
        copy(vector_at(addresses[n], samples, size), 0, made, n * size, size)


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
    """Do the same with the image's mirror image beyond it, less than its size away, without its outermost pixels again.

    It is a loop of its own, for the other one is slower by an eighth if it does both.
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
