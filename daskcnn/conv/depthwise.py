"""Depthwise convolution: every channel has kernels of its own, and there is nothing to add up over channels.

Each tap multiplies numbers that lie side by side, all channels of some samples, and adds them
to the result. Kernels are repeated for as many samples beforehand. With several kernels a channel, the first of every
channel are one such pass, the second another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import iadd
from typing import Any

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.conv.im2col import padded, taps, unpadded, windows
from daskcnn.conv.spec import ConvSpec, Direction, Prepared, Work

RUN = 1024
"""Numbers that a tap multiplies at once: enough for vectors, few enough that those of all taps stay in cache."""
HELD_BYTES = 512 << 10
"""Bytes of the rows that a kernel reaches at once, of one run: they stay in the second-level cache."""
PARTS = 8
"""Partial sums of a kernel gradient, for threads to share. They are the same for any number of threads."""
THREAD_FLOPS = 250_000
"""Fewest operations of a thread: about 25 µs, the time that calling one takes."""


class Depthwise:
    """A sum over taps. Supports groups of one channel, and any number of kernels a channel."""

    name = "depthwise"
    version = 2
    rounding = 2e-6

    def supports(self, spec: ConvSpec) -> bool:
        """Return True where every channel is a group."""
        return 1 < spec.groups == spec.C

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of repeated kernels, of sums, of rows, and of what one kernel of every channel makes."""
        runs = _Runs.of(spec)
        kernels, sums = (runs.taps + 1) * runs.length * spec.itemsize, runs.parts * runs.taps * spec.C * 8
        forward, backward = kernels + runs.held_bytes(spec), sums + runs.filter_bytes(spec)
        return ROUNDING + _turns_bytes(spec) + max(forward, backward)

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return the sum over taps of the direction."""
        taps, outputs = spec.R * spec.S, prod(spec.y_shape)
        moved = sum(prod(shape) for shape in (spec.x_shape, spec.w_shape, spec.y_shape))
        one = Work("taps", spec.flops, (moved + outputs * taps // 4) * spec.itemsize)  # a quarter: most is in cache
        return (one, one) if direction == "backward" else (one,)

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the kernels themselves, contiguous."""
        return device.backend.contiguous(w)

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        x, turns = device.backend.contiguous(x), _turns(spec)
        if len(turns) == 1:
            return _forward(spec, x, prepared, bias, device)
        y = device.xp.empty(spec.y_shape, spec.dtype)
        for own in turns:
            y[..., own] = _forward(spec, x, prepared[..., own], None if bias is None else bias[own], device)
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        of_turns = (
            _backward_data(spec, device.backend.contiguous(dy[..., own]), prepared[..., own], device)
            for own in _turns(spec)
        )
        return reduce(iadd, of_turns)

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, 1, K), summed over parts of the map in an order that does not depend on the threads."""
        dw, x = device.xp.empty(spec.w_shape, spec.dtype), device.backend.contiguous(x)
        for own in _turns(spec):
            dw[:, :, 0, own] = _backward_filter(spec, x, device.backend.contiguous(dy[..., own]), device)
        return dw

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw), computed one after the other: they share no work."""
        return self.backward_data(spec, dy, prepared, device), self.backward_filter(spec, x, dy, device)


def _turns(spec: ConvSpec) -> list[slice]:
    """Return the first kernel of every channel, the second, and so on."""
    each = spec.K // spec.C
    return [slice(turn, None, each) for turn in range(each)]


def _turns_bytes(spec: ConvSpec) -> int:
    """Return the bytes of a turn's maps, where there are several turns."""
    several = spec.K > spec.C
    return several * (prod(spec.x_shape) + prod(spec.y_shape[:3]) * spec.C) * spec.itemsize


# --- one kernel (R, S, 1, C) a channel: maps are contiguous ---


def _forward(spec: ConvSpec, x: Array, w: Array, bias: Array | None, device: Device) -> Array:
    if not device.backend.compiled:
        return _forward_by_taps(spec, x, w, bias, device.xp)
    y = np.empty((*spec.y_shape[:3], spec.C), spec.dtype)
    _correlate(spec, x, w, bias, y, device, back=False)
    return y


def _backward_data(spec: ConvSpec, dy: Array, w: Array, device: Device) -> Array:
    if not device.backend.compiled:
        return _backward_data_by_taps(spec, dy, w, device.xp)
    dx = np.empty(spec.x_shape, spec.dtype)
    _correlate(spec, dy, w, None, dx, device, back=True)
    return dx


