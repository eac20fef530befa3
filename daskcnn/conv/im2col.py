"""Convolution as matrix products over columns: on processors block by block, elsewhere all at once or tap by tap.

The columns of an output pixel are the numbers that the taps of a kernel meet there.

backward_data is a correlation too: of dy with the kernels flipped, one for each phase of the stride (Dumoulin &
Visin, A guide to convolution arithmetic for deep learning, section 4, without the zeros they insert). Taps that meet
the same phase are stride / gcd(stride, dilation) apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Backend, Device
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Direction, Prepared, Work


def taps(spec: ConvSpec, origin: tuple[int, int] | None = None) -> Any:
    """Return the taps for loops. origin: the place of the first kernel on the map; None: where the padding begins."""
    top, left = (-spec.pad[0], -spec.pad[1]) if origin is None else origin
    return compiled.im2col.Taps(spec.R, spec.S, *spec.stride, top, left, *spec.dilation)


def padded(spec: ConvSpec, x: Array | None, xp: Any) -> Array:
    """Return the map x (H, W, N, C) with its padding; zeros alone without x."""
    (top, left), (H, W, N, C) = spec.pad, spec.x_shape
    whole = xp.zeros((*spec.padded, N, C), spec.dtype)
    if x is not None:
        whole[top : top + H, left : left + W] = x
    return whole


def unpadded(spec: ConvSpec, whole: Array, xp: Any) -> Array:
    """Invert `padded`: return the map (H, W, N, C) alone."""
    top, left = spec.pad
    return xp.ascontiguousarray(whole[top : top + spec.H, left : left + spec.W])


def windows(spec: ConvSpec, whole: Array) -> Iterator[tuple[int, int, Array]]:
    """Yield each tap (r, s) and the numbers it meets: (out_H, out_W, N, C), views of the padded map."""
    for r, s in product(range(spec.R), range(spec.S)):
        axes = zip((r, s), spec.dilation, spec.y_shape, spec.stride, strict=False)
        firsts = [(tap * apart, size, stride) for tap, apart, size, stride in axes]
        rows, cols = (slice(first, first + (size - 1) * stride + 1, stride) for first, size, stride in firsts)
        yield r, s, whole[rows, cols]


def columns(spec: ConvSpec, source: Array, xp: Any, origin: tuple[int, int] | None = None) -> Array:
    """Return (out_H·out_W·N, R·S·C): the numbers that kernels meet at each output, zeros outside of the source.

    origin: the place of the first kernel in the source; None: where the padding begins.
    """
    whole = _extended(spec, source, (-spec.pad[0], -spec.pad[1]) if origin is None else origin, xp)
    rows, cols, samples, channels = whole.strides
    (down, right), (apart, beside) = spec.stride, spec.dilation
    shape = (*spec.y_shape[:3], spec.R, spec.S, spec.C)
    strides = (rows * down, cols * right, samples, rows * apart, cols * beside, channels)
    return xp.lib.stride_tricks.as_strided(whole, shape, strides).reshape(-1, spec.R * spec.S * spec.C)


def _extended(spec: ConvSpec, source: Array, origin: tuple[int, int], xp: Any) -> Array:
    """Return the part of the source that kernels meet, and zeros where they reach over it."""
    axes = zip(spec.y_shape, spec.stride, (spec.R, spec.S), spec.dilation, strict=False)
    met = [(outputs - 1) * stride + (taps - 1) * apart + 1 for outputs, stride, taps, apart in axes]
    whole, sizes = xp.zeros((*met, spec.N, spec.C), spec.dtype), source.shape[:2]
    firsts = [max(0, -first) for first in origin]
    ends = [max(lo, min(size, n - first)) for lo, size, n, first in zip(firsts, met, sizes, origin, strict=True)]
    inside = tuple(map(slice, firsts, ends))
    whole[inside] = source[tuple(slice(lo + o, hi + o) for lo, hi, o in zip(firsts, ends, origin, strict=True))]
    return whole


FEWEST_PIXELS, PIXELS = 32, 256
"""Pixels of the smallest block, below which products do not pay, and of the largest, whose columns stay in cache."""
STRIPS = 8
"""Strips of a map, for threads to share and for as many partial sums of a kernel gradient."""
STRIP_BYTES = 4 << 20
"""Bytes of a strip's planes beyond which it is halved, to stay near the cache."""
THREAD_FLOPS = 2_500_000
"""Fewest operations of a thread: about 25 µs, the time that calling one takes."""


