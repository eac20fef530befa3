"""Convolution of maps with few channels, such as images, as its definition has it: sums over taps, kept in registers.

Columns would hold R·S·C numbers for each output pixel, and BLAS would copy them once more. A network's first layer
needs no gradient of its data; where another layer does, it is made as `im2col` does.
"""

from __future__ import annotations

from math import prod

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Backend, Device
from daskcnn.compiled.sizes import LANES, ROWS
from daskcnn.conv.im2col import Im2col, taps
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Direction, Prepared, Work

CHANNELS = 8
"""Most channels. More were not measured; their products are deeper, which suits BLAS better."""
PARTS = 8
"""Partial sums of a kernel gradient, for threads to share. They are the same for any number of threads."""
TOGETHER_BYTES = 16 << 10
"""Bytes of a pixel's changes that are added up at once: half of a first-level cache."""
THREAD_FLOPS = 2_500_000
"""Fewest operations of a thread: at 30 to 80 GFLOP/s a few times the 25 µs that calling one takes."""


class DirectSums(ConvAlgorithm):
    """Sums in registers. Supports one group of up to CHANNELS channels, and a multiple of LANES kernels."""

    name = "direct"
    version = 1
    rounding = 2e-6
    _columns = Im2col()

    def supports(self, spec: ConvSpec) -> bool:
        if spec.groups != 1 or spec.C > CHANNELS or spec.dtype not in ("float32", "float64"):
            return False
        return spec.K % LANES == 0

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of partial sums and of places, or those that the gradient of the data needs."""
        return max(self._columns.workspace(spec), ROUNDING + _sum_bytes(spec) + _own_bytes(spec))

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        sums = Work("sums", spec.flops, spec.moved)
        return (*self._columns.data_work(spec), sums) if direction == "backward" else (sums,)

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        columns = self._columns.bind(spec, backend, limit)
        return _DirectLoops(spec, limit, columns) if backend.compiled else columns


class _DirectLoops(Convolution):
    """Sums in registers on processors; `columns` makes the gradient of the data."""

    def __init__(self, spec: ConvSpec, limit: int, columns: Convolution) -> None:
        super().__init__(spec, limit)
        self._columns, self._taps, self._own = columns, taps(spec), _own_bytes(spec)

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        spec = self.spec
        x, y, w = device.backend.contiguous(x), np.empty(spec.y_shape, spec.dtype), prepared.reshape(-1, spec.K)
        shift = np.empty(spec.K, spec.dtype)
        shift[:] = 0 if bias is None else bias

        def some(first: int, last: int, i: int) -> None:
            met, samples = _integers(f"met{i}", 2, len(w), device), _integers(f"samples{i}", 3, spec.N, device)
            compiled.direct.correlate(x, w, shift, y, self._taps, first, last, met, samples)

        threads = self.begin(device, most=min(spec.out_H, spec.flops // THREAD_FLOPS), own=self._own)
        device.pool.share(some, spec.out_H, threads)
        return y

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        return self._columns.backward_data(dy, prepared, device)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K), a sum of parts."""
        spec, x, dy = self.spec, device.backend.contiguous(x), device.backend.contiguous(dy)
        parts, size, most = _parts(spec), spec.R * spec.S * spec.C, spec.flops // THREAD_FLOPS
        threads = self.begin(device, most=min(parts, most), own=self._own, held=_sum_bytes(spec))
        sums = device.workspace.take("direct.sums", (parts, size, spec.K), spec.dtype)
        together = max(1, min(spec.N, TOGETHER_BYTES // (spec.K * spec.itemsize)))

        def some(first: int, last: int, i: int) -> None:
            met = _integers(f"met{i}", 2, size, device)
            samples = device.workspace.take(f"direct.samples{i}", (2, together), np.intp)
            own = device.workspace.take(f"direct.own{i}", (size, spec.K), spec.dtype)
            compiled.direct.correlate_filter(x, dy, sums, self._taps, together, first, last, met, samples, own)

        device.pool.share(some, parts, threads)
        return sums.sum(axis=0).reshape(spec.w_shape)


def _integers(name: str, kinds: int, count: int, device: Device) -> Array:
    """Return memory for places of several kinds, of whole tiles."""
    return device.workspace.take(f"direct.{name}", (kinds, -(-count // ROWS) * ROWS), np.intp)


def _parts(spec: ConvSpec) -> int:
    return min(PARTS, spec.out_H)


def _sum_bytes(spec: ConvSpec) -> int:
    return _parts(spec) * prod(spec.w_shape) * spec.itemsize


def _own_bytes(spec: ConvSpec) -> int:
    """Return the bytes of a thread: places of taps and samples, and sums of its own."""
    places = spec.R * spec.S * spec.C + spec.N + 2 * ROWS
    return 3 * places * np.dtype(np.intp).itemsize + prod(spec.w_shape) * spec.itemsize
