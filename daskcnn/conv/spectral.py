"""Convolution by fast Fourier transforms of tiles, as array expressions: for GPUs, and as the reference of the loops.

y[p] = Σ x[p + r] w[r] is a correlation: its transform is X·W̄. Then that of dx is dY·Wᵀ, and that of dw is Xᵀ·dȲ.
A tile contains its padding, so no number that is used wraps around.

Convolution in the frequency domain: about thirteen times fewer multiplications for 5×5 kernels on 16×16 maps.

Small matrices (`fourier`) transform maps and kernels; then there is one matrix product over the channels for each
frequency. A pass on processors is a graph of tasks, each a compiled loop, block of kernels after block: transforms of
columns, products, transforms back. Large maps may be cut into tiles, whose kernels take less memory and time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Backend, Device
from daskcnn.conv.fourier import Side, Tiling, fourier
from daskcnn.conv.spec import (
    ConvAlgorithm,
    Convolution,
    ConvSpec,
    Direction,
    Kernels,
    Lent,
    Transforming,
    Work,
    nearly_equal,
    ranges_of,
)
from daskcnn.pool import Task

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


LEAST_ROWS, LEAST_KERNELS = 32, 64
"""The smallest block: samples times tiles, and kernels. With fewer, transforms take longer than products."""
ROWS = 256
"""Samples times tiles of the largest block: more save little, and leave the cache."""
KERNELS, LINE = 256, 16
"""Kernels of the largest block, above which larger ones save nothing; and what their number is a multiple of, so that
rows begin at cache lines."""
COLUMNS = 256
"""Columns that are transformed at once, to stay in a core's cache."""
TASKS_A_THREAD = 4
"""Tasks of one kind for each thread: enough to even out their speeds."""
TASK_FLOPS = 10_000_000
"""Fewest operations of a task: some tenths of a millisecond, many times the cost of starting one."""
LEAST_FLOPS = 1_000_000
"""Fewest operations of a thread's only task of one kind: a second thread pays sooner than more even shares do."""

Loop = Callable[[int, int, Array], None]
"""A compiled loop over items first … last, with scratch memory."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Samples and kernels of a block, the numbers of its transforms, and those of a task's scratch memory."""

    samples: int
    kernels: int
    numbers: int
    scratch: int


class Spectral(ConvAlgorithm):
    """Real DFTs of whole maps, or of tiles of `tile` outputs a side. Supports stride 1."""

    version = 5
    rounding = 2e-6

    def __init__(self, tile: int | None = None) -> None:
        self.name = "spectral" if tile is None else f"spectral-{tile}"
        self._tile = tile

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for stride 1, adjacent taps and one group; with tiles, only for maps larger than a tile."""
        plain = spec.stride == spec.dilation == (1, 1) and spec.groups == 1
        return plain and (self._tile is None or max(spec.out_H, spec.out_W) > self._tile)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the transforms of the smallest block, of its gradients, and of a task's scratch."""
        sizes = Sizes(Tiling(spec, self._tile))
        n, k = sizes.least_samples, min(spec.K, LEAST_KERNELS)
        return (sizes.block(n, k) + sizes.scratch(n, k)) * spec.itemsize + ROUNDING

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        return Sizes(Tiling(spec, self._tile)).work(direction)

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        """Return the loops of processors, elsewhere fast Fourier transforms."""
        return (_SpectralLoops if backend.compiled else TilesByFFT)(Tiling(spec, self._tile), limit)


