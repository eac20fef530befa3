"""Winograd's convolution of tiles: F(4×4, 3×3) makes 16 outputs with 36 multiplications in place of 144.

Tiles, kernels and the outputs' gradients are brought to points (`minimal`), where a convolution is one product of
matrices over the channels for each pair of points. Processors work on groups of tiles and samples that stay in cache.
Rounding grows with the number of points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Backend, Device
from daskcnn.compiled.sizes import STEPS, apart
from daskcnn.conv.minimal import AtPoints, Correlation, Minimal, PointExpressions
from daskcnn.conv.spec import (
    LONGEST,
    ConvAlgorithm,
    Convolution,
    ConvSpec,
    Direction,
    Kernels,
    Lent,
    Work,
    nearly_equal,
    ranges_of,
)
from daskcnn.pool import equal_slices

GROUP_BYTES = 1 << 20
"""Bytes of a group at all points, before and after the products: what stays in a core's cache."""
LEAST_ROWS, FEWEST_ROWS = 64, 8
"""Rows of a product below which GEMM is slow, and of the smallest group."""
GROUPS = 4
"""Fewest groups, for threads to share, if each has enough rows."""
PARTS, PART_BYTES = 8, 16 << 20
"""Most partial sums of a kernel gradient, and most bytes of them. No result depends on the number of threads."""
EVEN_BYTES = 96 << 20
"""Most bytes of two partial sums where points have an odd number of lines, which two threads share unequally."""
MOST_PORTIONS, LEAST_PORTIONS, PORTIONS_BYTES = 16, 4, 20 << 20
"""Most portions of a minibatch for both gradients at once, fewest that pay, and most bytes of their sums."""
PORTION_ROWS, MOST_ROWS, GRADIENTS_BYTES = 128, 256, 7 << 18
"""Fewest rows of a portion, most rows of its groups, and bytes of a group at all points, which products overwrite."""
TASKS = 4
"""Tasks of each of several threads, to even out their speeds."""
THREAD_NUMBERS = 1 << 12
"""Fewest numbers of a tap that a thread transforms: calling one takes as long."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The cut of tiles and samples into groups, which have several tiles only if they have all samples.

    tiles, samples: of a group. count: groups of a map. numbers: scratch memory of a group.
    """

    tiles: int
    samples: int
    count: int
    numbers: int

    @property
    def rows(self) -> int:
        """Rows of a product: tiles of all samples of a group."""
        return self.tiles * self.samples


class Winograd(ConvAlgorithm):
    """F(m×m, r×r): tiles of m×m outputs. Supports kernels of r×r with its stride; with 2, an odd padding.

    whole: gradients are made of the whole minibatch at once. That saves partial sums and their kernels, which weigh
    most with few samples, but leaves one thread nearly all of the way back: the model does not prefer it.
    """

    version = 5

    def __init__(self, name: str, f: Minimal, rounding: float, *, whole: bool = False) -> None:
        self.name, self.rounding, self._f, self._back, self._whole = name, rounding, f, f.backward or f, whole

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for its stride, kernels of r×r adjacent taps and one group, in float32 and float64."""
        if spec.stride != (self._f.stride, self._f.stride) or spec.dilation != (1, 1) or spec.groups != 1:
            return False
        odd = self._f.stride == 1 or all(pad % 2 for pad in spec.pad)
        return odd and spec.R == spec.S == self._f.taps and spec.dtype in ("float32", "float64")

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of kernels at their points and of the smallest group. A GPU takes the whole map's."""
        f, forward = self._f, Correlation.forward(spec)
        kernels = f.kernel_numbers(spec)
        gradient = kernels + _sum_groups(f, forward, 0).numbers
        passes = [
            sum(_of_lines(f, c)) if _by_lines(f, c) else kernels + c.y_shape[3] + _groups(f, c, 0).numbers
            for f, c in ((f, forward), (self._back, Correlation.data(spec)))
        ]
        return ROUNDING + max(gradient, *passes) * spec.itemsize

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        forward, data = _work(self._f, Correlation.forward(spec)), _work(self._back, Correlation.data(spec))
        if self._whole:  # a stage of nothing: without measurements the one that threads share is chosen
            forward = (*forward, Work("whole", 0, 0))
        return {"forward": forward, "backward": (*data, *forward), "backward_filter": forward}[direction]

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        if not backend.compiled:
            return PointExpressions(self._f, spec, limit)
        return _WinogradLoops(self._f, spec, limit, whole=self._whole)


