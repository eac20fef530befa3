"""A minibatch from images as they are stored: normalised, shifted and mirrored in one pass."""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import int64, loop, uint8, uintp


@loop(
    lambda T: (uint8[:, :, :, ::1], T[::1], T[::1], int64[:, ::1], T[:, :, :, ::1]),
    as_written=True,
)
def normalise(images: Any, mean: Any, factor: Any, places: Any, x: Any) -> None:
    """Write x (H, W, N, C) = (images - mean)·factor, 0 beyond an image; images (N, H, W, C), mean and factor (C,).

    places : (N, 3), the row and the column of an image that are x's first ones, and 1, or -1 from right to left
    """
    H, W, N, C = x.shape
    given, made = images.reshape(images.size), x.reshape(x.size)
    for row in range(H):  # of all images, which stays in cache while it is written pixel by pixel
        for n in range(N):
            i, j, step = row + places[n, 0], places[n, 1], places[n, 2]
            first, last = (-j, W - j) if step > 0 else (j - W + 1, j + 1)  # columns within the image
            first, last = (max(0, first), min(W, last)) if 0 <= i < H else (W, W)
            for col in range(W):
                to = uintp(((row * W + col) * N + n) * C)
                if first <= col < last:
                    at = uintp(((n * H + i) * W + j + step * col) * C)
                    for c in range(uintp(C)):
                        made[to + c] = (given[at + c] - mean[c]) * factor[c]
                else:
                    for c in range(uintp(C)):
                        made[to + c] = 0
