"""Convolution as GEMM over columns, in blocks that the threads of a worker share.

backward_data is a correlation too: of dy with the kernels flipped, one for each phase of the stride (Dumoulin &
Visin, A guide to convolution arithmetic for deep learning, section 4, without the zeros they insert).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.conv.algorithm import Direction, Prepared, Work
from daskcnn.conv.blocks import Block, Tile, choose, least_bytes, nearly_equal, ranges_of
from daskcnn.conv.columns import Origin, PaddedMap, at_once, map_bytes, run, take
from daskcnn.conv.spec import ConvSpec

PIXELS = 512
"""Pixels of a block, enough for GEMM's full speed."""
FILTER_PIXELS = 1024
"""The same for kernel gradients, where every product is added to a sum, so fewer blocks are better."""
PARTS = 4
"""Most partial sums of a kernel gradient. Not the number of threads: results must not depend on it."""
FEW_KERNELS = 256
"""With fewer kernels a bias is added to a whole row of pixels, not in a loop of a few steps per pixel."""
KERNELS = 256
"""Most kernels that a task of a kernel gradient works on."""


class Im2col:
    """GEMM over columns that are expanded along the width only. Supports every problem."""

    name = "im2col"
    version = 2
    rounding = 1e-6

    def supports(self, spec: ConvSpec) -> bool:
        """Return True: it supports every problem."""
        return True

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the padded map, the smallest block's columns, and the flipped kernels.

        A product of the kernels' gradient takes as much as the flipped kernels.
        """
        forward = _least(_inner(spec)) + _kernel_bytes(spec)
        return ROUNDING + max([forward, *(_least(p.spec) + _phase_bytes(p, spec) for p in _phases(spec))])

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return columns and products of the direction."""
        taps, pixels = spec.R * spec.S * spec.C, spec.out_H * spec.out_W * spec.N
        columns = Work("columns", 0, 2 * pixels * spec.S * spec.C * spec.itemsize)
        forward = (columns, Work("products", spec.flops, _moved(spec), (pixels, taps, spec.K)))
        dw = (columns, Work("products", spec.flops, _moved(spec), (taps, pixels, spec.K)))
        taps = max(
            (p.spec.R * p.spec.S * p.spec.C for p in _phases(spec)), default=0
        )  # none where no tap meets the map
        columns = Work("columns", 0, 2 * spec.H * spec.W * spec.N * spec.S * spec.K * spec.itemsize)
        dx = (columns, Work("products", spec.flops, _moved(spec), (spec.H * spec.W * spec.N, max(1, taps), spec.C)))
        return {"forward": forward, "backward": (*dx, *dw), "backward_filter": dw}[direction]

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the kernels themselves, contiguous."""
        return device.xp.ascontiguousarray(w)

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        inner, device = _inner(spec), _limited(device)
        device.workspace.recycle(_correlation_bytes(inner, device, held=0))
        y = device.xp.empty(spec.y_shape, spec.dtype)
        _correlate(inner, x, _corner(spec), prepared, y, device, held=0, bias=bias)
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        device = _limited(device)
        if spec.stride == (1, 1):
            dx, (phase,) = device.xp.empty(spec.x_shape, spec.dtype), _phases(spec)
            device.workspace.recycle(_phase_total(phase, spec, device))
            _correlate_phase(phase, spec, dy, prepared, dx, device)
            return dx
        dx = device.xp.zeros(spec.x_shape, spec.dtype)  # a phase without taps stays zero
        for phase in _phases(spec):
            device.workspace.recycle(_phase_total(phase, spec, device))
            part = take(device, "phase", phase.spec.y_shape, spec)
            _correlate_phase(phase, spec, dy, prepared, part, device)
            dx[phase.pixels] = part
        return dx

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K): columnsᵀ·dy summed over blocks, in an order that does not depend on the threads."""
        device, inner = _limited(device), _inner(spec)
        xp, (block, parts), kernels = device.xp, _filter_blocks(spec, device), nearly_equal(spec.K, KERNELS)
        numbers = block.numbers(inner) + spec.R * spec.S * spec.C * kernels
        held = map_bytes(inner) + (len(parts) - 1) * _kernel_bytes(spec)
        tasks_of_parts = len(parts) * len(ranges_of(spec.K, kernels))
        scratch = at_once(tasks_of_parts, numbers, spec, device, held) * numbers * spec.itemsize
        device.workspace.recycle(held + scratch + ROUNDING)
        padded = PaddedMap.of(inner, x, _corner(spec), device)
        dw = xp.empty((spec.R * spec.S * spec.C, spec.K), spec.dtype)
        sums = [dw, *take(device, "sums", (len(parts) - 1, *dw.shape), spec)]

        def add_up(task: tuple[tuple[Array, list[Tile]], slice], scratch: Array) -> None:
            (total, tiles), kernels = task
            _add_up(total[:, kernels], padded, dy, kernels, tiles, scratch)

        tasks = list(product(zip(sums, parts, strict=True), ranges_of(spec.K, kernels)))
        run(add_up, tasks, numbers, spec, device, held)
        for other in sums[1:]:
            dw += other
        return dw.reshape(spec.w_shape)

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw), computed one after the other: they share no work."""
        return self.backward_data(spec, dy, prepared, device), self.backward_filter(spec, x, dy, device)


@dataclass(frozen=True, slots=True)
class _Phase:
    """The pixels of dx that the same taps reach, as a correlation of dy without padding or stride."""

    spec: ConvSpec
    origin: Origin
    pixels: tuple[slice, slice]
    taps: tuple[slice, slice]


def _limited(device: Device) -> Device:
    """Return the device with a limit reduced by what aligning scratch arrays to cache lines takes."""
    return replace(device, workspace_limit=device.workspace_limit - ROUNDING)


def _correlate(
    spec: ConvSpec,
    source: Array,
    origin: Origin,
    w: Array,
    out: Array,
    device: Device,
    *,
    held: int,
    bias: Array | None = None,
) -> None:
    """Write out (out_H, out_W, N, K) = source ⋆ w without padding, from `origin` on.

    `held` bytes are in use already.
    """
    padded = PaddedMap.of(spec, source, origin, device)
    held += map_bytes(spec)
    block = choose(spec, PIXELS, device.workspace_limit - held)
    matrix = w.reshape(-1, spec.K)
    few = spec.K < FEW_KERNELS
    row = device.xp.tile(bias, block.cols * block.samples) if bias is not None and few else bias

    def multiply(tile: Tile, scratch: Array) -> None:
        result = device.xp.matmul(padded.columns(tile, scratch), matrix, out=tile.of(out))
        if row is not None:
            result = result.reshape(len(result), -1) if few else result
            result += row[: result.shape[-1]]

    run(multiply, block.tiles(spec), block.numbers(spec), spec, device, held)


def _correlation_bytes(spec: ConvSpec, device: Device, *, held: int) -> int:
    """Return all scratch memory of `_correlate`, with the bytes held."""
    held += map_bytes(spec)
    block = choose(spec, PIXELS, device.workspace_limit - held)
    numbers = block.numbers(spec)
    return held + at_once(len(block.tiles(spec)), numbers, spec, device, held) * numbers * spec.itemsize + ROUNDING


def _phase_total(phase: _Phase, spec: ConvSpec, device: Device) -> int:
    return _correlation_bytes(phase.spec, device, held=_phase_bytes(phase, spec))


def _correlate_phase(phase: _Phase, spec: ConvSpec, dy: Array, w: Array, out: Array, device: Device) -> None:
    kernels = take(device, "kernels", phase.spec.w_shape, spec)
    kernels[...] = w[phase.taps][::-1, ::-1].transpose(0, 1, 3, 2)
    _correlate(phase.spec, dy, phase.origin, kernels, out, device, held=_phase_bytes(phase, spec))


def _add_up(total: Array, padded: PaddedMap, dy: Array, kernels: slice, tiles: list[Tile], scratch: Array) -> None:
    """Write total (R·S·C, K) = Σ columnsᵀ·dy over the rows of some tiles."""
    matmul, spare = padded.device.xp.matmul, scratch[-total.size :].reshape(total.shape)
    product = total  # the first goes straight to its place
    for tile in tiles:
        columns = padded.columns(tile, scratch)
        for row, dy_row in zip(columns, tile.of(dy, kernels), strict=True):
            matmul(row.T, dy_row, out=product)
            if product is spare:
                total += spare
            product = spare


def _filter_blocks(spec: ConvSpec, device: Device) -> tuple[Block, list[list[Tile]]]:
    """Return the block of a kernel gradient, and its tiles dealt out to as many partial sums as the limit allows."""
    inner, kernel_bytes = _inner(spec), _kernel_bytes(spec)
    room = device.workspace_limit - map_bytes(inner) - kernel_bytes
    block = choose(inner, FILTER_PIXELS, room).cut(inner, PARTS)
    room -= block.numbers(inner) * spec.itemsize
    tiles = block.tiles(inner)
    parts = max(1, min(PARTS, len(tiles), 1 + room // kernel_bytes))
    return block, [tiles[s] for s in ranges_of(len(tiles), -(-len(tiles) // parts))]


def _inner(spec: ConvSpec) -> ConvSpec:
    """Return the same problem over the padded map, cut to what its output reads."""
    h, w = (spec.out_H - 1) * spec.stride[0] + spec.R, (spec.out_W - 1) * spec.stride[1] + spec.S
    return replace(spec, H=h, W=w, pad=(0, 0))


def _corner(spec: ConvSpec) -> Origin:
    return -spec.pad[0], -spec.pad[1]


def _phases(spec: ConvSpec) -> list[_Phase]:
    """Return a phase for every remainder of (h, w) by the stride that has pixels and taps."""
    rows = _phases_along(spec.H, spec.R, spec.stride[0], spec.pad[0])
    cols = _phases_along(spec.W, spec.S, spec.stride[1], spec.pad[1])
    return [_phase(spec, row, col) for row, col in product(rows, cols)]


def _phases_along(size: int, kernel: int, stride: int, pad: int) -> list[tuple[int, slice, slice]]:
    """Return (origin in dy, pixels, taps) along one axis.

    Pixel h + pad = stride·(h' + shift) + r meets tap r + stride·j at dy[h' + shift − j].
    """
    found = []
    for first in range(min(stride, size)):
        shift, r = divmod(first + pad, stride)
        taps = len(range(r, kernel, stride))
        if taps:
            found.append((shift - taps + 1, slice(first, size, stride), slice(r, kernel, stride)))
    return found


def _phase(spec: ConvSpec, row: tuple[int, slice, slice], col: tuple[int, slice, slice]) -> _Phase:
    (h, pixel_rows, r), (w, pixel_cols, s) = row, col
    R, S = len(range(spec.R)[r]), len(range(spec.S)[s])
    H, W = len(range(spec.H)[pixel_rows]) + R - 1, len(range(spec.W)[pixel_cols]) + S - 1
    inner = ConvSpec(spec.N, H, W, C=spec.K, K=spec.C, R=R, S=S, dtype=spec.dtype)
    return _Phase(inner, (h, w), (pixel_rows, pixel_cols), (r, s))


def _moved(spec: ConvSpec) -> int:
    """Return the bytes of the map, the kernels and the output."""
    shapes = (spec.x_shape, spec.w_shape, spec.y_shape)
    return sum(prod(shape) for shape in shapes) * spec.itemsize


def _least(spec: ConvSpec) -> int:
    return map_bytes(spec) + least_bytes(spec)


def _kernel_bytes(spec: ConvSpec) -> int:
    return spec.R * spec.S * spec.C * spec.K * spec.itemsize


def _phase_bytes(phase: _Phase, spec: ConvSpec) -> int:
    """Return the scratch bytes of the flipped kernels, and of the pixels where they are not the whole of dx."""
    H, W, N, C = phase.spec.y_shape
    return _kernel_bytes(phase.spec) + (H * W * N * C * spec.itemsize if spec.stride != (1, 1) else 0)