@dataclass(frozen=True)
class _PointWay:
    """A correlation in loops: forward, or with the turned kernels for the gradient of the input.

    turned: True if the kernels are turned by 180° and their channels swapped. g: the matrix that brings kernels to
    points. groups: of tiles and samples; None where products are made line of points by line.
    """

    f: Minimal
    c: Correlation
    turned: bool
    g: Array
    groups: Groups | None

    @classmethod
    def of(cls, spec: ConvSpec, f: Minimal, c: Correlation, turned: bool, room: int) -> _PointWay:
        """Return a way of this problem, in `room` numbers of scratch memory."""
        g = np.ascontiguousarray(f.kernel_matrix(turned), c.dtype)
        groups = None if _by_lines(f, c) else _groups(f, c, room - f.kernel_numbers(spec) - c.y_shape[3])
        return cls(f, c, turned, g, groups)

    def transform(self, w: Array, u: Array, scratch: _Scratch) -> Array:
        """Return u (kernels², C, K), filled with the kernels w at their points."""

        def some(part: slice, own: Array) -> None:
            compiled.winograd.transform_kernels(w, self.g, u, 0, self.f.tile.kernels, part.start, part.stop, own)

        scratch.map(some, scratch.pool.slices(w[0, 0].size, at_least=THREAD_NUMBERS))
        return u


