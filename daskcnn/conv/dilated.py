"""Dilated convolution as a plain one: pixels that the same taps reach are maps of their own, further samples.

Taps of a kernel are d pixels apart, so an output at row h meets only the rows h + d·r. The d rows of outputs from one
multiple of d to the next are d phases that share no input. All phases of all samples together are one problem without
dilation on smaller maps, so whatever is fast there is fast here. That takes a copy of the map, and one of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from daskcnn.arrays import Array, Device
from daskcnn.conv.spec import ConvAlgorithm, ConvSpec, Direction, Prepared, Work

Rows = tuple[slice, slice]
"""Where the rows of a phase lie: in the map of the phase, and in the whole map."""


class Dilated:
    """`inner` for the phases. Supports a stride of 1, one group, and dilations that leave no phase without outputs."""

    def __init__(self, inner: ConvAlgorithm) -> None:
        self.name, self.version, self.rounding = f"dilated-{inner.name}", inner.version, inner.rounding
        self._inner = inner

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for such problems, if the inner algorithm supports that of the phases."""
        apart = _apart(spec)
        if spec.stride != (1, 1) or spec.groups != 1 or apart == (1, 1):
            return False
        return apart[0] <= spec.out_H and apart[1] <= spec.out_W and self._inner.supports(_phases(spec).spec)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the maps by phases, and of the inner algorithm's scratch memory."""
        phases = _phases(spec)
        return self._inner.workspace(phases.spec) + phases.held

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return copies of the maps, and the inner stages."""
        phases = _phases(spec).spec
        ways = 2 if direction == "backward" else 1
        copies = Work("phases", 0, 2 * ways * (prod(phases.x_shape) + prod(phases.y_shape)) * spec.itemsize)
        return (copies, *self._inner.work(phases, direction))

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the inner form of the kernels, which are the same for all phases."""
        return self._inner.prepare(_phases(spec).spec, w, device, keep=keep)

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        p = _phases(spec)
        y = self._inner.forward(p.spec, p.input.apart(x, device), prepared, p.inside(device), bias=bias)
        return p.output.together(y, device)

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        p = _phases(spec)
        dx = self._inner.backward_data(p.spec, p.output.apart(dy, device), prepared, p.inside(device))
        return p.input.together(dx, device)

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K)."""
        p = _phases(spec)
        maps = p.input.apart(x, device), p.output.apart(dy, device)
        return self._inner.backward_filter(p.spec, *maps, p.inside(device))

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw)."""
        p = _phases(spec)
        maps = p.input.apart(x, device), p.output.apart(dy, device)
        dx, dw = self._inner.backward(p.spec, *maps, prepared, p.inside(device))
        return p.input.together(dx, device), dw


@dataclass(frozen=True)
class _Folding:
    """A map (H, W, N, C) as maps (rows, columns, phases · N, C), with zeros where a phase has less than others.

    Attributes
    ----------
    size : H and W
    folded : rows and columns of a phase
    rows, cols : where each phase's lie
    """

    size: tuple[int, int]
    folded: tuple[int, int]
    rows: tuple[Rows, ...]
    cols: tuple[Rows, ...]

    @classmethod
    def of(
        cls, size: tuple[int, int], folded: tuple[int, int], apart: tuple[int, int], late: tuple[int, int]
    ) -> _Folding:
        """Return the folding whose first phase begins `late` pixels before the map."""
        rows, cols = (_along(*axis) for axis in zip(size, apart, late, strict=True))
        return cls(size, folded, rows, cols)

    @property
    def complete(self) -> bool:
        """Whether no phase has less than others."""
        axes = zip((self.rows, self.cols), self.folded, strict=True)
        return all(own == slice(0, size) for phases, size in axes for own, _ in phases)

    def apart(self, a: Array, device: Device) -> Array:
        """Return the maps of the phases of a (H, W, N, C)."""
        (N, C), xp = a.shape[2:], device.xp
        found = (xp.empty if self.complete else xp.zeros)((*self.folded, len(self.rows), len(self.cols), N, C), a.dtype)

        def copy(part: tuple[Rows, Rows, tuple[int, int]]) -> None:
            (own_h, h), (own_w, w), phase = part
            found[(own_h, own_w, *phase)] = a[h, w]

        device.pool.map(copy, self._parts())
        return found.reshape(*self.folded, -1, C)

    def together(self, a: Array, device: Device) -> Array:
        """Return the map whose phases are a (rows, columns, phases · N, C)."""
        parts = a.reshape(*self.folded, len(self.rows), len(self.cols), -1, a.shape[3])
        found = device.xp.empty((*self.size, *parts.shape[4:]), a.dtype)

        def copy(part: tuple[Rows, Rows, tuple[int, int]]) -> None:
            (own_h, h), (own_w, w), phase = part
            found[h, w] = parts[(own_h, own_w, *phase)]

        device.pool.map(copy, self._parts())
        return found

    def _parts(self) -> Iterator[tuple[Rows, Rows, tuple[int, int]]]:
        """Yield where the rows and the columns of each phase lie, and its numbers along the height and the width."""
        for (i, rows), (j, cols) in product(enumerate(self.rows), enumerate(self.cols)):
            yield rows, cols, (i, j)


def _along(size: int, apart: int, late: int) -> tuple[Rows, ...]:
    """Return where each phase's pixels lie along an axis."""
    found = []
    for phase in range(apart):
        before = int(phase < late)  # its first pixel lies before the map
        first = phase - late + before * apart
        count = len(range(first, size, apart))
        found.append((slice(before, before + count), slice(first, size, apart)))
    return tuple(found)


@dataclass(frozen=True)
class _Phases:
    """The problem of all phases, and how the maps are folded for it.

    Attributes
    ----------
    spec : without dilation, each phase of each sample a sample
    held : bytes of both folded maps and of both gradients, the most of all directions
    """

    spec: ConvSpec
    input: _Folding
    output: _Folding
    held: int

    def inside(self, device: Device) -> Device:
        """Return the device for the inner algorithm, whose limit leaves room for the folded maps."""
        return replace(device, workspace_limit=device.workspace_limit - self.held)


def _apart(spec: ConvSpec) -> tuple[int, int]:
    """Return rows and columns from tap to tap; one where there is a single tap."""
    (down, right), taps = spec.dilation, (spec.R, spec.S)
    return (down if taps[0] > 1 else 1), (right if taps[1] > 1 else 1)


@lru_cache(maxsize=1024)
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
    source = _Folding.of((spec.H, spec.W), (H, W), apart, (lates[0], lates[1]))
    result = _Folding.of((spec.out_H, spec.out_W), (outs[0], outs[1]), apart, (0, 0))
    return _Phases(inner, source, result, held)
