"""Convolution in groups: of one channel each (depthwise), and of several, one group after the other."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import iadd

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Backend, Device
from daskcnn.conv.im2col import padded, taps, unpadded, windows
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Direction, Prepared, Work

RUN = 1024
"""Numbers that a tap multiplies at once: enough for vectors, few enough that those of all taps stay in cache."""
HELD_BYTES = 512 << 10
"""Bytes of the rows that a kernel reaches at once, of one run: they stay in the second-level cache."""
PARTS = 8
"""Partial sums of a kernel gradient, for threads to share. They are the same for any number of threads."""
THREAD_FLOPS = 250_000
"""Fewest operations of a thread: about 25 µs, the time that calling one takes."""


class Depthwise(ConvAlgorithm):
    """A sum over taps. Supports groups of one channel, and any number of kernels a channel."""

    name = "depthwise"
    version = 2
    rounding = 2e-6

    def supports(self, spec: ConvSpec) -> bool:
        return 1 < spec.groups == spec.C

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of repeated kernels, of sums, of rows, and of the maps of a turn."""
        runs = _Runs.of(spec)
        kernels, sums = (runs.taps + 1) * runs.length * spec.itemsize, runs.parts * runs.taps * spec.C * 8
        forward, backward = kernels + runs.held_bytes(spec), sums + runs.filter_bytes(spec)
        return ROUNDING + _turns_bytes(spec) + max(forward, backward)

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        in_cache = prod(spec.y_shape) * spec.R * spec.S // 4 * spec.itemsize  # of all that taps read, a quarter is not
        one = Work("taps", spec.flops, spec.moved + in_cache)
        return (one, one) if direction == "backward" else (one,)

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        return (_DepthwiseLoops if backend.compiled else _DepthwiseExpressions)(spec, limit)


def _turns_bytes(spec: ConvSpec) -> int:
    """Return the bytes of a turn's maps, where there are several turns."""
    several = spec.K > spec.C
    return several * (prod(spec.x_shape) + prod(spec.y_shape[:3]) * spec.C) * spec.itemsize


class _ByTurns(Convolution):
    """A pass for the first kernel of every channel, one for the second, and so on, each of contiguous maps."""

    def __init__(self, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit - _turns_bytes(spec))
        each = spec.K // spec.C
        self._turns = [slice(turn, None, each) for turn in range(each)]

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        """Return y (out_H, out_W, N, K)."""
        x = device.backend.contiguous(x)
        if len(self._turns) == 1:
            return self._forward(x, prepared, bias, device)
        y = device.xp.empty(self.spec.y_shape, self.spec.dtype)
        for own in self._turns:
            y[..., own] = self._forward(x, prepared[..., own], None if bias is None else bias[own], device)
        return y

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        turns = ((device.backend.contiguous(dy[..., own]), prepared[..., own]) for own in self._turns)
        return reduce(iadd, (self._backward_data(*turn, device) for turn in turns))

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, 1, K)."""
        dw, x = device.xp.empty(self.spec.w_shape, self.spec.dtype), device.backend.contiguous(x)
        for own in self._turns:
            dw[:, :, 0, own] = self._backward_filter(x, device.backend.contiguous(dy[..., own]), device)
        return dw

    @abstractmethod
    def _forward(self, x: Array, w: Array, bias: Array | None, device: Device) -> Array:
        """Return y (out_H, out_W, N, C) of kernels w (R, S, 1, C)."""

    @abstractmethod
    def _backward_data(self, dy: Array, w: Array, device: Device) -> Array:
        """Return dx."""

    @abstractmethod
    def _backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C)."""


# --- on processors: runs of samples and channels, row by row ---