class _WinogradLoops(AtPoints):
    """Compiled loops over groups of tiles and samples."""

    def __init__(self, f: Minimal, spec: ConvSpec, limit: int, *, whole: bool) -> None:
        super().__init__(f, spec, limit)
        there, room, sums = self.there, (limit - ROUNDING) // spec.itemsize, f.kernel_numbers(spec)
        self._forward = _PointWay.of(spec, f, there, False, room)
        self._data = _PointWay.of(spec, self.back, self.data, True, room)
        fit = (room - _sum_groups(f, there, 0).numbers) // sums
        parts = min(PARTS, fit, max(_fewest_parts(f, there), PART_BYTES // _sum_bytes(f, there)))
        self._parts = 1 if whole else max(1, parts)
        self._groups = _sum_groups(f, there, room - self._parts * sums)
        self._portions = _cut(f, spec, room, [slice(0, spec.N)]) if whole else _portions(f, spec, room)
        self._shape, self._gt = (f.tile.kernels**2, spec.C, spec.K), np.ascontiguousarray(f.g.T, spec.dtype)

    def _transformed(self, w: Array, device: Device) -> Array:
        scratch = _Scratch(self, device, held=0, own=STEPS)
        return self._forward.transform(w, np.empty(self._shape, self.spec.dtype), scratch)

    def forward(self, x: Array, prepared: Kernels, device: Device, *, bias: Array | None = None) -> Array:
        return self._correlate(self._forward, x, prepared.w, prepared.transformed, bias, device)

    def backward_data(self, dy: Array, prepared: Kernels, device: Device) -> Array:
        w = prepared.w if self._data.groups is None else _swapped(prepared.w)
        return self._correlate(self._data, dy, w, None, None, device)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K): tiles of x by those of dy. A part has the same groups for any number of threads."""
        f, groups, kernels = self.f, self._groups, self.f.tile.kernels
        x, dy = map(device.backend.contiguous, (x, dy))
        scratch = _Scratch(self, device, held=self._parts * prod(self._shape), own=groups.numbers)
        du = scratch.take("sums", min(self._parts, groups.count), *self._shape)
        # threads beyond the parts share out the kernels of a part, whose sums are independent
        lines = ranges_of(kernels, -(-kernels // -(-scratch.threads // len(du))))

        def some(task: tuple[int, slice, slice], own: Array) -> None:
            part, of_part, line = task
            cut = *self.there.pad, groups.tiles, groups.samples, of_part.start, of_part.stop, *_points_of(f, line)
            compiled.winograd.correlate_filter(x, dy, du[part], f.tile, *cut, scratch.small, own)

        parts = enumerate(equal_slices(groups.count, len(du)))
        scratch.map(some, [(i, part, line) for i, part in parts for line in lines])
        return self._folded(du, scratch)

    def backward(self, x: Array, dy: Array, prepared: Kernels, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw), from the same points where portions of the samples may have sums of dw of their own."""
        portions = self._portions
        if portions is None:
            return super().backward(x, dy, prepared, device)
        x, dy = map(device.backend.contiguous, (x, dy))
        held = (1 + len(portions.samples)) * prod(self._shape)
        scratch = _Scratch(self, device, held=held, own=portions.numbers)
        kernels, C, K = self._shape
        u = self._forward.transform(_swapped(prepared.w), scratch.take("kernels", kernels, K, C), scratch)
        du = scratch.take("sums", len(portions.samples), *self._shape)
        dx = np.empty(self.spec.x_shape, self.spec.dtype)  # tiles cover all of it, what no output needs too

        def some(portion: tuple[int, slice], own: Array) -> None:
            part, samples = portion
            cut = *self.there.pad, portions.tiles, portions.together, samples.start, samples.stop
            compiled.winograd_gradients.gradients(x, dy, u, dx, du[part], self.f.tile, *cut, scratch.small, own)

        scratch.map(some, enumerate(portions.samples))
        return dx, self._folded(du, scratch)

    def _correlate(
        self, way: _PointWay, x: Array, w: Array, u: Array | None, bias: Array | None, device: Device
    ) -> Array:
        """Return the correlation of x with kernels w, or with their transform u if it was kept."""
        one = _WinogradPass(self, device, way, device.backend.contiguous(x), w, u, bias)
        return one.by_lines() if way.groups is None else one.by_groups(way.groups)

    def _folded(self, du: Array, scratch: _Scratch) -> Array:
        """Return dw (R, S, C, K) of partial sums (parts, kernels², C, K) at their points."""
        dw = np.empty(self.spec.w_shape, self.spec.dtype)

        def fold(part: slice, own: Array) -> None:
            compiled.winograd.fold_kernels(du, self._gt, dw, part.start, part.stop, own)

        scratch.map(fold, scratch.pool.slices(dw[0, 0].size, at_least=THREAD_NUMBERS))
        return dw


@dataclass(frozen=True)
class _WinogradPass:
    """One correlation of x with kernels w, or with their transform u if it was kept."""

    bound: Convolution
    device: Device
    way: _PointWay
    x: Array
    w: Array
    u: Array | None
    bias: Array | None

    def by_groups(self, groups: Groups) -> Array:
        """Return y, made group by group, each of which stays in cache from its transform to its outputs."""
        way, f, c, y = self.way, self.way.f, self.way.c, np.empty(self.way.c.y_shape, self.way.c.dtype)
        shape = (f.tile.kernels**2, *self.w.shape[2:])
        scratch = _Scratch(self.bound, self.device, held=prod(shape) + c.y_shape[3], own=groups.numbers)
        u, bias = self.u, self._bias(scratch)
        if u is None:
            u = way.transform(self.w, scratch.take("kernels", *shape), scratch)
        cut = STEPS + f.tile.points**2 * apart(groups.rows, c.x_shape[3])

        def some(part: slice, own: Array) -> None:
            inputs, products = own[:cut], own[cut:]
            numbers = *c.pad, groups.tiles, groups.samples, part.start, part.stop, 0, f.tile.points, scratch.small
            compiled.winograd.correlate(self.x, u, False, bias, y, products, f.tile, *numbers, inputs)

        tasks = 1 if scratch.threads == 1 else min(groups.count, TASKS * scratch.threads)
        scratch.map(some, equal_slices(groups.count, tasks))
        return y

    def by_lines(self) -> Array:
        """Return y, made line of points by line, whose kernels stay in cache from their transform to the products."""
        way, f, c, y = self.way, self.way.f, self.way.c, np.empty(self.way.c.y_shape, self.way.c.dtype)
        shape, tiles, samples = (f.tile.kernels, *self.w.shape[2:]), prod(c.tiles(f)), c.x_shape[2]
        held, own = _of_lines(f, c)
        scratch = _Scratch(self.bound, self.device, held=held, own=own)
        products, bias = scratch.take("products", held - c.y_shape[3]), self._bias(scratch)

        def line(i: int, own: Array) -> None:
            kernels, inputs = own[: prod(shape)], own[prod(shape) :]
            if self.u is None:
                u = kernels.reshape(shape)
                compiled.winograd.transform_kernels(self.w, way.g, u, i, i + 1, 0, u[0].size, inputs)
            else:
                u = self.u[i * shape[0] : (i + 1) * shape[0]]
            numbers = *c.pad, tiles, samples, 0, 1, *_points_of(f, slice(i, i + 1)), scratch.small
            compiled.winograd.correlate(self.x, u, way.turned, bias, y, products, f.tile, *numbers, inputs)

        def outputs(part: slice, own: Array) -> None:
            compiled.winograd.write_outputs(products, y, f.tile, part.start, part.stop, own)

        scratch.map(line, reversed(range(f.tile.kernels)))  # the last kernels may be of several lines
        scratch.map(outputs, equal_slices(tiles * samples, min(tiles * samples, scratch.threads)))
        return y

    def _bias(self, scratch: _Scratch) -> Array:
        bias = scratch.take("bias", self.way.c.y_shape[3])
        bias[:] = 0 if self.bias is None else self.bias
        return bias


@dataclass(frozen=True, slots=True)
class Portions:
    """The cut of a minibatch's samples for both gradients at once: of each portion, which has partial sums of its own.

    tiles, together: of a group, whose rows are multiplied together. numbers: scratch memory of a group.
    """

    samples: list[slice]
    tiles: int
    together: int
    numbers: int


def _portions(f: Minimal, spec: ConvSpec, room: int) -> Portions | None:
    """Return the portions, or None where there are too few for threads to share, or not enough memory."""
    N, C, K, tiles = spec.N, spec.C, spec.K, prod(Correlation.forward(spec).tiles(f))
    sums = f.kernel_numbers(spec)
    pays = tiles * N // PORTION_ROWS, tiles * N * (C + K) // (4 * C * K)  # sums are added up once, rows read twice
    most = min(N, MOST_PORTIONS, PORTIONS_BYTES // (sums * spec.itemsize), *pays)
    if most < LEAST_PORTIONS:
        return None
    return _cut(f, spec, room, equal_slices(N, 1 << most.bit_length() - 1))  # else few threads had work at the end


def _cut(f: Minimal, spec: ConvSpec, room: int, samples: list[slice]) -> Portions | None:
    """Return portions of these samples, in groups that stay in cache; None if there is not enough memory."""
    C, K, tiles, sums = spec.C, spec.K, prod(Correlation.forward(spec).tiles(f)), f.kernel_numbers(spec)
    longest = max(each.stop - each.start for each in samples)
    rows = max(LEAST_ROWS, min(MOST_ROWS, GRADIENTS_BYTES // (f.tile.points**2 * (C + K) * spec.itemsize)))
    while rows >= FEWEST_ROWS:
        together = min(longest, rows)
        several = min(tiles, rows // together)
        numbers = STEPS + f.tile.points**2 * (apart(several * together, C) + apart(several * together, K))
        if (1 + len(samples)) * sums + numbers <= room:
            return Portions(samples, several, together, numbers)
        rows //= 2
    return None


def _swapped(w: Array) -> Array:
    """Return kernels (R, S, K, C): BLAS's small products take half as long again where the right factor is turned."""
    return np.ascontiguousarray(w.transpose(0, 1, 3, 2))


def _points_of(f: Minimal, kernels: slice) -> tuple[int, int]:
    """Return the first and last of the points along the height that have these kernels."""
    return kernels.start, f.tile.points if kernels.stop == f.tile.kernels else kernels.stop


class _Scratch:
    """The scratch memory of one pass, in numbers: `held` for all threads and `own` for each."""

    def __init__(self, bound: Convolution, device: Device, *, held: int, own: int) -> None:
        self.pool, self._workspace, self._dtype = device.pool, device.workspace, bound.spec.dtype
        self.small, size = compiled.products.small(), bound.spec.itemsize
        self.threads = bound.begin(device, most=device.pool.threads, own=own * size, held=held * size)
        self._own = own

    def take(self, name: str, *shape: int) -> Array:
        """Return memory for all threads."""
        return self._workspace.take(f"winograd.{name}", shape, self._dtype)

    def map(self, function: Callable[[Any, Array], None], items: Iterable[Any]) -> None:
        """Call the function of every item, with a thread's memory, on as many threads as there is memory for."""
        if self.threads == 1:
            own = self.take("own0", self._own)
            for item in items:
                function(item, own)
            return
        self.pool.map(partial(self._lent.call, function), items, threads=self.threads)

    @cached_property
    def _lent(self) -> Lent:
        return Lent([self.take(f"own{i}", self._own) for i in range(self.threads)])


def _by_lines(f: Minimal, c: Correlation) -> bool:
    """Return True if kernels at their points take more memory than maps do, so that each is transformed where used."""
    C, K = c.x_shape[3], c.y_shape[3]
    return prod(c.tiles(f)) * c.x_shape[2] * (C + K) < 2 * C * K


def _of_lines(f: Minimal, c: Correlation) -> tuple[int, int]:
    """Return the numbers of all products and a bias, and those of a line's kernels and inputs."""
    rows, C, K, kernels = prod(c.tiles(f)) * c.x_shape[2], c.x_shape[3], c.y_shape[3], f.tile.kernels
    lines = f.tile.points - kernels + 1  # that share the last kernels
    return f.tile.points**2 * apart(rows, K) + K, STEPS + kernels * C * K + lines * f.tile.points * apart(rows, C)


def _groups(f: Minimal, c: Correlation, room: int) -> Groups:
    """Return groups of a correlation, of as many rows as fit `room` numbers and stay in cache beside the kernels."""
    return _of_rows(f, c, room, _rows(f, c), GROUPS, None)


def _sum_groups(f: Minimal, c: Correlation, room: int) -> Groups:
    """Return groups of a kernel gradient, likewise."""
    large = _sum_bytes(f, c) > PART_BYTES
    return _of_rows(f, c, room, _rows(f, c), _fewest_parts(f, c) if large else GROUPS, LONGEST)


def _rows(f: Minimal, c: Correlation) -> int:
    """Return few rows, but as many as channels if kernels at their points, or sums, are read from memory each time."""
    return (c.x_shape[3] + c.y_shape[3]) // 2 if _sum_bytes(f, c) > PART_BYTES else LEAST_ROWS


def _sum_bytes(f: Minimal, c: Correlation) -> int:
    return f.tile.kernels**2 * c.x_shape[3] * c.y_shape[3] * np.dtype(c.dtype).itemsize


def _fewest_parts(f: Minimal, c: Correlation) -> int:
    """Return two where two threads could not share the lines of points of one sum equally."""
    return 2 if f.tile.points % 2 and 2 * _sum_bytes(f, c) <= EVEN_BYTES else 1


def _of_rows(f: Minimal, c: Correlation, room: int, rows: int, fewest: int, most: int | None) -> Groups:
    """Return `fewest` groups or more, up to `most`, of about `rows` rows or of more that stay in cache."""
    (N, C), K, tiles = c.x_shape[2:], c.y_shape[3], prod(c.tiles(f))

    def numbers(rows: int) -> int:
        return STEPS + f.tile.points**2 * (apart(rows, C) + apart(rows, K))

    rows = max(LEAST_ROWS, rows, GROUP_BYTES // (f.tile.points**2 * (C + K) * np.dtype(c.dtype).itemsize))
    rows = min(rows, max(LEAST_ROWS, tiles * N // fewest), most or rows)
    while rows > FEWEST_ROWS and numbers(rows) > room:
        rows //= 2
    samples = nearly_equal(N, rows)
    several = min(tiles, rows // N) if samples == N else 1
    return Groups(several, samples, -(-tiles // several) * -(-N // samples), numbers(several * samples))


def _work(f: Minimal, c: Correlation) -> tuple[Work, ...]:
    (N, C), K, itemsize = c.x_shape[2:], c.y_shape[3], np.dtype(c.dtype).itemsize
    rows, squared = prod(c.tiles(f)) * N, f.tile.points**2
    return (
        Work("kernels", 0, (f.taps**2 + f.tile.kernels**2) * C * K * itemsize),
        Work("transforms", 0, squared * rows * (C + K) * itemsize // 2),
        Work("products", 2 * squared * rows * C * K, f.tile.kernels**2 * C * K * itemsize, (rows, C, K)),
    )
