"""The columns of a convolution, expanded along the width only.

A block's columns are laid out (pixel, input row, tap along the width, channel). The R·S·C numbers under an output
row of a pixel then lie side by side, stride·S·C apart from row to row. So the columns of all output rows are
overlapping slices of one matrix: its height is not copied R times, and one batched GEMM reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from daskcnn.arrays import Array, Device
from daskcnn.conv.blocks import Tile, ranges_of
from daskcnn.conv.spec import ConvSpec

SHORT_RUN = 8
"""Below this number of channels a pixel's numbers are too few to copy pixel by pixel."""

THREAD_FLOPS = 30_000_000
"""Fewest operations of a thread: some tenths of a millisecond, the time that waking one takes."""
THREAD_BYTES = 1 << 20
"""Fewest bytes that a thread copies, for the same reason."""

Task = TypeVar("Task")
Origin = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PaddedMap:
    """A map (H, N, W, C) with its padding in place: the input of a convolution without padding."""

    spec: ConvSpec
    array: Array
    device: Device

    @classmethod
    def of(cls, spec: ConvSpec, source: Array, origin: Origin, device: Device) -> PaddedMap:
        """Return the part of `source` (h, w, N, C) that starts at `origin`, with zeros outside the source."""
        array = take(device, "map", (spec.H, spec.N, spec.W, spec.C), spec)
        (h, from_h), (w, from_w) = (
            _overlap(start, size, extent)
            for start, size, extent in zip(origin, source.shape, (spec.H, spec.W), strict=False)
        )
        array[: h.start] = array[h.stop :] = 0
        array[h, :, : w.start] = array[h, :, w.stop :] = 0
        inside, given = array[h, :, w], source[from_h, from_w].transpose(0, 2, 1, 3)

        # a few channels make runs too short to copy one by one: each channel is copied for itself then
        step = 1 if spec.C < SHORT_RUN else spec.C

        def copy(rows: slice) -> None:
            for c in ranges_of(spec.C, step):
                inside[rows, ..., c] = given[rows, ..., c]

        at_least = -(-THREAD_BYTES // max(1, inside[:1].nbytes))
        device.pool.map(copy, device.pool.slices(len(inside), at_least=at_least))
        return cls(spec, array, device)

    def columns(self, tile: Tile, scratch: Array) -> Array:
        """Return (output rows, pixels, R·S·C) over memory at the start of `scratch`, which is 1-D and large enough."""
        spec, as_strided = self.spec, self.device.xp.lib.stride_tricks.as_strided
        rows, pixels, width = tile.shape[0], tile.shape[1] * tile.shape[2], spec.S * spec.C
        input_rows = (rows - 1) * spec.stride[0] + spec.R
        corner = self.array[tile.rows.start * spec.stride[0] :, tile.samples, tile.cols.start * spec.stride[1] :]
        h, n, w, one = corner.strides
        windows = as_strided(corner, (*tile.shape[1:], input_rows, width), (w * spec.stride[1], n, h, one))
        flat = scratch[: windows.size]
        flat.reshape(windows.shape)[...] = windows
        strides = spec.stride[0] * width * one, input_rows * width * one, one
        return as_strided(flat, (rows, pixels, spec.R * width), strides)


def map_bytes(spec: ConvSpec) -> int:
    """Return the bytes of the PaddedMap of a convolution without padding."""
    return spec.H * spec.W * spec.N * spec.C * spec.itemsize


def take(device: Device, name: str, shape: tuple[int, ...], spec: ConvSpec) -> Array:
    """Return scratch memory of this module."""
    return device.workspace.take(f"im2col.{name}", shape, spec.dtype)


def run(
    work: Callable[[Task, Array], None],
    tasks: Sequence[Task],
    numbers: int,
    spec: ConvSpec,
    device: Device,
    held: int,
) -> None:
    """Call `work(task, scratch)` for all tasks, with `numbers` of scratch each, on as many threads as the limit allows.

    `held` bytes of the limit are in use already.
    """
    free: SimpleQueue[Array] = SimpleQueue()
    threads = at_once(len(tasks), numbers, spec, device, held)
    for i in range(threads):
        free.put(take(device, f"columns{i}", (numbers,), spec))

    def with_scratch(task: Task) -> None:
        scratch = free.get()
        try:
            work(task, scratch)
        finally:
            free.put(scratch)

    device.pool.map(with_scratch, tasks, threads=threads)


def at_once(tasks: int, numbers: int, spec: ConvSpec, device: Device, held: int) -> int:
    """Return how many of `tasks` tasks can run side by side, with `numbers` of scratch each and `held` bytes in use."""
    fit, useful = (device.workspace_limit - held) // (numbers * spec.itemsize), spec.flops // THREAD_FLOPS
    return max(1, min(device.pool.threads, tasks, fit, useful))


def _overlap(start: int, size: int, extent: int) -> tuple[slice, slice]:
    """Return where source[start : start + extent] has values: in the extent, and in the source of this size."""
    low = min(max(0, -start), extent)
    high = max(low, min(extent, size - start))
    return slice(low, high), slice(low + start, high + start)