@dataclass(frozen=True, slots=True)
class _Runs:
    """The cut of a pixel's numbers (N, C) into `count` runs of `length` numbers: all channels of some samples.

    taps: of a kernel. parts: partial sums of its gradient. rows, columns: what it reaches at once, of x or of dy.
    """

    length: int
    count: int
    taps: int
    parts: int
    rows: int
    columns: int

    @classmethod
    def of(cls, spec: ConvSpec) -> _Runs:
        rows, columns = (spec.R - 1) * spec.dilation[0] + 1, max(spec.W, spec.out_W)
        numbers = min(RUN, HELD_BYTES // (rows * columns * spec.itemsize))
        samples = min(spec.N, max(1, numbers // spec.C))
        count = -(-spec.N // samples)
        return cls(samples * spec.C, count, spec.R * spec.S, min(PARTS, count * spec.out_H), rows, columns)

    def held_bytes(self, spec: ConvSpec) -> int:
        """Bytes of the rows that a thread holds, and of their numbers."""
        return self.rows * (self.columns * self.length * spec.itemsize + 8)

    def filter_bytes(self, spec: ConvSpec) -> int:
        """Bytes that a thread needs for the gradient of kernels: sums of a row, held rows and a row of dy."""
        return self.held_bytes(spec) + (self.taps + self.columns) * self.length * spec.itemsize + 8


class _DepthwiseLoops(_ByTurns):
    """Sums over taps in compiled loops, run by run."""

    def __init__(self, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit)
        self._runs, self._taps = _Runs.of(spec), taps(spec)

    def _forward(self, x: Array, w: Array, bias: Array | None, device: Device) -> Array:
        return self._correlate(x, w, bias, np.empty((*self.spec.y_shape[:3], self.spec.C), self.spec.dtype), device)

    def _backward_data(self, dy: Array, w: Array, device: Device) -> Array:
        return self._correlate(dy, w, None, np.empty(self.spec.x_shape, self.spec.dtype), device, back=True)

    def _correlate(
        self, source: Array, w: Array, bias: Array | None, target: Array, device: Device, *, back: bool = False
    ) -> Array:
        """Return the target, filled with y = x ⋆ w + bias, or with dx from dy if `back`."""
        spec, runs = self.spec, self._runs
        count, shape = runs.count * len(target), (runs.taps + 1, runs.length)
        most, held = min(count, spec.flops // THREAD_FLOPS), prod(shape) * spec.itemsize
        threads = self.begin(device, most=most, own=runs.held_bytes(spec), held=held)
        kernels = device.workspace.take("depthwise.kernels", shape, spec.dtype)
        every = kernels.reshape(runs.taps + 1, -1, spec.C)
        every[:-1], every[-1] = w.reshape(runs.taps, 1, spec.C), 0 if bias is None else bias

        def some(first: int, last: int, i: int) -> None:
            memory = self._held(f"depthwise.{i}", runs.rows, device)
            compiled.depthwise.correlate(source, kernels, target, self._taps, back, first, last, *memory)

        device.pool.share(some, count, threads)
        return target

    def _backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C), the sum of parts."""
        spec, runs = self.spec, self._runs
        sums, most = (runs.parts, runs.taps, spec.C), min(runs.parts, spec.flops // THREAD_FLOPS)
        threads = self.begin(device, most=most, own=runs.filter_bytes(spec), held=prod(sums) * 8)
        totals = device.workspace.take("depthwise.sums", sums, np.float64)

        def some(first: int, last: int, i: int) -> None:
            row = device.workspace.take(f"depthwise.{i}", (runs.taps, runs.length), spec.dtype)
            memory = *self._held(f"depthwise.{i}", runs.rows, device), *self._held(f"depthwise.{i}.dy", 1, device)
            compiled.depthwise.correlate_filter(x, dy, totals, self._taps, first, last, row, *memory)

        device.pool.share(some, runs.parts, threads)
        return totals.sum(axis=0).reshape(spec.R, spec.S, spec.C)

    def _held(self, name: str, rows: int, device: Device) -> tuple[Array, Array]:
        """Return memory for rows of runs, and for the numbers of these rows."""
        shape = rows, self._runs.columns, self._runs.length
        held = device.workspace.take(f"{name}.rows", shape, self.spec.dtype)
        return held, device.workspace.take(f"{name}.which", (rows,), np.intp)


# --- elsewhere ---


class _DepthwiseExpressions(_ByTurns):
    """Expressions over whole maps, tap by tap."""

    def _forward(self, x: Array, w: Array, bias: Array | None, device: Device) -> Array:
        y = device.xp.zeros((*self.spec.y_shape[:3], self.spec.C), self.spec.dtype)
        if bias is not None:
            y += bias
        for r, s, window in windows(self.spec, padded(self.spec, x, device.xp)):
            y += window * w[r, s, 0]
        return y

    def _backward_data(self, dy: Array, w: Array, device: Device) -> Array:
        whole = padded(self.spec, None, device.xp)
        for r, s, window in windows(self.spec, whole):
            window += dy * w[r, s, 0]
        return unpadded(self.spec, whole, device.xp)

    def _backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        spec, xp = self.spec, device.xp
        dw = xp.empty((spec.R, spec.S, spec.C), spec.dtype)
        for r, s, window in windows(spec, padded(spec, x, xp)):
            dw[r, s] = (window * dy).sum(axis=2).sum(axis=1).sum(axis=0)  # one long sum would round more
        return dw


class Grouped(ConvAlgorithm):
    """`inner` for each group, but not for single channels with one kernel each, which `depthwise` does faster."""

    def __init__(self, inner: ConvAlgorithm) -> None:
        self.name, self.version, self.rounding = f"grouped-{inner.name}", inner.version, inner.rounding
        self._inner = inner

    def supports(self, spec: ConvSpec) -> bool:
        return 1 < spec.groups < max(spec.C, spec.K) and self._inner.supports(spec.group)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of a group's arrays, and of the inner algorithm's scratch memory."""
        return self._inner.workspace(spec.group) + _held(spec)

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        copied = 2 * (prod(spec.group.x_shape) + prod(spec.group.y_shape)) * spec.itemsize
        return (Work("channels", 0, copied), *self._inner.work(spec.group, direction)) * spec.groups

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        inner = self._inner.bind(spec.group, backend, limit - _held(spec))
        return _Groups(spec, limit, inner, self._inner.bind(spec.group, backend, limit // spec.groups))


class _Groups(Convolution):
    """One group after the other. The limit of `inner` leaves room for a group's arrays; `kept` has a share of it."""

    def __init__(self, spec: ConvSpec, limit: int, inner: Convolution, kept: Convolution) -> None:
        super().__init__(spec, limit)
        C, K = spec.group.C, spec.group.K
        self._inner, self._kept = inner, kept
        self._slices = [(slice(g * C, (g + 1) * C), slice(g * K, (g + 1) * K)) for g in range(spec.groups)]

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        return [self._kept.prepare(w[..., kernels], device, keep=keep) for _, kernels in self._slices]

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        y = device.xp.empty(self.spec.y_shape, self.spec.dtype)
        shifts = [None if bias is None else bias[kernels] for _, kernels in self._slices]
        for (channels, kernels), own, shift in zip(self._slices, prepared, shifts, strict=True):
            y[..., kernels] = self._inner.forward(_of(x, channels, device), own, device, bias=shift)
        return y

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        dx = device.xp.empty(self.spec.x_shape, self.spec.dtype)
        for (channels, kernels), own in zip(self._slices, prepared, strict=True):
            dx[..., channels] = self._inner.backward_data(_of(dy, kernels, device), own, device)
        return dx

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        dw = device.xp.empty(self.spec.w_shape, self.spec.dtype)
        for channels, kernels in self._slices:
            maps = _of(x, channels, device), _of(dy, kernels, device)
            dw[..., kernels] = self._inner.backward_filter(*maps, device)
        return dw

    def backward(self, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        spec, xp = self.spec, device.xp
        dx, dw = xp.empty(spec.x_shape, spec.dtype), xp.empty(spec.w_shape, spec.dtype)
        for (channels, kernels), own in zip(self._slices, prepared, strict=True):
            maps = _of(x, channels, device), _of(dy, kernels, device)
            dx[..., channels], dw[..., kernels] = self._inner.backward(*maps, own, device)
        return dx, dw


def _of(a: Array, part: slice, device: Device) -> Array:
    """Return these channels side by side: every algorithm wants them so, and some would copy them twice."""
    return device.backend.contiguous(a[..., part])


def _held(spec: ConvSpec) -> int:
    """Return the bytes of a group's maps and kernels, and of their gradients."""
    return 2 * spec.group.moved
