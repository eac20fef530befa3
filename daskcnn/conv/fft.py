"""Convolution by fast Fourier transforms of tiles, as array expressions: what GPUs run, and what loops are held to.

y[p] = Σ x[p + r] w[r] is a correlation: its transform is X·W̄. Then that of dx is dY·Wᵀ, and that of dw is Xᵀ·dȲ.
A tile's padding is part of it, so nothing that is used wraps around.
"""

from __future__ import annotations

from typing import Any

from daskcnn.arrays import Array
from daskcnn.conv.fourier import Tiling

AXES = (0, 1)


def transform(tiling: Tiling, a: Array, xp: Any) -> Array:
    """Return the transform (lines, columns, …, …) of tiles, of their outputs or of kernels."""
    return xp.fft.rfft2(a, s=_lengths(tiling), axes=AXES)


def forward(tiling: Tiling, x: Array, W: Array, bias: Array | None, xp: Any) -> Array:
    """Return y from maps and transformed kernels."""
    y = _inverse(tiling, xp.matmul(transform(tiling, tiling.cut(x, xp), xp), W.conj()), tiling.outs, xp)
    y = tiling.join(y, xp)
    return y if bias is None else y + bias


def backward_data(tiling: Tiling, dY: Array, W: Array, xp: Any) -> Array:
    """Return dx from transformed gradients and kernels."""
    return tiling.add_up(_inverse(tiling, xp.matmul(dY, W.swapaxes(2, 3)), _lengths(tiling), xp), xp)


def backward_filter(tiling: Tiling, x: Array, dY: Array, xp: Any) -> Array:
    """Return dw from maps and transformed gradients."""
    X = transform(tiling, tiling.cut(x, xp), xp)
    return _inverse(tiling, xp.matmul(X.swapaxes(2, 3), dY.conj()), (tiling.spec.R, tiling.spec.S), xp)


def _inverse(tiling: Tiling, a: Array, size: tuple[int, int], xp: Any) -> Array:
    found = xp.fft.irfft2(a, s=_lengths(tiling), axes=AXES)[: size[0], : size[1]]
    return xp.ascontiguousarray(found.astype(tiling.spec.dtype, copy=False))


def _lengths(tiling: Tiling) -> tuple[int, int]:
    """What a tile reads: enough for the whole correlation."""
    return tiling.outs[0] + tiling.spec.R - 1, tiling.outs[1] + tiling.spec.S - 1
