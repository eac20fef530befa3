"""A convolution problem, and the interface of the algorithms that solve it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from daskcnn.arrays import ROUNDING, Array, Backend, Device

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True)
class ConvSpec:
    """Correlate maps x (H, W, N, C) with kernels w (R, S, C / groups, K), giving y (out_H, out_W, N, K).

    N samples, H×W map, C input channels, K kernels of R×S. Raises ValueError for a problem without an output. stride:
    rows and columns from one output to the next. pad: rows of zeros above and below the map, columns at its left and
    right. dilation: rows and columns from one tap to the next. groups: equal parts of the channels and of the kernels,
    in order; a kernel sees those of its group alone. pad_end: zeros below the map and at its right, beside `pad`.
    """

    N: int
    H: int
    W: int
    C: int
    K: int
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dtype: str = "float32"
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    pad_end: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name in ("N", "H", "W", "C", "K", "R", "S", "groups"):
            _at_least(name, getattr(self, name), 1)
        for name, least in (("stride", 1), ("pad", 0), ("dilation", 1), ("pad_end", 0)):
            for axis, value in zip("HW", getattr(self, name), strict=True):
                _at_least(f"{name} along {axis}", value, least)
        for what, count in (("input channels", self.C), ("kernels", self.K)):
            check_divides(self.groups, what, count)
        if np.dtype(self.dtype).kind != "f":
            raise ValueError(f"dtype={self.dtype}: a convolution needs floats; use float32 or float64")
        for axis, size, taps, out in (("H", self.H, self.R, self.out_H), ("W", self.W, self.S, self.out_W)):
            if out < 1:
                raise _too_large(axis, size, taps, self)

    @property
    def out_H(self) -> int:
        """Height of the output."""
        return (self.padded[0] - self.extent[0]) // self.stride[0] + 1

    @property
    def out_W(self) -> int:
        """Width of the output."""
        return (self.padded[1] - self.extent[1]) // self.stride[1] + 1

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns from a kernel's first tap to its last, both included."""
        return (self.R - 1) * self.dilation[0] + 1, (self.S - 1) * self.dilation[1] + 1

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of the map with its padding."""
        return self.H + 2 * self.pad[0] + self.pad_end[0], self.W + 2 * self.pad[1] + self.pad_end[1]

    @property
    def x_shape(self) -> Shape4:
        """(H, W, N, C)."""
        return self.H, self.W, self.N, self.C

    @property
    def w_shape(self) -> Shape4:
        """(R, S, C / groups, K)."""
        return self.R, self.S, self.C // self.groups, self.K

    @cached_property
    def y_shape(self) -> Shape4:
        """(out_H, out_W, N, K)."""
        return self.out_H, self.out_W, self.N, self.K

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one direction; multiply and add count as two, and padding is included."""
        return 2 * self.out_H * self.out_W * self.N * self.K * self.R * self.S * (self.C // self.groups)

    @property
    def moved(self) -> int:
        """Bytes of the map, the kernels and the output."""
        return sum(prod(shape) for shape in (self.x_shape, self.w_shape, self.y_shape)) * self.itemsize

    @cached_property
    def group(self) -> ConvSpec:
        """The problem of one group: its channels and its kernels."""
        return replace(self, C=self.C // self.groups, K=self.K // self.groups, groups=1)


def check_divides(groups: int, what: str, count: int) -> None:
    """Raise ValueError where this number of channels or kernels cannot be cut into equal groups."""
    if count % groups:
        raise ValueError(
            f"groups={groups}: {count} {what} cannot be cut into {groups} equal groups; "
            f"use a number that divides {count}, such as {gcd(groups, count)}"
        )


Pair = tuple[int, int]


def same_padding(size: Pair, taps: Pair, stride: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """Return `pad` and `pad_end` for ceil(size / stride) outputs: half of the zeros before the map, the rest behind."""
    zeros = [
        max(0, (-(-n // step) - 1) * step + (kernel - 1) * apart + 1 - n)
        for n, kernel, step, apart in zip(size, taps, stride, dilation, strict=True)
    ]
    return (zeros[0] // 2, zeros[1] // 2), (zeros[0] % 2, zeros[1] % 2)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: a convolution needs at least {least}; give {least} or more")


def _too_large(axis: str, size: int, taps: int, spec: ConvSpec) -> ValueError:
    i = "HW".index(axis)
    extent, padded, dilation = spec.extent[i], spec.padded[i], spec.dilation[i]
    dilated = f", {extent} with dilation {dilation}," if dilation > 1 else ""
    remedy = "use a smaller kernel or" if dilation == 1 else "use a smaller kernel or dilation, or"
    return ValueError(
        f"kernel of {taps}{dilated} along {axis}: the map is {size}, {padded} with its padding; "
        f"{remedy} pad by at least {(extent - size - spec.pad_end[i] + 1) // 2}"
    )


def ranges_of(size: int, step: int) -> list[slice]:
    """Cut range(size) into slices of `step`; the last one may be shorter."""
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]


def nearly_equal(size: int, at_most: int) -> int:
    """Return the step that cuts range(size) into as few slices of `at_most` as possible, nearly equal."""
    return -(-size // -(-size // at_most))


Prepared: TypeAlias = Any
"""An algorithm's own form of the kernels; only the algorithm that made it looks inside."""

LONGEST = 1024
"""Most numbers that a loop adds up one by one for a kernel gradient, before it adds up such sums.

A gradient sums all pixels of a minibatch, and the kernels of BLAS for some processors add up all they are given one by
one. Rounding grows as the root of that.
"""

Direction = Literal["forward", "backward", "backward_filter"]
"""The result: y; dx and dw together; dw alone, for a network's first layer."""


@dataclass(frozen=True, slots=True)
class Work:
    """One stage of a direction, as the planner's model counts it. bytes: read and written.

    gemm: (m, k, n) of one product, m rows of the left factor; None for a stage that only moves numbers.
    """

    stage: str
    flops: int
    bytes: int
    gemm: tuple[int, int, int] | None = None


class Lent:
    """Scratch memory of a pass, an array for each thread, lent to one piece of work after the other."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._free: SimpleQueue[Array] = SimpleQueue()
        for array in arrays:
            self._free.put(array)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function with these arguments and memory that no other thread uses."""
        own = self._free.get()
        try:
            function(*arguments, own)
        finally:
            self._free.put(own)


class ConvAlgorithm(Protocol):
    """One way to compute a convolution and its two adjoints."""

    name: str
    version: int
    """Raise it when the speed changes, so that measurements of an older version are not used."""
    rounding: float
    """The largest error in float32, as a share of the largest number of the result, for any BLAS: of sums of 256
    products of numbers around 0. Sums of four times as many round twice as much."""

    def supports(self, spec: ConvSpec) -> bool:
        """Return True if this algorithm can compute the problem."""

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of scratch memory on one thread with the smallest blocks: the most of all directions."""

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return the costs of the direction, stage by stage, for the planner's model."""

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        """Return the algorithm for this problem, on devices of this backend, in `limit` bytes of scratch memory."""


class Convolution(ABC):
    """An algorithm bound to a problem and a limit: what depends on these alone is made once, before the passes.

    Arrays belong to `device.xp`: x, dx (H, W, N, C), w, dw (R, S, C / groups, K), y, dy (out_H, out_W, N, K),
    all of `spec.dtype`. Inputs are not changed. Results are new arrays and do not depend on the number of threads.
    A device lends its threads and its scratch memory. A pass may take `limit` bytes of it. The caller keeps BLAS
    single-threaded (`single_threaded_blas`).
    """

    def __init__(self, spec: ConvSpec, limit: int) -> None:
        self.spec, self.limit = spec, limit

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Bring kernels into the algorithm's form: by default as they are, contiguous.

        The form is valid for any batch size and all directions, until w changes. `keep` says that many passes will use
        it: the algorithm may then spend memory to save work.
        """
        return device.backend.contiguous(w)

    @abstractmethod
    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        """Return y = x ⋆ w. bias (K,) is added on the way, which saves a pass over y."""

    @abstractmethod
    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx, the adjoint of `forward` in x."""

    @abstractmethod
    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw, the adjoint of `forward` in w, summed in an order that does not depend on the threads."""

    def backward(self, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw). Work that both adjoints share is done once; by default they share none."""
        return self.backward_data(dy, prepared, device), self.backward_filter(x, dy, device)

    def begin(self, device: Device, *, most: int, own: int, held: int = 0) -> int:
        """Begin a pass, which has all scratch memory to itself, and return the number of its threads.

        It holds `held` bytes, and `own` on each thread. There are at most `most` threads, and as many as memory allows.
        """
        room = (self.limit - ROUNDING - held) // own if own else most
        threads = max(1, min(device.pool.threads, most, room))
        device.workspace.recycle(held + threads * own + ROUNDING)
        return threads


@dataclass(frozen=True)
class Kernels:
    """Kernels w (R, S, C, K) and, if it is kept, their transform."""

    w: Array
    transformed: Array | None = None


class Transforming(Convolution):
    """A convolution that keeps kernels with their transform if half of the limit holds both."""

    def __init__(self, spec: ConvSpec, limit: int, numbers: int) -> None:
        super().__init__(spec, limit)
        self._keeps = 2 * numbers * spec.itemsize <= limit

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> Kernels:
        """Return the kernels; with their transform too, if many passes share it and there is room.

        A training step would use it once or twice, and writing and reading it takes as long as computing it.
        """
        w = device.backend.contiguous(w)
        return Kernels(w, self._transformed(w, device) if keep and self._keeps else None)

    @abstractmethod
    def _transformed(self, w: Array, device: Device) -> Array:
        """Return the kernels' transform, in memory of its own."""
