"""Convolution in the frequency domain: about thirteen times fewer multiplications for 5×5 kernels on 16×16 maps.

Small matrices (`fourier`) transform maps and kernels. A convolution is then one matrix product over the
channels for each row of frequencies. Each pass is a graph of tasks: transforms of blocks of columns, then products of
blocks of rows, then transforms back. Large maps may be cut into tiles, whose kernels take less memory and time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.conv.algorithm import Direction, Work
from daskcnn.conv.blocks import nearly_equal, ranges_of
from daskcnn.conv.fourier import Axis, Fourier, Frequencies, Side, fourier
from daskcnn.conv.spec import ConvSpec
from daskcnn.conv.tiles import Tiling
from daskcnn.pool import Task

LEAST_SAMPLES, LEAST_KERNELS, LEAST_COLUMNS = 8, 32, 16
"""The smallest blocks: GEMM does not pay with less."""
ENOUGH_KERNELS = 256
"""Kernels of a block below which samples are cut too."""
TASKS_A_THREAD = 4
"""Tasks of one kind for each thread: enough to even out their speeds."""
TASK_FLOPS = 30_000_000
"""Fewest operations of a task: some tenths of a millisecond, many times the cost of starting one."""

T = TypeVar("T")
Columns = tuple[slice, slice]
"""Where columns lie in a whole array and in a block of it."""


@dataclass(frozen=True)
class Kernels:
    """Kernels (R, S, C, K) and, if there was memory to keep it, their transform (rows, C, K)."""

    w: Array
    transformed: Array | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Samples and kernels of a block, and the columns of the widest map that are transformed at once."""

    samples: int
    kernels: int
    columns: int


