"""Convolution in the frequency domain: about thirteen times fewer multiplications for 5×5 kernels on 16×16 maps.

Small matrices (`fourier`) transform maps and kernels. A convolution is then one matrix product over the channels for
each frequency. A pass on processors is one graph of tasks, block of kernels after block: transforms of columns, then
products of frequencies, then transforms back, each task a compiled loop. Large maps may be cut into tiles, whose
kernels take less memory and time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import prod
from queue import SimpleQueue
from typing import Any

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.conv import fft
from daskcnn.conv.fourier import Fourier, Side, Tiling, fourier
from daskcnn.conv.spec import ConvSpec, Direction, Work, nearly_equal, ranges_of
from daskcnn.pool import Task

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


@dataclass(frozen=True)
class Kernels:
    """Kernels (R, S, C, K) and, if it is kept, their transform: on processors (rows, C, K)."""

    w: Array
    transformed: Array | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Samples and kernels of a block, and how many tasks there is scratch memory for."""

    samples: int
    kernels: int
    lanes: int


class Spectral:
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
        sizes = self._sizes(spec)
        n, k = sizes.least_samples, min(spec.K, LEAST_KERNELS)
        return (sizes.block(n, k) + sizes.scratch(n, k)) * spec.itemsize + ROUNDING

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return transforms and products of the direction."""
        return self._sizes(spec).work(direction)

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Kernels:
        """Return the kernels; with their transform too, if many passes share it and it takes at most half of the limit.

        A training step would use it twice, and writing and reading it takes as long as computing it.
        """
        w, sizes = device.backend.contiguous(w), self._sizes(spec)
        if not keep or 2 * sizes.rows * spec.C * spec.K * spec.itemsize > device.workspace_limit:
            return Kernels(w, None)
        if not device.backend.compiled:
            return Kernels(w, fft.transform(sizes.tiling, w, device.xp))
        return Kernels(w, _Pass.begin(sizes, device).of_all_kernels(w))

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Kernels, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        sizes, xp = self._sizes(spec), device.xp
        tiling = sizes.tiling
        if not device.backend.compiled:
            return fft.forward(tiling, x, _transform(tiling, prepared, xp), bias, xp)
        y = xp.empty(spec.y_shape, spec.dtype)
        # outputs that the kernel does not reach have no frequencies
        inside = all(axis.pad + axis.end < axis.taps for axis in tiling.axes)
        _Pass.begin(sizes, device).forward(device.backend.contiguous(x), prepared, y, bias if inside else None)
        if bias is not None and not inside:
            y += bias
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Kernels, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        sizes, xp = self._sizes(spec), device.xp
        tiling = sizes.tiling
        if not device.backend.compiled:
            dY = fft.transform(tiling, tiling.split(dy, xp), xp)
            return fft.backward_data(tiling, dY, _transform(tiling, prepared, xp), xp)
        dx = tiling.zeros(device)
        _Pass.begin(sizes, device).backward(None, device.backend.contiguous(dy), prepared, dx, None)
        return dx

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K)."""
        sizes, xp = self._sizes(spec), device.xp
        tiling = sizes.tiling
        if not device.backend.compiled:
            return fft.backward_filter(tiling, x, fft.transform(tiling, tiling.split(dy, xp), xp), xp)
        dw = xp.empty(spec.w_shape, spec.dtype)
        x, dy = device.backend.contiguous(x), device.backend.contiguous(dy)
        _Pass.begin(sizes, device).backward(x, dy, None, None, dw)
        return dw

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Kernels, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw); dy is transformed once."""
        sizes, xp = self._sizes(spec), device.xp
        tiling = sizes.tiling
        if not device.backend.compiled:
            dY = fft.transform(tiling, tiling.split(dy, xp), xp)
            dx = fft.backward_data(tiling, dY, _transform(tiling, prepared, xp), xp)
            return dx, fft.backward_filter(tiling, x, dY, xp)
        dx, dw = tiling.zeros(device), xp.empty(spec.w_shape, spec.dtype)
        x, dy = device.backend.contiguous(x), device.backend.contiguous(dy)
        _Pass.begin(sizes, device).backward(x, dy, prepared, dx, dw)
        return dx, dw

    def _sizes(self, spec: ConvSpec) -> Sizes:
        return _sizes(spec, self._tile)


def _transform(tiling: Tiling, prepared: Kernels, xp: Any) -> Array:
    kept = prepared.transformed
    return fft.transform(tiling, prepared.w, xp) if kept is None else kept


@dataclass(frozen=True)
class _Pass:
    """Transforms and products of one convolution on one processor, block after block."""

    tiling: Tiling
    device: Device
    f: Fourier
    blocks: Blocks
    scratch: SimpleQueue[Array]
    tasks: list[Task] = field(default_factory=list)

    @classmethod
    def begin(cls, sizes: Sizes, device: Device) -> _Pass:
        """Begin a pass, which has all scratch memory to itself."""
        tiling, spec = sizes.tiling, sizes.tiling.spec
        blocks = sizes.choose(device.workspace_limit, device.pool.threads)
        each = sizes.scratch(blocks.samples, blocks.kernels)
        numbers = sizes.block(blocks.samples, blocks.kernels) + blocks.lanes * each
        device.workspace.recycle(numbers * spec.itemsize + ROUNDING)
        scratch: SimpleQueue[Array] = SimpleQueue()
        for i in range(blocks.lanes):
            scratch.put(device.workspace.take(f"spectral.scratch{i}", (each,), spec.dtype))
        f = fourier(*tiling.axes, spec.dtype)
        return cls(tiling, device, f, blocks, scratch)

    def forward(self, x: Array, prepared: Kernels, y: Array, bias: Array | None) -> None:
        """Fill y. The bias is added to the products at frequency 0, from which every output receives it."""
        constant = np.zeros(0, y.dtype) if bias is None else bias * prod(axis.length for axis in self.tiling.axes)
        products: list[Task] = []
        back: list[Task] = []
        for samples in ranges_of(self.tiling.spec.N, self.blocks.samples):
            X, of_map = self._of_map(x, samples, products)
            for kernels in ranges_of(self.tiling.spec.K, self.blocks.kernels):
                W, begin, of_kernels = self._of_kernels(prepared, kernels, products)
                Y, own = self._take("output", X.shape[1], _size(kernels)), constant[kernels]
                multiply = partial(
                    compiled.spectral.multiply_rows,
                    self.f.units,
                    X,
                    W,
                    begin,
                    own,
                    Y,
                    compiled.products.small_products(),
                )
                products = self._products(multiply, _size(samples) * _size(kernels), [*of_map, *of_kernels, *back])
                back = self._back(self.f.output, Y, y, self._output_cut(samples, kernels), products)
        self._run()

    def backward(
        self, x: Array | None, dy: Array, prepared: Kernels | None, dx: Array | None, dw: Array | None
    ) -> None:
        """Fill dx, which needs the kernels, and dw, which needs x, as far as they are given."""
        products: list[Task] = []
        back: list[Task] = []  # of the kernels' gradient, which lies where the kernels do
        none = np.zeros((0, 0, 0), dy.dtype)
        for samples in ranges_of(self.tiling.spec.N, self.blocks.samples):
            X, of_map = (none, []) if x is None else self._of_map(x, samples, products)
            dX = none if dx is None else self._take("dmap", _size(samples) * self.tiling.tiles, self.tiling.spec.C)
            for kernels in ranges_of(self.tiling.spec.K, self.blocks.kernels):
                W, begin, of_kernels = self._of_kernels(prepared, kernels, [*products, *back])
                dY, of_output = self._of_output(dy, samples, kernels, products)
                dW = none if dw is None else self._take("kernels", self.tiling.spec.C, _size(kernels))
                add = int(kernels.start > 0)
                differentiate = partial(
                    compiled.spectral.differentiate_rows,
                    self.f.units,
                    X,
                    W,
                    begin,
                    dY,
                    dX,
                    dW,
                    add,
                    compiled.products.small_products(),
                )
                before = [*of_map, *of_kernels, *of_output, *back]
                products = self._products(differentiate, _size(samples) * _size(kernels), before)
                if dw is not None:
                    back = self._back(
                        self.f.kernels, dW, dw, self._kernel_cut(kernels), products, add=samples.start > 0
                    )
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
        W = np.empty((self.f.rows, *w.shape[2:]), w.dtype)
        for kernels in ranges_of(w.shape[3], self.blocks.kernels):
            part = self._take("kernels", w.shape[2], _size(kernels))
            self._forth(self.f.kernels, w, part, self._kernel_cut(kernels), ())
            self._run()
            W[:, :, kernels] = part
        return W

    def _of_map(self, x: Array, samples: slice, after: Sequence[Task]) -> tuple[Array, list[Task]]:
        """Return memory for the transform (rows, tiles · n, C) of these samples, and the tasks that fill it."""
        X = self._take("map", _size(samples) * self.tiling.tiles, self.tiling.spec.C)
        return X, self._forth(self.f.map, x, X, self._map_cut(samples), after)

    def _of_output(self, dy: Array, samples: slice, kernels: slice, after: Sequence[Task]) -> tuple[Array, list[Task]]:
        """Return the same for an output's gradient (rows, tiles · n, k)."""
        dY = self._take("output", _size(samples) * self.tiling.tiles, _size(kernels))
        return dY, self._forth(self.f.output, dy, dY, self._output_cut(samples, kernels), after)

    def _of_kernels(
        self, prepared: Kernels | None, kernels: slice, after: Sequence[Task]
    ) -> tuple[Array, int, list[Task]]:
        """Return an array with the kernels' transform (rows, C, k), where they begin in it, and tasks that fill it."""
        if prepared is None:
            return np.zeros((0, 0, 0), self.tiling.spec.dtype), 0, []
        if prepared.transformed is not None:
            return prepared.transformed, kernels.start, []
        W = self._take("kernels", self.tiling.spec.C, _size(kernels))
        return W, 0, self._forth(self.f.kernels, prepared.w, W, self._kernel_cut(kernels), after)

    def _forth(self, side: Side, source: Array, target: Array, cut: Any, after: Sequence[Task]) -> list[Task]:
        """Return tasks that transform columns of a map (h, w, …, …) to rows (rows, …, …)."""
        outer = _outer(cut.size)
        own = source, side.height, side.real, side.pairs, cut, target, outer, compiled.products.small_products()
        forth = partial(compiled.spectral.forth, *own)
        return self._tasks(forth, -(-cut.length // outer), self._flops(cut), after)

    def _back(
        self, side: Side, source: Array, target: Array, cut: Any, after: Sequence[Task], *, add: bool = False
    ) -> list[Task]:
        """Return tasks that transform rows to columns of a map, set or added: the transpose of `_forth`."""
        outer = _outer(cut.size)
        own = (
            source,
            side.height,
            side.real,
            side.pairs,
            cut,
            target,
            int(add),
            outer,
            compiled.products.small_products(),
        )
        back = partial(compiled.spectral.back, *own)
        return self._tasks(back, -(-cut.length // outer), self._flops(cut), after)

    def _products(self, loop: Loop, size: int, after: Sequence[Task]) -> list[Task]:
        """Return tasks that share all frequencies; size: samples times kernels."""
        flops = 3 * self.f.rows * self.tiling.tiles * self.tiling.spec.C * size
        return self._tasks(loop, len(self.f.units), flops, after)

    def _flops(self, cut: Any) -> int:
        return cut.length * cut.size * cut.tiles * _column_flops(self.tiling, cut.height, cut.width)

    def _tasks(self, loop: Loop, items: int, flops: int, after: Sequence[Task]) -> list[Task]:
        """Add tasks that share `items` items, each with scratch memory; return them."""
        threads = self.device.pool.threads
        one_each = min(threads, flops // LEAST_FLOPS)
        parts = max(1, min(items, max(one_each, min(TASKS_A_THREAD * threads, flops // TASK_FLOPS))))

        def of(first: int, last: int) -> Task:
            def work() -> None:
                scratch = self.scratch.get()
                try:
                    loop(first, last, scratch)
                finally:
                    self.scratch.put(scratch)

            return Task(work, tuple(after))

        tasks = [of(items * i // parts, items * (i + 1) // parts) for i in range(parts)]
        self.tasks.extend(tasks)
        return tasks

    def _map_cut(self, samples: slice) -> Any:
        (h, w), (height, width) = self.tiling.outs, self.tiling.axes
        top, left = self.tiling.spec.pad if self.tiling.size is not None else (0, 0)
        return self._cut(samples, slice(0, self.tiling.spec.C), height.size, width.size, h, w, top, left)

    def _output_cut(self, samples: slice, kernels: slice) -> Any:
        (h, w), (height, width) = self.tiling.outs, self.tiling.axes
        return self._cut(samples, kernels, height.out, width.out, h, w, 0, 0)

    def _cut(self, outer: slice, inner: slice, height: int, width: int, *places: int) -> Any:
        down, right, top, left = places
        across, tiles = self.tiling.grid[1], self.tiling.tiles
        columns = outer.start, _size(outer), inner.start, _size(inner)
        return compiled.spectral.Cut(*columns, height, width, across, tiles, down, right, top, left)

    def _kernel_cut(self, kernels: slice) -> Any:
        s = self.tiling.spec
        return compiled.spectral.Cut(0, s.C, kernels.start, _size(kernels), s.R, s.S, 1, 1, 0, 0, 0, 0)

    def _take(self, name: str, *shape: int) -> Array:
        """Return scratch memory for rows of this shape."""
        return self.device.workspace.take(f"spectral.{name}", (self.f.rows, *shape), self.tiling.spec.dtype)


@dataclass(frozen=True)
class Sizes:
    """How many numbers the transforms of a convolution's blocks take, and what they cost."""

    tiling: Tiling

    @cached_property
    def rows(self) -> int:
        """Rows of all frequencies."""
        return prod(axis.length for axis in self.tiling.axes)

    @property
    def least_samples(self) -> int:
        """Samples of the smallest block."""
        return min(self.tiling.spec.N, -(-LEAST_ROWS // self.tiling.tiles))

    def block(self, samples: int, kernels: int) -> int:
        """Return the numbers of the transforms of maps, gradients, kernels and outputs."""
        n, C = samples * self.tiling.tiles, self.tiling.spec.C
        return self.rows * (2 * n * C + (n + C) * kernels)

    def scratch(self, samples: int, kernels: int) -> int:
        """Return the numbers of a task's pieces between their two transforms, or of its products."""
        n, C, k = samples * self.tiling.tiles, self.tiling.spec.C, kernels
        height, width = self.tiling.axes
        pieces = [
            max(COLUMNS, size) * w * (h + height.length)
            for size, h, w in ((C, height.size, width.size), (k, height.out, width.out), (k, height.taps, width.taps))
        ]
        return max(*pieces, n * k + C * max(n, k) + 3 * max(n * C, C * k, n * k))

    @lru_cache(maxsize=256)  # noqa: B019 (sizes are cached themselves)
    def choose(self, limit: int, threads: int) -> Blocks:
        """Return a block that fits the limit, in bytes. Samples and kernels do not depend on the number of threads."""
        spec, tiles = self.tiling.spec, self.tiling.tiles
        room = (limit - ROUNDING) // spec.itemsize
        least = min(spec.K, LEAST_KERNELS)
        n = max(self.least_samples, nearly_equal(spec.N, max(1, ROWS // tiles)))
        while n > self.least_samples and self.block(n, least) + self.scratch(n, least) > room:
            n = max(self.least_samples, -(-n // 2))
        k = min(spec.K, -(-nearly_equal(spec.K, KERNELS) // LINE) * LINE)
        while k > least and self.block(n, k) + self.scratch(n, k) > room:
            k = max(least, -(-k // 2))
        lanes = (room - self.block(n, k)) // self.scratch(n, k)
        return Blocks(n, k, max(1, min(threads, lanes)))

    def work(self, direction: Direction) -> tuple[Work, ...]:
        """Return transforms and products, as blocks of the largest size compute them."""
        s, (height, width) = self.tiling.spec, self.tiling.axes
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
        length = self.tiling.axes[1].length
        moved = columns * (self.rows + h * w) * self.tiling.spec.itemsize
        return Work(
            f"transform of {name}", columns * _column_flops(self.tiling, h, w), moved, (2 * length, 2 * w, COLUMNS)
        )

    def _product(self, m: int, k: int, n: int) -> Work:
        moved = self.rows * (m * k + k * n + m * n) * self.tiling.spec.itemsize
        return Work("products", 3 * self.rows * m * k * n, moved, (m, k, n))


@lru_cache(maxsize=256)
def _sizes(spec: ConvSpec, tile: int | None) -> Sizes:
    return Sizes(Tiling(spec, tile))


def _column_flops(tiling: Tiling, h: int, w: int) -> int:
    """Return the operations of the transform of a column h × w: along the height, then along the width."""
    height, width = (axis.length for axis in tiling.axes)
    return 2 * w * height * (h + 2 * width)


def _outer(size: int) -> int:
    """Return how many outer columns of this size are transformed at once."""
    return max(1, COLUMNS // size)


def _size(s: slice) -> int:
    return s.stop - s.start
