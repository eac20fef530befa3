"""Dilated convolution as a plain one: pixels that the same taps reach are maps of their own, further samples.

Taps of a kernel are d pixels apart, so an output at row h meets only the rows h + d·r. The d rows of outputs from one
multiple of d to the next are d phases that share no input. All phases of all samples together are one problem without
dilation on smaller maps, so whatever is fast there is fast here. That takes a copy of the map, and one of the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from daskcnn.arrays import Array, Backend, Device
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Direction, Pair, Prepared, Work


class Dilated(ConvAlgorithm):
    """`inner` for the phases. Supports a stride of 1, one group, and dilations that leave no phase without outputs."""

    def __init__(self, inner: ConvAlgorithm) -> None:
        self.name, self.version, self.rounding = f"dilated-{inner.name}", inner.version, inner.rounding
        self._inner = inner

    def supports(self, spec: ConvSpec) -> bool:
        down, right = apart = _apart(spec)
        if spec.stride != (1, 1) or spec.groups != 1 or apart == (1, 1):
            return False
        return down <= spec.out_H and right <= spec.out_W and self._inner.supports(_phases(spec).spec)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the maps by phases, and of the inner algorithm's scratch memory."""
        phases = _phases(spec)
        return self._inner.workspace(phases.spec) + phases.held

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        phases, copied = _phases(spec).spec, 4 if direction == "backward" else 2
        copies = Work("phases", 0, copied * (prod(phases.x_shape) + prod(phases.y_shape)) * spec.itemsize)
        return (copies, *self._inner.work(phases, direction))

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        """Return the inner algorithm between copies of the maps, with a limit that leaves room for these."""
        phases = _phases(spec)
        inner = self._inner.bind(phases.spec, backend, limit - phases.held)
        return _Folded(spec, limit, phases, inner, self._inner.bind(phases.spec, backend, limit))


class _Folding:
    """A map (H, W, N, C) as maps (rows, columns, phases · N, C), with zeros where a phase has less than others."""

    def __init__(self, size: Pair, folded: Pair, apart: Pair, late: Pair) -> None:
        """Fold maps of this size to phases of `folded` pixels; the first phase begins `late` pixels before the map."""
        rows, cols = (_along(*axis) for axis in zip(size, apart, late, strict=True))
        whole = zip((rows, cols), folded, strict=True)
        self._complete = all(own == slice(0, count) for phases, count in whole for own, _ in phases)
        self._size, self._shape = size, (*folded, *apart)
        self._parts = [  # the pixels of each phase, in the folded map and in the whole map
            ((own_h, own_w, i, j), (h, w))
            for (i, (own_h, h)), (j, (own_w, w)) in product(enumerate(rows), enumerate(cols))
        ]

    def apart(self, a: Array, device: Device) -> Array:
        """Return the maps of the phases of a (H, W, N, C)."""
        (N, C), made = a.shape[2:], device.xp.empty if self._complete else device.xp.zeros
        found = made((*self._shape, N, C), a.dtype)

        def copy(part: tuple[Any, Any]) -> None:
            own, there = part
            found[own] = a[there]

        device.pool.map(copy, self._parts)
        return found.reshape(*self._shape[:2], -1, C)

    def together(self, a: Array, device: Device) -> Array:
        """Return the map whose phases are a (rows, columns, phases · N, C)."""
        parts = a.reshape(*self._shape, -1, a.shape[3])
        found = device.xp.empty((*self._size, *parts.shape[4:]), a.dtype)

        def copy(part: tuple[Any, Any]) -> None:
            own, there = part
            found[there] = parts[own]

        device.pool.map(copy, self._parts)
        return found


def _along(size: int, apart: int, late: int) -> list[tuple[slice, slice]]:
    """Return the pixels of each phase along an axis: in its own map, and in the whole map."""
    found = []
    for phase in range(apart):
        before = int(phase < late)  # its first pixel lies before the map
        first = phase - late + before * apart
        found.append((slice(before, before + len(range(first, size, apart))), slice(first, size, apart)))
    return found


@dataclass(frozen=True)
class _Phases:
    """The problem of all phases, the foldings of its maps, and the bytes of both folded maps and both gradients."""

    spec: ConvSpec
    input: _Folding
    output: _Folding
    held: int


class _Folded(Convolution):
    """The inner algorithm for the folded maps; `kept` prepares the kernels, which are the same for all phases."""

    def __init__(self, spec: ConvSpec, limit: int, phases: _Phases, inner: Convolution, kept: Convolution) -> None:
        super().__init__(spec, limit)
        self._input, self._output, self._inner, self._kept = phases.input, phases.output, inner, kept

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        return self._kept.prepare(w, device, keep=keep)

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        y = self._inner.forward(self._input.apart(x, device), prepared, device, bias=bias)
        return self._output.together(y, device)

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        return self._input.together(self._inner.backward_data(self._output.apart(dy, device), prepared, device), device)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        return self._inner.backward_filter(self._input.apart(x, device), self._output.apart(dy, device), device)

    def backward(self, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        maps = self._input.apart(x, device), self._output.apart(dy, device)
        dx, dw = self._inner.backward(*maps, prepared, device)
        return self._input.together(dx, device), dw


def _apart(spec: ConvSpec) -> Pair:
    """Return rows and columns from tap to tap; one where there is a single tap."""
    (down, right), taps = spec.dilation, (spec.R, spec.S)
    return (down if taps[0] > 1 else 1), (right if taps[1] > 1 else 1)


def _phases(spec: ConvSpec) -> _Phases:
    apart, sizes = _apart(spec), ((spec.H, spec.out_H, spec.R), (spec.W, spec.out_W, spec.S))
    pads, lates, folded, outs, ends = [], [], [], [], []
    for (size, out, taps), d, zeros in zip(sizes, apart, spec.pad, strict=True):
        whole, late = divmod(zeros, d)  # a phase has whole pixels of padding; what is left shifts the phases
        pads.append(whole)
        lates.append(late)
        folded.append(-(-(size + late) // d))
        outs.append(-(-out // d))
        ends.append(outs[-1] + taps - 1 - 2 * whole - folded[-1])
    H, W = folded
    inner = replace(
        spec, N=spec.N * prod(apart), H=H, W=W, pad=(pads[0], pads[1]), pad_end=(ends[0], ends[1]), dilation=(1, 1)
    )
    held = 2 * (prod(inner.x_shape) + prod(inner.y_shape)) * spec.itemsize
    source = _Folding((spec.H, spec.W), (H, W), apart, (lates[0], lates[1]))
    result = _Folding((spec.out_H, spec.out_W), (outs[0], outs[1]), apart, (0, 0))
    return _Phases(inner, source, result, held)