def _backward_filter(spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
    if not device.backend.compiled:
        return _backward_filter_by_taps(spec, x, dy, device.xp)
    return _correlate_filter(spec, x, dy, device)


# --- on processors: runs of samples and channels, row by row ---


@dataclass(frozen=True, slots=True)
class _Runs:
    """How the numbers of a pixel (N, C) are cut.

    Attributes
    ----------
    length : numbers of a run: all channels of some samples
    count : runs of a pixel
    taps : of a kernel
    parts : partial sums of a kernel gradient
    rows, columns : of the rows that a kernel reaches at once, of x or of dy
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
        parts = min(PARTS, count * spec.out_H)
        return cls(samples * spec.C, count, spec.R * spec.S, parts, rows, columns)

    def held_bytes(self, spec: ConvSpec) -> int:
        """Bytes of the rows that a thread holds, and of their numbers."""
        return self.rows * (self.columns * self.length * spec.itemsize + 8)

    def filter_bytes(self, spec: ConvSpec) -> int:
        """Bytes that a thread needs for the gradient of kernels: sums of a row, held rows and a row of dy."""
        return self.held_bytes(spec) + (self.taps + self.columns) * self.length * spec.itemsize + 8


def _correlate(
    spec: ConvSpec, source: Array, w: Array, bias: Array | None, target: Array, device: Device, *, back: bool
) -> None:
    """Write y = x ⋆ w + bias, or dx from dy if `back`."""
    runs = _Runs.of(spec)
    count = runs.count * len(target)
    numbers = (runs.taps + 1) * runs.length
    room = device.workspace_limit - ROUNDING - _turns_bytes(spec) - numbers * spec.itemsize
    threads = max(1, min(_threads(spec, count, device), room // runs.held_bytes(spec)))
    device.workspace.recycle(numbers * spec.itemsize + threads * runs.held_bytes(spec) + ROUNDING)
    kernels = device.workspace.take("depthwise.kernels", (runs.taps + 1, runs.length), spec.dtype)
    every = kernels.reshape(runs.taps + 1, -1, spec.C)
    every[:-1], every[-1] = w.reshape(runs.taps, 1, spec.C), 0 if bias is None else bias
    step, held = taps(spec), [_held(f"depthwise.{i}", runs, spec, device) for i in range(threads)]

    def some(i: int) -> None:
        first, last = count * i // threads, count * (i + 1) // threads
        compiled.depthwise.correlate(source, kernels, target, step, back, first, last, *held[i])

    device.pool.map(some, range(threads))


def _held(name: str, runs: _Runs, spec: ConvSpec, device: Device, *, rows: int | None = None) -> tuple[Array, Array]:
    """Return memory for rows of runs, and for which rows they are."""
    rows = runs.rows if rows is None else rows
    held = device.workspace.take(f"{name}.rows", (rows, runs.columns, runs.length), spec.dtype)
    return held, device.workspace.take(f"{name}.which", (rows,), np.intp)


def _correlate_filter(spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
    """Return dw (R, S, C), the sum of parts."""
    runs, step = _Runs.of(spec), taps(spec)
    threads = _threads(spec, runs.parts, device)
    own, sums = runs.filter_bytes(spec), runs.parts * runs.taps * spec.C
    room = device.workspace_limit - ROUNDING - _turns_bytes(spec) - sums * 8
    threads = max(1, min(threads, room // own))
    device.workspace.recycle(sums * 8 + threads * own + ROUNDING)
    totals = device.workspace.take("depthwise.sums", (runs.parts, runs.taps, spec.C), np.float64)
    scratch = [
        (
            device.workspace.take(f"depthwise.{i}", (runs.taps, runs.length), spec.dtype),
            *_held(f"depthwise.{i}", runs, spec, device),
            *_held(f"depthwise.{i}.dy", runs, spec, device, rows=1),
        )
        for i in range(threads)
    ]

    def some(i: int) -> None:
        first, last = runs.parts * i // threads, runs.parts * (i + 1) // threads
        compiled.depthwise.correlate_filter(x, dy, totals, step, first, last, *scratch[i])

    device.pool.map(some, range(threads))
    return totals.sum(axis=0).reshape(spec.R, spec.S, spec.C)


def _threads(spec: ConvSpec, at_most: int, device: Device) -> int:
    """Return how many threads are worth waking."""
    return max(1, min(device.pool.threads, at_most, spec.flops // THREAD_FLOPS))


# --- elsewhere: expressions over whole maps ---


def _forward_by_taps(spec: ConvSpec, x: Array, w: Array, bias: Array | None, xp: Any) -> Array:
    y = xp.zeros((*spec.y_shape[:3], spec.C), spec.dtype)
    if bias is not None:
        y += bias
    for r, s, window in windows(spec, padded(spec, x, xp)):
        y += window * w[r, s, 0]
    return y


def _backward_data_by_taps(spec: ConvSpec, dy: Array, w: Array, xp: Any) -> Array:
    whole = padded(spec, None, xp)
    for r, s, window in windows(spec, whole):
        window += dy * w[r, s, 0]
    return unpadded(spec, whole, xp)


def _backward_filter_by_taps(spec: ConvSpec, x: Array, dy: Array, xp: Any) -> Array:
    dw = xp.empty((spec.R, spec.S, spec.C), spec.dtype)
    for r, s, window in windows(spec, padded(spec, x, xp)):
        dw[r, s] = (window * dy).sum(axis=2).sum(axis=1).sum(axis=0)  # one long sum would round more
    return dw
