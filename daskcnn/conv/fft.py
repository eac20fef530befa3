"""Convolution by fast Fourier transforms of tiles, as array expressions: for GPUs, and as the reference of the loops.

y[p] = Σ x[p + r] w[r] is a correlation: its transform is X·W̄. Then that of dx is dY·Wᵀ, and that of dw is Xᵀ·dȲ.
A tile contains its padding, so no number that is used wraps around.
"""

from __future__ import annotations

from typing import Any

from daskcnn.arrays import Array, Device
from daskcnn.conv.fourier import Tiling
from daskcnn.conv.spec import Kernels, Transforming

AXES = (0, 1)


class TilesByFFT(Transforming):
    """A convolution in tiles."""

    def __init__(self, tiling: Tiling, limit: int) -> None:
        super().__init__(tiling.spec, limit, tiling.kernel_numbers)
        self._tiling = tiling

    def _transformed(self, w: Array, device: Device) -> Array:
        return self._transform(w, device.xp)

    def forward(self, x: Array, prepared: Kernels, device: Device, *, bias: Array | None = None) -> Array:
        xp = device.xp
        Y = xp.matmul(self._transform(self._tiling.cut(x, xp), xp), self._of_kernels(prepared, xp).conj())
        y = self._tiling.join(self._inverse(Y, self._tiling.outs, xp), xp)
        return y if bias is None else y + bias

    def backward_data(self, dy: Array, prepared: Kernels, device: Device) -> Array:
        return self._data(self._of_change(dy, device.xp), prepared, device.xp)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        return self._filter(x, self._of_change(dy, device.xp), device.xp)

    def backward(self, x: Array, dy: Array, prepared: Kernels, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw); dy is transformed once."""
        dY = self._of_change(dy, device.xp)
        return self._data(dY, prepared, device.xp), self._filter(x, dY, device.xp)

    def _data(self, dY: Array, prepared: Kernels, xp: Any) -> Array:
        dX = xp.matmul(dY, self._of_kernels(prepared, xp).swapaxes(2, 3))
        return self._tiling.add_up(self._inverse(dX, self._tiling.reads, xp), xp)

    def _filter(self, x: Array, dY: Array, xp: Any) -> Array:
        X = self._transform(self._tiling.cut(x, xp), xp)
        return self._inverse(xp.matmul(X.swapaxes(2, 3), dY.conj()), (self.spec.R, self.spec.S), xp)

    def _of_change(self, dy: Array, xp: Any) -> Array:
        return self._transform(self._tiling.split(dy, xp), xp)

    def _of_kernels(self, prepared: Kernels, xp: Any) -> Array:
        return self._transform(prepared.w, xp) if prepared.transformed is None else prepared.transformed

    def _transform(self, a: Array, xp: Any) -> Array:
        """Return the transform (lines, columns, …, …) of tiles, of their outputs or of kernels."""
        return xp.fft.rfft2(a, s=self._tiling.reads, axes=AXES)

    def _inverse(self, a: Array, size: tuple[int, int], xp: Any) -> Array:
        found = xp.fft.irfft2(a, s=self._tiling.reads, axes=AXES)[: size[0], : size[1]]
        return xp.ascontiguousarray(found.astype(self.spec.dtype, copy=False))