class _SpectralLoops(Transforming):
    """Transforms and products in compiled loops, block after block."""

    def __init__(self, tiling: Tiling, limit: int) -> None:
        super().__init__(tiling.spec, limit, tiling.kernel_numbers)
        self.tiling, self.f = tiling, fourier(*tiling.axes, tiling.spec.dtype)
        self.blocks = Sizes(tiling).choose(limit)
        # outputs that the kernel does not reach have no frequencies
        self._reaches_all = all(axis.pad + axis.end < axis.taps for axis in tiling.axes)

    def _transformed(self, w: Array, device: Device) -> Array:
        return _SpectralPass(self, device).of_all_kernels(w)

    def forward(self, x: Array, prepared: Kernels, device: Device, *, bias: Array | None = None) -> Array:
        y = np.empty(self.spec.y_shape, self.spec.dtype)
        inside = bias if self._reaches_all else None
        _SpectralPass(self, device).forward(device.backend.contiguous(x), prepared, y, inside)
        if bias is not None and inside is None:
            y += bias
        return y

    def backward_data(self, dy: Array, prepared: Kernels, device: Device) -> Array:
        return self._gradients(None, dy, prepared, device)[0]

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        return self._gradients(x, dy, None, device)[1]

    def backward(self, x: Array, dy: Array, prepared: Kernels, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw); dy is transformed once."""
        return self._gradients(x, dy, prepared, device)

    def _gradients(self, x: Array | None, dy: Array, prepared: Kernels | None, device: Device) -> tuple[Any, Any]:
        """Return dx, if there are kernels, and dw, if there is x; else None."""
        spec, made = self.spec, np.empty if self.tiling.size is None else np.zeros  # tiles are added up
        dx = None if prepared is None else made(spec.x_shape, spec.dtype)
        dw = None if x is None else np.empty(spec.w_shape, spec.dtype)
        x = None if x is None else device.backend.contiguous(x)
        _SpectralPass(self, device).backward(x, device.backend.contiguous(dy), prepared, dx, dw)
        return dx, dw


class _SpectralPass:
    """The tasks of one pass, which has all scratch memory to itself."""

    def __init__(self, bound: _SpectralLoops, device: Device) -> None:
        self.spec, self.tiling, self.f, self.blocks = bound.spec, bound.tiling, bound.f, bound.blocks
        self.device, self.small = device, compiled.products.small()
        size, own, take = self.spec.itemsize, self.blocks.scratch, device.workspace.take
        lanes = bound.begin(device, most=device.pool.threads, own=own * size, held=self.blocks.numbers * size)
        self.scratch = Lent([take(f"spectral.scratch{i}", (own,), self.spec.dtype) for i in range(lanes)])
        self.tasks: list[Task] = []

    def forward(self, x: Array, prepared: Kernels, y: Array, bias: Array | None) -> None:
        """Fill y. The bias is added to the products at frequency 0, from which every output receives it."""
        constant = np.zeros(0, y.dtype) if bias is None else bias * self.tiling.rows
        products, back = list[Task](), list[Task]()
        for samples in ranges_of(self.spec.N, self.blocks.samples):
            X, of_map = self._of_map(x, samples, products)
            for kernels in ranges_of(self.spec.K, self.blocks.kernels):
                W, begin, of_kernels = self._of_kernels(prepared, kernels, products)
                Y, own = self._take("output", X.shape[1], _size(kernels)), constant[kernels]
                multiply = partial(compiled.spectral.multiply_rows, self.f.units, X, W, begin, own, Y, self.small)
                products = self._products(multiply, _size(samples) * _size(kernels), [*of_map, *of_kernels, *back])
                back = self._back(self.f.output, Y, y, self._output_cut(samples, kernels), products)
        self._run()

    def backward(
        self, x: Array | None, dy: Array, prepared: Kernels | None, dx: Array | None, dw: Array | None
    ) -> None:
        """Fill dx, which needs the kernels, and dw, which needs x, as far as they are given."""
        products, back = list[Task](), list[Task]()  # `back` of the kernels' gradient, which lies where the kernels do
        none, C = np.zeros((0, 0, 0), dy.dtype), self.spec.C
        for samples in ranges_of(self.spec.N, self.blocks.samples):
            X, of_map = (none, []) if x is None else self._of_map(x, samples, products)
            dX = none if dx is None else self._take("dmap", _size(samples) * self.tiling.tiles, C)
            for kernels in ranges_of(self.spec.K, self.blocks.kernels):
                W, begin, of_kernels = self._of_kernels(prepared, kernels, [*products, *back])
                dY = self._take("output", _size(samples) * self.tiling.tiles, _size(kernels))
                of_output = self._forth(self.f.output, dy, dY, self._output_cut(samples, kernels), products)
                dW = none if dw is None else self._take("kernels", C, _size(kernels))
                add = int(kernels.start > 0)
                differentiate = partial(
                    compiled.spectral.differentiate_rows, self.f.units, X, W, begin, dY, dX, dW, add, self.small
                )
                before = [*of_map, *of_kernels, *of_output, *back]
                products = self._products(differentiate, _size(samples) * _size(kernels), before)
                if dw is not None:
                    cut, more = self._kernel_cut(kernels), samples.start > 0
                    back = self._back(self.f.kernels, dW, dw, cut, products, add=more)
            if dx is not None:
                done = self._back(self.f.map, dX, dx, self._map_cut(samples), products, add=self.tiling.tiles > 1)
                products = [*products, *done]
        self._run()

    def _run(self) -> None:
        """Run the tasks, and forget them: they hold the pass, so maps would stay until the next garbage collection."""
        try:
            self.device.pool.run(self.tasks)
        finally:
            self.tasks.clear()

    def of_all_kernels(self, w: Array) -> Array:
        """Return the transform (rows, C, K) of all kernels."""
        W = np.empty((self.tiling.rows, *w.shape[2:]), w.dtype)
        for kernels in ranges_of(w.shape[3], self.blocks.kernels):
            part = self._take("kernels", w.shape[2], _size(kernels))
            self._forth(self.f.kernels, w, part, self._kernel_cut(kernels), ())
            self._run()
            W[:, :, kernels] = part
        return W

    def _of_map(self, x: Array, samples: slice, after: Sequence[Task]) -> tuple[Array, list[Task]]:
        """Return memory for the transform (rows, tiles · n, C) of these samples, and the tasks that fill it."""
        X = self._take("map", _size(samples) * self.tiling.tiles, self.spec.C)
        return X, self._forth(self.f.map, x, X, self._map_cut(samples), after)

    def _of_kernels(
        self, prepared: Kernels | None, kernels: slice, after: Sequence[Task]
    ) -> tuple[Array, int, list[Task]]:
        """Return an array with the kernels' transform (rows, C, k), where they begin in it, and tasks that fill it."""
        if prepared is None:
            return np.zeros((0, 0, 0), self.spec.dtype), 0, []
        if prepared.transformed is not None:
            return prepared.transformed, kernels.start, []
        W = self._take("kernels", self.spec.C, _size(kernels))
        return W, 0, self._forth(self.f.kernels, prepared.w, W, self._kernel_cut(kernels), after)

    def _forth(self, side: Side, source: Array, target: Array, cut: Any, after: Sequence[Task]) -> list[Task]:
        """Return tasks that transform columns of a map (h, w, …, …) to rows (rows, …, …)."""
        outer = max(1, COLUMNS // cut.size)  # columns at once
        own = source, side.height, side.real, side.pairs, cut, target, outer, self.small
        return self._tasks(partial(compiled.spectral.forth, *own), -(-cut.length // outer), self._flops(cut), after)

    def _back(
        self, side: Side, source: Array, target: Array, cut: Any, after: Sequence[Task], *, add: bool = False
    ) -> list[Task]:
        """Return tasks that transform rows to columns of a map, set or added: the transpose of `_forth`."""
        outer = max(1, COLUMNS // cut.size)
        own = source, side.height, side.real, side.pairs, cut, target, int(add), outer, self.small
        return self._tasks(partial(compiled.spectral.back, *own), -(-cut.length // outer), self._flops(cut), after)

    def _products(self, loop: Loop, size: int, after: Sequence[Task]) -> list[Task]:
        """Return tasks that share all frequencies; size: samples times kernels."""
        flops = 3 * self.tiling.rows * self.tiling.tiles * self.spec.C * size
        return self._tasks(loop, len(self.f.units), flops, after)

    def _flops(self, cut: Any) -> int:
        return cut.length * cut.size * cut.tiles * _column_flops(self.tiling, cut.height, cut.width)

    def _tasks(self, loop: Loop, items: int, flops: int, after: Sequence[Task]) -> list[Task]:
        """Add tasks that share `items` items, each with scratch memory; return them."""
        threads = self.device.pool.threads
        one_each = min(threads, flops // LEAST_FLOPS)
        parts = max(1, min(items, max(one_each, min(TASKS_A_THREAD * threads, flops // TASK_FLOPS))))
        shares = [(items * i // parts, items * (i + 1) // parts) for i in range(parts)]
        tasks = [Task(partial(self.scratch.call, loop, *share), tuple(after)) for share in shares]
        self.tasks.extend(tasks)
        return tasks

    def _map_cut(self, samples: slice) -> Any:
        (h, w), (height, width) = self.tiling.outs, self.tiling.axes
        top, left = self.spec.pad if self.tiling.size is not None else (0, 0)
        return self._cut(samples, slice(0, self.spec.C), height.size, width.size, h, w, top, left)

    def _output_cut(self, samples: slice, kernels: slice) -> Any:
        (h, w), (height, width) = self.tiling.outs, self.tiling.axes
        return self._cut(samples, kernels, height.out, width.out, h, w, 0, 0)

    def _cut(self, outer: slice, inner: slice, height: int, width: int, *places: int) -> Any:
        down, right, top, left = places
        across, tiles = self.tiling.grid[1], self.tiling.tiles
        columns = outer.start, _size(outer), inner.start, _size(inner)
        return compiled.spectral.Cut(*columns, height, width, across, tiles, down, right, top, left)

    def _kernel_cut(self, kernels: slice) -> Any:
        s = self.spec
        return compiled.spectral.Cut(0, s.C, kernels.start, _size(kernels), s.R, s.S, 1, 1, 0, 0, 0, 0)

    def _take(self, name: str, *shape: int) -> Array:
        return self.device.workspace.take(f"spectral.{name}", (self.tiling.rows, *shape), self.spec.dtype)


class Sizes:
    """Numbers and costs of the transforms of a convolution's blocks."""

    def __init__(self, tiling: Tiling) -> None:
        self.tiling, self.spec, self.rows = tiling, tiling.spec, tiling.rows

    @property
    def least_samples(self) -> int:
        """Samples that fill the rows of a product."""
        return min(self.spec.N, -(-LEAST_ROWS // self.tiling.tiles))

    def block(self, samples: int, kernels: int) -> int:
        """Return the numbers of the transforms of maps, gradients, kernels and outputs."""
        n, C = samples * self.tiling.tiles, self.spec.C
        return self.rows * (2 * n * C + (n + C) * kernels)

    def scratch(self, samples: int, kernels: int) -> int:
        """Return the numbers of a task's pieces between their two transforms, or of its products."""
        n, C, k = samples * self.tiling.tiles, self.spec.C, kernels
        height, width = self.tiling.axes
        pieces = [
            max(COLUMNS, size) * w * (h + height.length)
            for size, h, w in ((C, height.size, width.size), (k, height.out, width.out), (k, height.taps, width.taps))
        ]
        return max(*pieces, n * k + C * max(n, k) + 3 * max(n * C, C * k, n * k))

    def choose(self, limit: int) -> Blocks:
        """Return a block that fits the limit, in bytes, with the scratch memory of one thread."""
        spec, room = self.spec, (limit - ROUNDING) // self.spec.itemsize
        least = min(spec.K, LEAST_KERNELS)
        n = max(self.least_samples, nearly_equal(spec.N, max(1, ROWS // self.tiling.tiles)))
        while n > self.least_samples and self.block(n, least) + self.scratch(n, least) > room:
            n = max(self.least_samples, -(-n // 2))
        k = min(spec.K, -(-nearly_equal(spec.K, KERNELS) // LINE) * LINE)
        while k > least and self.block(n, k) + self.scratch(n, k) > room:
            k = max(least, -(-k // 2))
        return Blocks(n, k, self.block(n, k), self.scratch(n, k))

    def work(self, direction: Direction) -> tuple[Work, ...]:
        """Return transforms and products, as blocks of the largest size compute them."""
        s, (height, width) = self.spec, self.tiling.axes
        n = s.N * self.tiling.tiles
        again = max(1, n // ROWS)  # kernels are transformed for each block of samples
        transforms = {
            "map": self._transform("map", height.size, width.size, n * s.C),
            "kernels": self._transform("kernels", s.R, s.S, again * s.C * s.K),
            "output": self._transform("output", height.out, width.out, n * s.K),
        }
        if direction == "forward":
            return (*transforms.values(), self._product(n, s.C, s.K))
        if direction == "backward_filter":
            return (*transforms.values(), self._product(s.C, n, s.K))
        # the map and the kernels go both ways: what they were, and their gradients
        twice = (*transforms.values(), transforms["map"], transforms["kernels"])
        return (*twice, self._product(n, s.K, s.C), self._product(s.C, n, s.K))

    def _transform(self, name: str, h: int, w: int, columns: int) -> Work:
        moved, length = columns * (self.rows + h * w) * self.spec.itemsize, self.tiling.axes[1].length
        flops, gemm = columns * _column_flops(self.tiling, h, w), (2 * length, 2 * w, COLUMNS)
        return Work(f"transform of {name}", flops, moved, gemm)

    def _product(self, m: int, k: int, n: int) -> Work:
        moved = self.rows * (m * k + k * n + m * n) * self.spec.itemsize
        return Work("products", 3 * self.rows * m * k * n, moved, (m, k, n))


def _column_flops(tiling: Tiling, h: int, w: int) -> int:
    """Return the operations of the transform of a column h × w: along the height, then along the width."""
    height, width = (axis.length for axis in tiling.axes)
    return 2 * w * height * (h + 2 * width)


def _size(s: slice) -> int:
    return s.stop - s.start
