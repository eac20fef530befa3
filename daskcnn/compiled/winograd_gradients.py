"""Both gradients of Winograd's convolution from the same points, as one loop.

The gradient of the input is made by the adjoint of what made the output: dy at the outputs' points, times the kernels
as they are, times B in place of Bᵀ. So dy is brought to points once for both gradients. Tiles of the input overlap, and
are added up.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import inner, intp, loop
from daskcnn.compiled.minimal import to_inputs
from daskcnn.compiled.products import Matrix, multiply
from daskcnn.compiled.runs import add_at, copy_at
from daskcnn.compiled.sizes import MOST_POINTS, RUN, STEP, STEPS
from daskcnn.compiled.winograd import TILE, Map, Rows, TileGroup, gather, kernels_of, points_apart


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, ::1], T[:, :, :, ::1], T[:, :, ::1]),
        *(TILE, intp, intp, intp, intp, intp, intp, intp, T[::1]),
    )
)
def gradients(
    x: Any,
    dy: Any,
    u: Any,
    dx: Any,
    du: Any,
    f: Any,
    top: int,
    left: int,
    tiles: int,
    samples: int,
    start: int,
    stop: int,
    small: int,
    scratch: Any,
) -> None:
    """Write dx (H, W, N, C) and du (kernels², C, K) of samples start … stop, by groups of `tiles` and `samples`.

    x, dy : (H, W, N, C), (out_H, out_W, N, K)
    u : kernels at their points with their channels swapped (kernels², K, C)
    top, left, f : rows and columns of padding, and what a tile has
    small : of `multiply`
    scratch : STEPS + points² · (`apart(rows, C)` + `apart(rows, K)`) numbers
    """
    N, C, K = x.shape[2], x.shape[3], dy.shape[3]
    source = Map(x.reshape(x.size), x.shape[0], x.shape[1], N * C)
    target = Map(dx.reshape(dx.size), x.shape[0], x.shape[1], N * C)
    changes = Map(dy.reshape(dy.size), dy.shape[0], dy.shape[1], N * K)
    across, rows = -(-dy.shape[1] // f.outputs), tiles * samples
    every, kernels, sums = across * -(-dy.shape[0] // f.outputs), u.reshape(u.size), du.reshape(du.size)
    v = Rows(scratch[STEPS:], points_apart(rows, C))
    z = Rows(scratch[STEPS + f.points * f.points * v.apart :], points_apart(rows, K))
    for sample in range(start, stop, samples):
        for tile in range(0, every, tiles):
            group = TileGroup(tile, min(tile + tiles, every), across, sample, min(sample + samples, stop))
            gather(source, C, group, f.step, top, left, f.inputs, f.points, 0, f.points, v, scratch)
            gather(changes, K, group, f.outputs, 0, 0, f.outputs, f.points, 0, f.points, z, scratch)
            count = (group.last - group.first) * (group.stop - group.start)
            _multiply_points(v, z, kernels, sums, f, C, K, count, sample == start and tile == 0, small)
            _add_tiles(v, target, C, group, f, top, left, scratch)


@inner
def _multiply_points(
    v: Rows, z: Rows, kernels: Any, sums: Any, f: Any, C: int, K: int, count: int, first: bool, small: int
) -> None:
    """Add VᵀZ to the sums at each point, and write ZU over V."""
    for i in range(f.points):
        for j in range(f.points):
            p, at = i * f.points + j, kernels_of(f, i, j) * C * K
            change, old = Matrix(z.numbers, p * z.apart, K, False), Matrix(v.numbers, p * v.apart, C, True)
            adds = not first or i >= f.kernels or j >= f.kernels
            multiply(old, change, Matrix(sums, at, K, False), C, K, count, adds, small)
            new = Matrix(v.numbers, p * v.apart, C, False)
            multiply(change, Matrix(kernels, at, C, False), new, count, C, K, False, small)


@inner
def _add_tiles(
    rows: Rows, target: Map, channels: int, group: TileGroup, f: Any, top: int, left: int, scratch: Any
) -> None:
    """Bring a group's tiles from points to inputs, and add them to the map, in which the tiles before them are."""
    length = (group.stop - group.start) * channels
    for tile in range(group.first, group.last):
        down, right = tile // group.across, tile % group.across
        row, col, at = down * f.step - top, right * f.step - left, (tile - group.first) * length
        start = group.start * channels
        _onto(rows, at, target, start, length, row, col, f, down > 0, right > 0, scratch)


@inner
def _onto(
    rows: Rows,
    at: int,
    target: Map,
    start: int,
    length: int,
    row: int,
    col: int,
    f: Any,
    below: bool,
    beside: bool,
    scratch: Any,
) -> None:
    """Add the tile inputs × inputs at (row, col) where one above or on the left overlaps it, and write the rest."""
    edge, overlap = scratch[MOST_POINTS * MOST_POINTS * STEP : STEPS], f.inputs - f.step
    for first in range(0, length, RUN):
        n = min(RUN, length - first)
        for j in range(f.points):
            here = j * rows.apart + at + first
            to_inputs(rows.numbers, here, f.points * rows.apart, scratch, j * STEP, f.points * STEP, f.inputs, n)
        for i in range(max(0, -row), min(f.inputs, target.height - row)):
            to_inputs(scratch, i * f.points * STEP, STEP, edge, 0, STEP, f.inputs, n)
            for j in range(max(0, -col), min(f.inputs, target.width - col)):
                to = ((row + i) * target.width + col + j) * target.size + start + first
                if (below and i < overlap) or (beside and j < overlap):
                    add_at(edge, j * STEP, target.numbers, to, n)
                else:
                    copy_at(edge, j * STEP, target.numbers, to, n)