class Spectral:
    """Real DFTs of whole maps, or of tiles of `tile` outputs a side. Supports stride 1."""

    version = 2
    rounding = 1e-6

    def __init__(self, tile: int | None = None) -> None:
        self.name = "spectral" if tile is None else f"spectral-{tile}"
        self._tile = tile

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for stride 1; with tiles, only for maps larger than a tile."""
        return spec.stride == (1, 1) and (self._tile is None or max(spec.out_H, spec.out_W) > self._tile)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the transforms of the smallest block and of its gradients."""
        tiling, inner = self._tiled(spec)
        least = Blocks(min(inner.N, LEAST_SAMPLES), min(inner.K, LEAST_KERNELS), LEAST_COLUMNS)
        return tiling.bytes + _bytes(inner, _shape(inner), least, threads=1) + ROUNDING

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return transforms and products of the direction."""
        tiling, inner = self._tiled(spec)
        return (*tiling.work(direction), *_work(inner, _shape(inner), direction))

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Kernels:
        """Return the kernels; with their transform too, if many passes share it and it takes at most half of the limit.

        A training step would use it twice, and writing and reading it takes as long as computing it.
        """
        _, inner = self._tiled(spec)
        f, w = _transforms(inner, device), device.xp.ascontiguousarray(w)
        if not keep or 2 * f.rows * inner.C * inner.K * inner.itemsize > device.workspace_limit:
            return Kernels(w, None)
        kept = device.xp.empty((f.rows, inner.C, inner.K), inner.dtype)
        own = _Pass(inner, device, f, Blocks(inner.N, inner.K, _choose(inner, 0, device).columns))
        device.workspace.recycle()
        device.pool.run(own.of_all_kernels(w, kept))
        return Kernels(w, kept)

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Kernels, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        tiling, own = self._begin(spec, device)
        y = tiling.out(own.spec.y_shape, device)
        inside = all(pad < taps for pad, taps in zip(own.spec.pad, (spec.R, spec.S), strict=True))
        own.forward(tiling.cut(x, device), prepared, y, bias if inside else None)
        if bias is not None and not inside:  # outputs that the kernel does not reach have no frequencies
            y += bias
        return tiling.join(y, device)

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Kernels, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        tiling, own = self._begin(spec, device)
        dx = tiling.out(own.spec.x_shape, device)
        own.backward(None, tiling.split(dy, device), prepared, dx, None)
        return tiling.add_up(dx, device)

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K)."""
        tiling, own = self._begin(spec, device)
        dw = device.xp.empty(spec.w_shape, spec.dtype)
        own.backward(tiling.cut(x, device), tiling.split(dy, device), None, None, dw)
        return dw

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Kernels, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw); dy is transformed once."""
        tiling, own = self._begin(spec, device)
        dx, dw = tiling.out(own.spec.x_shape, device), device.xp.empty(spec.w_shape, spec.dtype)
        own.backward(tiling.cut(x, device), tiling.split(dy, device), prepared, dx, dw)
        return tiling.add_up(dx, device), dw

    def _tiled(self, spec: ConvSpec) -> tuple[Tiling, ConvSpec]:
        """Return how maps are cut, and the problem of the pieces: the problem itself without tiles."""
        tiling = Tiling(spec, self._tile)
        return tiling, tiling.inner

    def _begin(self, spec: ConvSpec, device: Device) -> tuple[Tiling, _Pass]:
        """Begin a pass, which has all scratch memory to itself."""
        tiling, inner = self._tiled(spec)
        f, blocks = _transforms(inner, device), _choose(inner, tiling.bytes, device)
        device.workspace.recycle(tiling.bytes + _bytes(inner, f, blocks, device.pool.threads) + ROUNDING)
        return tiling, _Pass(inner, device, f, blocks)


@dataclass(frozen=True)
class _Pass:
    """Transforms and products of one convolution on one device, block after block."""

    spec: ConvSpec
    device: Device
    f: Fourier
    blocks: Blocks

    def forward(self, x: Array, prepared: Kernels, y: Array, bias: Array | None) -> None:
        """Fill y. The bias is added to the products at frequency 0, from which every output receives it."""
        for samples in self._samples():
            X, before = self._of_map(x, samples)
            for kernels in self._kernels():
                W, transforms = self._of_kernels(prepared, kernels)
                Y = self._take("output", X.shape[1], W.shape[-1])
                before += transforms
                constant = None if bias is None else bias[kernels] * prod(self.f.length)
                products = self._products(partial(self._multiply, X, W, Y, constant=constant), before)
                after = self.back(self.f.output, Y, y, self._output_columns(samples, kernels), products)
                self.device.pool.run([*before, *products, *after])
                before = []

    def backward(
        self, x: Array | None, dy: Array, prepared: Kernels | None, dx: Array | None, dw: Array | None
    ) -> None:
        """Fill dx, which needs the kernels, and dw, which needs x, as far as they are given."""
        for samples in self._samples():
            X, before = (None, []) if x is None else self._of_map(x, samples)
            dX = None if dx is None else self._take("dmap", samples.stop - samples.start, self.spec.C)
            for kernels in self._kernels():
                W, transforms = (None, []) if prepared is None else self._of_kernels(prepared, kernels)
                dY, more = self._of_output(dy, samples, kernels)
                before += [*transforms, *more]
                # kernels in scratch memory make room for their gradient, row by row
                dW = None if dw is None else self._take("kernels", self.spec.C, dY.shape[-1])
                products = self._products(partial(self._differentiate, X, W, dY, dX, dW), before)
                tasks = [*before, *products]
                if dX is not None and dx is not None:
                    columns, first = self._map_columns(samples), kernels.start == 0
                    tasks += self.back(self.f.map, dX, dx, columns, products, add=not first)
                if dW is not None and dw is not None:
                    columns, first = self._kernel_columns(kernels), samples.start == 0
                    tasks += self.back(self.f.kernels, dW, dw, columns, products, add=not first)
                self.device.pool.run(tasks)
                before = []

    def of_all_kernels(self, w: Array, transformed: Array) -> list[Task]:
        """Return the tasks that fill the transform (rows, C, K) of all kernels."""
        return self.forth(self.f.kernels, w, transformed, self._kernel_columns(slice(0, self.spec.K)))

    def _of_map(self, x: Array, samples: slice) -> tuple[Array, list[Task]]:
        """Return memory for the transform (rows, n, C) of these samples, and the tasks that fill it."""
        X = self._take("map", samples.stop - samples.start, self.spec.C)
        return X, self.forth(self.f.map, x, X, self._map_columns(samples))

    def _of_output(self, dy: Array, samples: slice, kernels: slice) -> tuple[Array, list[Task]]:
        """Return the same for an output's gradient (rows, n, k)."""
        dY = self._take("output", samples.stop - samples.start, kernels.stop - kernels.start)
        return dY, self.forth(self.f.output, dy, dY, self._output_columns(samples, kernels))

    def _of_kernels(self, prepared: Kernels, kernels: slice) -> tuple[Array, list[Task]]:
        """Return the same for kernels (rows, C, k); without tasks if their transform was kept."""
        if prepared.transformed is not None:
            return prepared.transformed[..., kernels], []
        W = self._take("kernels", self.spec.C, kernels.stop - kernels.start)
        return W, self.forth(self.f.kernels, prepared.w, W, self._kernel_columns(kernels))

    def _multiply(self, a: Array, b: Array, out: Array, rows: slice, *, constant: Array | None = None) -> None:
        self.device.xp.matmul(a[rows], b[rows], out=out[rows])
        if constant is not None and rows.start == 0:
            out[0] += constant

    def _differentiate(
        self, X: Array | None, W: Array | None, dY: Array, dX: Array | None, dW: Array | None, rows: slice
    ) -> None:
        if dX is not None and W is not None:
            self._multiply(dY, W.swapaxes(1, 2), dX, rows)
        if dW is not None and X is not None:
            self._multiply(X.swapaxes(1, 2), dY, dW, rows)

    def forth(self, side: Side, source: Array, target: Array, columns: Sequence[Columns]) -> list[Task]:
        """Transform columns of a map (h, w, …) into rows (rows, …)."""
        whole, block = _flat(source, 2), _flat(target, 1)
        return self._tasks(partial(self._forth, side, whole, block), self._shared(whole, columns), ())

    def back(
        self,
        side: Side,
        source: Array,
        target: Array,
        columns: Sequence[Columns],
        after: list[Task],
        *,
        add: bool = False,
    ) -> list[Task]:
        """Transform rows (rows, …) into columns of a map (h, w, …), set or added: the transpose of `forth`."""
        block, whole = _flat(source, 1), _flat(target, 2)
        return self._tasks(partial(self._back, side, block, whole, add), self._shared(whole, columns), after)

    def _forth(self, side: Side, whole: Array, block: Array, columns: Sequence[Columns]) -> None:
        f, xp, w = self.f, self.device.xp, whole.shape[1]
        real, pairs = self._kinds(block)
        for source, target in columns:
            half = self._own("half", f.length[0], w, target.stop - target.start)
            xp.matmul(side.height, _by_width(whole[:, :, source]), out=_by_width(half))
            xp.matmul(side.real, half[: f.reals], out=real[:, :, target])
            if f.pairs:
                xp.matmul(side.pairs, half[f.reals :].reshape(f.pairs, 2 * w, -1), out=pairs[:, :, target])

    def _back(self, side: Side, block: Array, whole: Array, add: bool, columns: Sequence[Columns]) -> None:
        f, xp, (h, w) = self.f, self.device.xp, whole.shape[:2]
        real, pairs = self._kinds(block)
        for target, source in columns:
            m = source.stop - source.start
            half = self._own("half", f.length[0], w, m)
            xp.matmul(side.real.T, real[:, :, source], out=half[: f.reals])
            if f.pairs:
                xp.matmul(side.pairs.T, pairs[:, :, source], out=half[f.reals :].reshape(f.pairs, 2 * w, m))
            if add:
                sums = self._own("sums", h, w, m)
                xp.matmul(side.height.T, _by_width(half), out=_by_width(sums))
                whole[:, :, target] += sums
            else:
                xp.matmul(side.height.T, _by_width(half), out=_by_width(whole[:, :, target]))

    def _kinds(self, block: Array) -> tuple[Array, Array]:
        """Return rows (rows, m) as real frequencies (reals, real_rows, m) and as pairs (pairs, pair_rows, m)."""
        f, m = self.f, block.shape[1]
        first = f.reals * f.real_rows
        return block[:first].reshape(f.reals, f.real_rows, m), block[first:].reshape(f.pairs, f.pair_rows, m)

    def _products(self, multiply: Callable[[slice], None], after: list[Task]) -> list[Task]:
        flops = _product(self.f, (self.spec.N, self.spec.C, self.spec.K), 0).flops
        return self._tasks(multiply, ranges_of(self.f.rows, -(-self.f.rows // self._parts(flops))), after)

    def _shared(self, whole: Array, columns: Sequence[Columns]) -> list[Sequence[Columns]]:
        """Return the columns of a map in nearly equal parts."""
        numbers = sum(c.stop - c.start for c, _ in columns)
        flops = _transform("", self.f, whole.shape[0], whole.shape[1], numbers, 0).flops
        return [columns[s] for s in ranges_of(len(columns), -(-len(columns) // self._parts(flops)))]

    def _parts(self, flops: int) -> int:
        """Return the number of tasks for this number of operations."""
        return max(1, min(TASKS_A_THREAD * self.device.pool.threads, flops // TASK_FLOPS))

    def _tasks(self, work: Callable[[T], None], items: Sequence[T], after: Sequence[Task]) -> list[Task]:
        return [Task(partial(work, item), tuple(after)) for item in items]

    def _map_columns(self, samples: slice) -> list[Columns]:
        return _columns(samples, slice(0, self.spec.C), self.spec.C, self._width(self.spec.W))

    def _output_columns(self, samples: slice, kernels: slice) -> list[Columns]:
        return _columns(samples, kernels, self.spec.K, self._width(self.spec.out_W))

    def _kernel_columns(self, kernels: slice) -> list[Columns]:
        return _columns(slice(0, self.spec.C), kernels, self.spec.K, self._width(self.spec.S))

    def _width(self, width: int) -> int:
        """Return how many columns of maps of this width are transformed at once: columns of narrow maps are shorter."""
        return self.blocks.columns * _widest(self.spec) // width

    def _samples(self) -> list[slice]:
        return ranges_of(self.spec.N, self.blocks.samples)

    def _kernels(self) -> list[slice]:
        return ranges_of(self.spec.K, self.blocks.kernels)

    def _take(self, name: str, *shape: int) -> Array:
        """Return scratch memory for rows of this shape."""
        return self._scratch(name, self.f.rows, *shape)

    def _own(self, name: str, *shape: int) -> Array:
        """Return scratch memory of the calling thread, cut from what the largest of its columns take."""
        tallest = max(self.f.length[0] if name == "half" else self.spec.H, self.spec.R, self.spec.out_H)
        numbers = max(prod(shape), self.blocks.columns * tallest * _widest(self.spec))
        return self._scratch(f"{name}{self.device.pool.thread}", numbers)[: prod(shape)].reshape(shape)

    def _scratch(self, name: str, *shape: int) -> Array:
        return self.device.workspace.take(f"spectral.{name}", shape, self.spec.dtype)


def _transforms(spec: ConvSpec, device: Device) -> Fourier:
    return fourier(*_axes(spec), spec.dtype, device.backend)


def _shape(spec: ConvSpec) -> Frequencies:
    """The numbers of rows."""
    height, width = _axes(spec)
    return Frequencies((height.length, width.length))


def _axes(spec: ConvSpec) -> tuple[Axis, Axis]:
    return Axis(spec.H, spec.R, spec.pad[0]), Axis(spec.W, spec.S, spec.pad[1])


def _by_width(a: Array) -> Array:
    """Return (h, w, m) as w matrices (h, m), a view."""
    return a.transpose(1, 0, 2)


def _flat(a: Array, axes: int) -> Array:
    """Join all axes behind the first ones into one; a view, because our arrays are contiguous."""
    return a.reshape(*a.shape[:axes], -1)


def _columns(outer: slice, inner: slice, size: int, width: int) -> list[Columns]:
    """Yield columns outer × inner of arrays (…, outer, size), in runs of up to `width`, and their place in a block."""
    n, own = outer.stop - outer.start, inner.stop - inner.start
    if own == size:
        runs = [(outer.start * size, 0, n * size)]
    else:
        runs = [((outer.start + i) * size + inner.start, i * own, own) for i in range(n)]
    return [
        (slice(whole + part.start, whole + part.stop), slice(block + part.start, block + part.stop))
        for whole, block, length in runs
        for part in ranges_of(length, width)
    ]


def _most_columns(spec: ConvSpec, device: Device) -> int:
    """Return the number of columns of the widest map that stay in cache together, between their two transforms."""
    return max(LEAST_COLUMNS, device.backend.block_bytes // (_shape(spec).length[0] * _widest(spec) * spec.itemsize))


def _widest(spec: ConvSpec) -> int:
    return max(spec.W, spec.S, spec.out_W)


def _choose(spec: ConvSpec, held: int, device: Device) -> Blocks:
    """Return a block: with fewer kernels if transforms exceed the memory left, then with fewer samples."""
    room, threads, f = device.workspace_limit - held - ROUNDING, device.pool.threads, _transforms(spec, device)
    each, least = _column_bytes(spec, f) * threads, max(1, LEAST_COLUMNS // threads)
    columns = max(1, min(_most_columns(spec, device), room // 8 // each, spec.K * max(spec.N, spec.C)))
    # half of the room for kernels is enough: more makes a step no faster
    n, most = spec.N, max(1, min(spec.K, room // (2 * f.rows * spec.C * spec.itemsize)))
    while True:
        numbers = (room - columns * each) // spec.itemsize - 2 * f.rows * n * spec.C
        kernels = min(most, numbers // (f.rows * (n + spec.C)))
        if kernels >= min(most, ENOUGH_KERNELS) or (n <= LEAST_SAMPLES and (kernels >= 1 or columns <= least)):
            return Blocks(n, nearly_equal(spec.K, max(1, kernels)), columns)
        if n > LEAST_SAMPLES:
            n = -(-n // 2)
        else:
            columns = least


def _bytes(spec: ConvSpec, f: Frequencies, blocks: Blocks, threads: int) -> int:
    """Return the bytes of the transforms of maps, gradients, kernels and outputs, and of each thread's columns."""
    n, k = blocks.samples, blocks.kernels
    transforms = f.rows * (2 * n * spec.C + (n + spec.C) * k) * spec.itemsize
    return transforms + threads * blocks.columns * _column_bytes(spec, f)


def _column_bytes(spec: ConvSpec, f: Frequencies) -> int:
    """Return the bytes of a column of the widest map between its two transforms, and after them.

    Columns of narrower maps take no more.
    """
    return (max(f.length[0], spec.R, spec.out_H) + max(spec.H, spec.R, spec.out_H)) * _widest(spec) * spec.itemsize


def _work(spec: ConvSpec, f: Frequencies, direction: Direction) -> tuple[Work, ...]:
    N, C, K = spec.N, spec.C, spec.K
    sides = {
        "map": (spec.H, spec.W, N * C),
        "kernels": (spec.R, spec.S, C * K),
        "output": (spec.out_H, spec.out_W, N * K),
    }
    transforms = {name: _transform(name, f, *side, spec.itemsize) for name, side in sides.items()}
    product = _product(f, (N, C, K), spec.itemsize)
    if direction == "forward":
        return (*transforms.values(), product)
    if direction == "backward_filter":
        return (*transforms.values(), _product(f, (C, N, K), spec.itemsize))
    # the map and the kernels go both ways: what they were, and their gradients
    twice = (*transforms.values(), transforms["map"], transforms["kernels"])
    return (*twice, _product(f, (N, K, C), spec.itemsize), _product(f, (C, N, K), spec.itemsize))


def _transform(name: str, f: Frequencies, h: int, w: int, columns: int, itemsize: int) -> Work:
    L, numbers = f.length[0], f.rows + h * w
    of_width = f.reals * f.real_rows + 2 * f.pairs * f.pair_rows
    flops = 2 * columns * w * (L * h + of_width)
    return Work(f"transform of {name}", flops, columns * numbers * itemsize, (f.pair_rows, 2 * w, columns))


def _product(f: Frequencies, gemm: tuple[int, int, int], itemsize: int) -> Work:
    m, k, n = gemm
    return Work("products", 2 * f.rows * m * k * n, f.rows * (m * k + k * n + m * n) * itemsize, gemm)