class Im2col(ConvAlgorithm):
    """Products over columns. Supports every problem of one group."""

    name = "im2col"
    version = 6
    rounding = 2e-6

    def supports(self, spec: ConvSpec) -> bool:
        return spec.groups == 1

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the smallest strip, of its columns and of the kernels, as they are or flipped."""
        forward = _kernel_bytes(spec) + _least(spec)
        return ROUNDING + max([forward, *(_phase_bytes(p, spec) + _least(p.spec) for p in _phases(spec))])

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        size, pixels = spec.R * spec.S * spec.C, spec.out_H * spec.out_W * spec.N
        columns = Work("columns", 0, pixels * size * spec.itemsize // 4)  # written and read in cache
        forward = (columns, Work("products", spec.flops, spec.moved, (pixels, size, spec.K)))
        dw = (columns, Work("products", spec.flops, spec.moved, (size, pixels, spec.K)))
        return {"forward": forward, "backward": (*self.data_work(spec), *dw), "backward_filter": dw}[direction]

    def data_work(self, spec: ConvSpec) -> tuple[Work, ...]:
        """Return columns and products of the gradient of the data."""
        pixels = spec.H * spec.W * spec.N
        # none where no tap meets the map
        size = max((p.spec.R * p.spec.S * p.spec.C for p in _phases(spec)), default=0)
        columns = Work("columns", 0, pixels * size * spec.itemsize // 4)
        return columns, Work("products", spec.flops, spec.moved, (pixels, max(1, size), spec.C))

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        """Return the loops of processors, or elsewhere one product if all columns fit the limit, else one a tap."""
        return (_ColumnLoops if backend.compiled else _ColumnExpressions)(spec, limit)


# --- on processors: strips of rows, whose columns are expanded in blocks of pixels ---


@dataclass(frozen=True, slots=True)
class _Strips:
    """Output rows of a strip, output pixels of a block, a thread's scratch numbers, and bytes that a pass holds too."""

    rows: int
    pixels: int
    numbers: int
    held: int

    @classmethod
    def of(cls, spec: ConvSpec, limit: int, *, held: int = 0) -> _Strips:
        """Return the strips, which depend on the limit, not on the number of threads."""
        room, size = (limit - ROUNDING - held) // spec.itemsize, _columns(spec)
        rows = -(-spec.out_H // STRIPS)
        while rows > 1 and _plane_numbers(spec, rows) > min(room - size * FEWEST_PIXELS, STRIP_BYTES // spec.itemsize):
            rows = -(-rows // 2)
        planes = _plane_numbers(spec, rows)
        pixels = max(FEWEST_PIXELS, min(PIXELS, (room - planes) // size))
        return cls(rows, pixels, planes + size * pixels, held)


@dataclass(frozen=True, slots=True)
class _StripPass:
    """A correlation in loops: its problem and strips, and the kernels' taps."""

    spec: ConvSpec
    strips: _Strips
    taps: Any


class _ColumnLoops(Convolution):
    """Products over columns in compiled loops: forward, and a phase after the other for the gradient of the data."""

    def __init__(self, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit)
        self._parts = max(1, min(STRIPS, spec.out_H, (limit - ROUNDING - _least(spec)) // _kernel_bytes(spec)))
        self._there, self._with_bias, self._filter = (
            _StripPass(spec, _Strips.of(spec, limit, held=kernels * _kernel_bytes(spec)), taps(spec))
            for kernels in (0, 1, self._parts)
        )
        self._phases = [
            (p, _StripPass(p.spec, _Strips.of(p.spec, limit, held=_phase_bytes(p, spec)), taps(p.spec, p.origin)))
            for p in _phases(spec)
        ]

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        spec, way = self.spec, self._there if bias is None else self._with_bias
        y, w, threads = np.empty(spec.y_shape, spec.dtype), prepared.reshape(-1, spec.K), self._begin(way, device)
        if bias is not None:
            given, w = w, _take("kernels", (_columns(spec), spec.K), spec, device)
            w[:-1], w[-1] = given, bias
        _correlate(way, x, w, y, threads, device)
        return y

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        spec = self.spec
        whole, dx = spec.stride == (1, 1), np.empty(spec.x_shape, spec.dtype)
        if len(self._phases) < prod(spec.stride):
            dx[...] = 0  # a phase without taps stays zero
        for phase, way in self._phases:
            threads = self._begin(way, device)
            out = dx if whole else _take("phase", phase.spec.y_shape, spec, device)
            kernels = _take("kernels", phase.spec.w_shape, spec, device)
            kernels[...] = _flipped(prepared, phase)
            into = None if whole else dx[phase.pixels]
            _correlate(way, dy, kernels.reshape(-1, spec.C), out, threads, device, into)
        return dx

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K): columnsᵀ·dy summed over blocks."""
        spec, strips, step, small = self.spec, self._filter.strips, self._filter.taps, compiled.products.small()
        threads = self._begin(self._filter, device)
        sums = _take("sums", (self._parts, spec.R * spec.S * spec.C, spec.K), spec, device)
        x, dy = device.backend.contiguous(x), device.backend.contiguous(dy)

        def add_up(first: int, last: int, i: int) -> None:
            scratch = _take(f"strip{i}", (strips.numbers,), spec, device)
            compiled.im2col.correlate_filter(x, dy, sums, step, strips.rows, strips.pixels, small, first, last, scratch)

        device.pool.share(add_up, self._parts, min(threads, self._parts))
        return sums.sum(axis=0).reshape(spec.w_shape)

    def _begin(self, way: _StripPass, device: Device) -> int:
        """Begin a pass in strips, and return its threads: fewer where memory is short."""
        own = way.strips.numbers * self.spec.itemsize
        return self.begin(device, most=way.spec.flops // THREAD_FLOPS, own=own, held=way.strips.held)


def _correlate(
    way: _StripPass, source: Array, w: Array, out: Array, threads: int, device: Device, into: Array | None = None
) -> None:
    """Write out = source ⋆ w (R·S·C [+ 1], K), from the taps' origin on. Threads copy their parts to `into`, if any."""
    source, strips, small = device.backend.contiguous(source), way.strips, compiled.products.small()

    def correlate(first: int, last: int, i: int) -> None:
        scratch = _take(f"strip{i}", (strips.numbers,), way.spec, device)
        compiled.im2col.correlate(source, w, out, way.taps, strips.rows, strips.pixels, small, first, last, scratch)
        if into is not None:
            rows = slice(first * strips.rows, last * strips.rows)
            into[rows] = out[rows]

    count = -(-way.spec.out_H // strips.rows)
    device.pool.share(correlate, count, min(threads, count))


def _columns(spec: ConvSpec) -> int:
    """Return the rows of the columns' matrix, with that of the bias."""
    return spec.R * spec.S * spec.C + 1


def _plane_numbers(spec: ConvSpec, rows: int) -> int:
    """Return the numbers of the planes below this many output rows."""
    height, right = (rows - 1) * spec.stride[0] + spec.extent[0], spec.stride[1]
    return height * right * (spec.out_W + (spec.extent[1] - 1) // right) * spec.N * spec.C


def _least(spec: ConvSpec) -> int:
    """Return the bytes of the smallest strip and its columns."""
    return (_plane_numbers(spec, 1) + _columns(spec) * FEWEST_PIXELS) * spec.itemsize


def _take(name: str, shape: tuple[int, ...], spec: ConvSpec, device: Device) -> Array:
    return device.workspace.take(f"im2col.{name}", shape, spec.dtype)


# --- elsewhere, one product of all columns: on a GPU each operation of an expression takes as long to start as a small
# one runs; where the columns do not fit, a product of the whole map for every tap ---


class _ColumnExpressions(Convolution):
    """Products over columns, or tap by tap, as expressions over whole arrays."""

    def __init__(self, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit)
        self._phases = _phases(spec)
        self._at_once = _fits(spec, limit)
        self._data_at_once = all(_fits(phase.spec, limit) for phase in self._phases)

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        spec, xp = self.spec, device.xp
        if self._at_once:
            y = xp.matmul(columns(spec, x, xp), prepared.reshape(-1, spec.K))
            if bias is not None:
                y += bias
            return y.reshape(spec.y_shape)
        y = xp.zeros((prod(spec.y_shape[:3]), spec.K), spec.dtype)
        if bias is not None:
            y += bias
        for r, s, window in windows(spec, padded(spec, x, xp)):
            y += xp.matmul(window.reshape(-1, spec.C), prepared[r, s])
        return y.reshape(spec.y_shape)

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        spec, xp = self.spec, device.xp
        if self._data_at_once:
            dx = xp.zeros(spec.x_shape, spec.dtype)
            for phase in self._phases:
                met = columns(phase.spec, dy, xp, phase.origin)
                part = xp.matmul(met, _flipped(prepared, phase).reshape(-1, spec.C))
                dx[phase.pixels] = part.reshape(phase.spec.y_shape)
            return dx
        dpadded, change = padded(spec, None, xp), dy.reshape(-1, spec.K)
        for r, s, window in windows(spec, dpadded):
            window += xp.matmul(change, prepared[r, s].T).reshape(window.shape)
        return unpadded(spec, dpadded, xp)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        spec, xp, change = self.spec, device.xp, dy.reshape(-1, self.spec.K)
        if self._at_once:
            return xp.matmul(columns(spec, x, xp).T, change).reshape(spec.w_shape)
        dw = xp.empty(spec.w_shape, spec.dtype)
        for r, s, window in windows(spec, padded(spec, x, xp)):
            dw[r, s] = xp.matmul(window.reshape(-1, spec.C).T, change)
        return dw


def _fits(spec: ConvSpec, limit: int) -> bool:
    """Return True if the columns of all pixels fit the limit."""
    return prod(spec.y_shape[:3]) * spec.R * spec.S * spec.C * spec.itemsize <= limit


# --- the data's gradient: a phase for every remainder of (h, w) by the stride ---


@dataclass(frozen=True, slots=True)
class _Phase:
    """The pixels of dx that the same taps reach, as a correlation of dy, without stride, from `origin` on."""

    spec: ConvSpec
    origin: tuple[int, int]
    pixels: tuple[slice, slice]
    taps: tuple[slice, slice]


def _flipped(w: Array, phase: _Phase) -> Array:
    """Return the kernels (R', S', K, C) of a phase: its taps in reverse."""
    return w[phase.taps][::-1, ::-1].transpose(0, 1, 3, 2)


def _phases(spec: ConvSpec) -> list[_Phase]:
    """Return a phase for every remainder of (h, w) by the stride that has pixels and taps."""
    axes = zip((spec.H, spec.W), (spec.R, spec.S), spec.stride, spec.pad, spec.dilation, strict=True)
    return [_phase(spec, row, col) for row, col in product(*(_phases_along(*axis) for axis in axes))]


Along = tuple[int, slice, slice, int]
"""A phase along one axis: origin in dy, pixels, taps, and rows of dy from one of these taps to the next."""


def _phases_along(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[Along]:
    """Return the phases along one axis.

    Pixel h + pad = stride·(h' + shift) + dilation·r meets tap r + step·j at dy[h' + shift − apart·j], where step and
    apart are stride and dilation over their greatest common divisor.
    """
    found, common = [], gcd(stride, dilation)
    step, apart = stride // common, dilation // common
    for first in range(min(stride, size)):
        for r in range(min(step, kernel)):
            shift, beside = divmod(first + pad - dilation * r, stride)
            if not beside:
                origin = shift - apart * (len(range(r, kernel, step)) - 1)
                found.append((origin, slice(first, size, stride), slice(r, kernel, step), apart))
    return found


def _phase(spec: ConvSpec, row: Along, col: Along) -> _Phase:
    (h, pixel_rows, r, down), (w, pixel_cols, s, right) = row, col
    R, S = len(range(spec.R)[r]), len(range(spec.S)[s])
    H = len(range(spec.H)[pixel_rows]) + (R - 1) * down
    W = len(range(spec.W)[pixel_cols]) + (S - 1) * right
    inner = ConvSpec(spec.N, H, W, C=spec.K, K=spec.C, R=R, S=S, dtype=spec.dtype, dilation=(down, right))
    return _Phase(inner, (h, w), (pixel_rows, pixel_cols), (r, s))


def _kernel_bytes(spec: ConvSpec) -> int:
    """Return the bytes of the kernels, with a bias."""
    return _columns(spec) * spec.K * spec.itemsize


def _phase_bytes(phase: _Phase, spec: ConvSpec) -> int:
    """Return the scratch bytes of the flipped kernels, and of the pixels where they are not the whole of dx."""
    return _kernel_bytes(phase.spec) + (prod(phase.spec.y_shape) * spec.itemsize if spec.stride != (1, 1) else 0)
