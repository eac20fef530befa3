"""Chains of local layers: every block of a map goes through all of them while it is in cache.

A map far exceeds the caches, and each of these layers does a few operations per number: alone they would wait for
memory. Only the chain's input is kept for the way back. Each block goes forward again first, which costs less than
writing and reading what every layer would keep. `program` says what is done and where a block's numbers lie.

Dropout draws the numbers of `arrays.derive` and `arrays.uniform`, from a sample's key, pixel and channel.
"""

from __future__ import annotations

import numpy as np

from daskcnn.compiled import activations, batchnorm, lrn, pool
from daskcnn.compiled.loop import Array, boolean, float64, inner, int64, intp, loop, uint64
from daskcnn.compiled.program import (
    AVERAGE,
    BY_INPUT,
    BY_OUTPUT,
    CODE,
    DROPOUT,
    DX,
    DY,
    KEEPS_PLACE,
    KEPT,
    LRN,
    NORMALISES,
    REACH,
    SALT,
    SCALE_RELU,
    SIDE,
    SIZE,
    STEP,
    THRESHOLD,
    X,
    Y,
)
from daskcnn.compiled.runs import add_run, copy, fold

_ONE, _TWO, _GOLDEN = np.uint64(1), np.uint64(2), np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _40 = (np.uint64(bits) for bits in (30, 27, 31, 40))


@inner
def _derived(key: np.uint64, number: np.uint64) -> np.uint64:
    """SplitMix64's next key, for a number: `arrays.derive`."""
    x = key + (_TWO * number + _ONE) * _GOLDEN
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@inner
def draw(
    mask: Array,
    keys: Array,
    salt: int,
    corner: tuple[int, int, int],
    columns: int,
    C: int,
    threshold: int,
    scale: float,
    bits: Array,
    vectors: int,
) -> None:
    """Fill the mask (rows, columns, samples · C): `scale` where a number is kept, else 0.

    corner: the block's first row, column and channel. keys: of its samples. bits: scratch for two runs of keys.
    Vectors have no pixels, so their keys are derived of none.
    """
    row, column, channel = corner
    run = len(keys) * C
    own, here = bits[:run], bits[run : 2 * run]
    for n in range(len(keys)):
        key = _derived(keys[n], np.uint64(salt))
        for c in range(C):
            own[n * C + c] = _derived(key, np.uint64(channel + c))
    if vectors:
        _threshold(own, mask, threshold, scale)
        return
    for j in range(columns):
        for i in range(run):
            here[i] = _derived(own[i], np.uint64(column + j))
        for k in range(len(mask) // (columns * run)):
            at = (k * columns + j) * run
            _pixel(here, np.uint64(row + k), mask[at : at + run], threshold, scale)


@inner
def _pixel(keys: Array, number: np.uint64, mask: Array, threshold: int, scale: float) -> None:
    zero, least = mask.dtype.type(0), np.uint64(threshold)
    for i in range(len(mask)):
        mask[i] = scale if (_derived(keys[i], number) >> _40) >= least else zero


@inner
def _threshold(keys: Array, mask: Array, threshold: int, scale: float) -> None:
    zero, least = mask.dtype.type(0), np.uint64(threshold)
    for i in range(len(mask)):
        mask[i] = scale if (keys[i] >> _40) >= least else zero


@inner
def masked(x: Array, mask: Array) -> None:
    """Replace x by x · mask; backward is the same on gradients."""
    for i in range(len(x)):
        x[i] *= mask[i]


Pixels = tuple[int, int, int]
"""Row, column and sample; or how many of each."""


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], T[:, ::1], int64[:, ::1], T[:, ::1], int64[::1], int64[:, ::1]),
        *(uint64[::1], int64[::1], intp, intp, T[::1], T[:, ::1], uint64[::1]),
    )
)
def forward(
    x: Array,
    y: Array,
    by_channel: Array,
    table: Array,
    numbers: Array,
    block: Array,
    parts: Array,
    keys: Array,
    place: Array,
    first: int,
    last: int,
    scratch: Array,
    tiled: Array,
    bits: Array,
) -> None:
    """Write y of the parts first, …, last - 1 of a map.

    by_channel : (5, C) of batch normalising at the chain's head (`batchnorm`), (0, C) without
    table, numbers, block, parts : of the program
    keys : of the samples
    place : the first channel's number, and 1 for a map of vectors
    scratch, tiled, bits : scratch memory of the program's `scratch`, `tiled` and `bits` numbers
    """
    C, end = x.shape[3], table[len(table) - 1]
    _tile(by_channel, tiled)
    for part in range(first, last):
        for i in range(_count(parts[part], block, y.shape[1])):
            at, sides = _block(parts[part], block, y.shape[1], i)
            _load(x, at, sides, table[0], scratch[table[0, X] :])
            _through(at, sides, C, table, numbers, keys, place, (scratch, tiled, bits), not len(x))
            _store(scratch[end[X] :], at, sides, end, C, 0, y, False)


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, :, ::1], float64[:, :, ::1], intp, intp, boolean),
        *(T[:, ::1], int64[:, ::1], T[:, ::1], int64[::1], int64[:, ::1]),
        *(uint64[::1], int64[::1], intp, intp, T[::1], T[:, ::1], uint64[::1]),
    )
)
def backward(
    x: Array,
    dy: Array,
    dx: Array,
    sums: Array,
    given: int,
    wanted: int,
    adds: bool,
    by_channel: Array,
    table: Array,
    numbers: Array,
    block: Array,
    parts: Array,
    keys: Array,
    place: Array,
    first: int,
    last: int,
    scratch: Array,
    tiled: Array,
    bits: Array,
) -> None:
    """Write dx of the parts of a map; or, with sums (parts, 2, C), what batch normalising at the head needs before.

    dy and dx may have some channels only, from `given` and `wanted` on; dy is 0 elsewhere.

    adds : add dx to what is there
    sums : of the gradient behind the head, and of the same times (x - mean); then dx is not touched
    """
    C = x.shape[3]
    _tile(by_channel, tiled)
    for part in range(first, last):
        tiled[5:] = 0
        for i in range(_count(parts[part], block, dy.shape[1])):
            at, sides = _block(parts[part], block, dy.shape[1], i)
            _load(x, at, sides, table[0], scratch[table[0, X] :])
            _through(at, sides, C, table, numbers, keys, place, (scratch, tiled, bits), len(x) > 0)
            _load_some(dy, at, sides, table[len(table) - 1], C, given, scratch)
            _back(sides, C, table, numbers, tiled, scratch, len(sums) > 0)
            if not len(sums):
                _store(scratch[table[0, DX] :], at, sides, table[0], C, wanted, dx, adds)
        if len(sums):
            fold(tiled[5], sums[part, 0])
            fold(tiled[6], sums[part, 1])


@inner
def _through(
    at: Pixels,
    sides: Pixels,
    C: int,
    table: Array,
    numbers: Array,
    keys: Array,
    place: Array,
    memory: tuple[Array, Array, Array],
    goes_back: bool,
) -> None:
    """Take the block, which lies in scratch, through all operations."""
    (scratch, tiled, bits), run = memory, sides[2] * C
    for link in range(len(table) - 1):
        row = table[link]
        code, width, out = row[CODE], _extent(row, sides[1]), table[link + 1]
        x = scratch[row[X] : row[X] + _extent(row, sides[0]) * width * run]
        y = scratch[row[Y] : row[Y] + _extent(out, sides[0]) * _extent(out, sides[1]) * run]
        kept = scratch[row[KEPT] :]
        if code in KEEPS_PLACE and row[X] != row[Y]:
            copy(x, y)
        if code in BY_OUTPUT:
            activations.forward(code, y, numbers[link, 0])
        elif code == LRN:
            lrn.forward(x, y, kept, C, numbers[link])
        elif code in BY_INPUT:
            activations.forward_to(code, x, y)
        elif code in NORMALISES:
            batchnorm.forward(x, y, tiled, run, code == SCALE_RELU)
        elif code == DROPOUT:
            corner = at[0] * row[SIDE], at[1] * row[SIDE], place[0]
            own = keys[at[2] : at[2] + sides[2]]
            draw(kept[: len(x)], own, row[SALT], corner, width, C, row[THRESHOLD], numbers[link, 0], bits, place[1])
            masked(y, kept)
        else:
            if goes_back and code == AVERAGE and link == len(table) - 2:
                break  # its gradient does not need it
            windows = _extent(out, sides[0]), _extent(out, sides[1])
            pool.forward(code, x, width, y, windows, row[SIZE], row[STEP], kept, goes_back)


@inner
def _back(sides: Pixels, C: int, table: Array, numbers: Array, tiled: Array, scratch: Array, sums: bool) -> None:
    """Take the gradient of the block's output back through all operations."""
    run = sides[2] * C
    for link in range(len(table) - 2, -1, -1):
        row = table[link]
        code, width, out = row[CODE], _extent(row, sides[1]), table[link + 1]
        size, out_size = (_extent(row, sides[0]) * width * run, _extent(out, sides[0]) * _extent(out, sides[1]) * run)
        x, y = scratch[row[X] : row[X] + size], scratch[row[Y] : row[Y] + out_size]
        dy = scratch[row[DY] : row[DY] + out_size]
        kept = scratch[row[KEPT] :]
        if code in BY_OUTPUT:
            activations.backward(code, y, dy, numbers[link, 0])
        elif code == LRN:
            lrn.backward(x, kept, C, numbers[link], dy)
        elif code in BY_INPUT:
            activations.backward_from(code, x, dy)
        elif code in NORMALISES:
            if sums:
                batchnorm.add_sums(x, y, dy, tiled, run, code == SCALE_RELU)
            else:
                batchnorm.backward(x, y, dy, tiled, run, code == SCALE_RELU)
        elif code == DROPOUT:
            masked(dy, kept)
        else:
            windows = _extent(out, sides[0]), _extent(out, sides[1])
            dx = scratch[row[DX] : row[DX] + size]
            pool.backward(code, x, width, dy, windows, row[SIZE], row[STEP], kept, dx)


@inner
def _extent(row: Array, pixels: int) -> int:
    """Return the pixels a side of an operation's input that belong to this many of the chain's output."""
    return (pixels - 1) * row[SIDE] + row[REACH]


@inner
def _count(part: Array, block: Array, width: int) -> int:
    """Return the number of blocks of a part."""
    rows, samples = part[1] - part[0], part[3] - part[2]
    return -(-rows // block[0]) * -(-width // block[1]) * -(-samples // block[2])


@inner
def _block(part: Array, block: Array, width: int, i: int) -> tuple[Pixels, Pixels]:
    """Return the place in the output where the part's block of this number begins, and its sides."""
    down, across = -(-(part[1] - part[0]) // block[0]), -(-width // block[1])
    row = part[0] + i // across % down * block[0]
    column = i % across * block[1]
    sample = part[2] + i // (across * down) * block[2]
    sides = min(block[0], part[1] - row), min(block[1], width - column), min(block[2], part[3] - sample)
    return (row, column, sample), sides


@inner
def _tile(by_channel: Array, tiled: Array) -> None:
    """Repeat each row of numbers by channel for all samples of a block."""
    heads, C = by_channel.shape
    for row in range(heads):
        for i in range(tiled.shape[1]):
            tiled[row, i] = by_channel[row, i % C]


@inner
def _load(x: Array, at: Pixels, sides: Pixels, row: Array, to: Array) -> None:
    """Copy a block of a map."""
    flat, run = x.reshape(x.size), sides[2] * x.shape[3]
    width = _extent(row, sides[1])
    for i in range(_extent(row, sides[0])):
        for j in range(width):
            pixel = (at[0] * row[SIDE] + i) * x.shape[1] + at[1] * row[SIDE] + j
            start = (pixel * x.shape[2] + at[2]) * x.shape[3]
            copy(flat[start:], to[(i * width + j) * run : (i * width + j + 1) * run])


@inner
def _load_some(dy: Array, at: Pixels, sides: Pixels, end: Array, C: int, given: int, scratch: Array) -> None:
    """Copy a block of a gradient that is 0 but for some channels."""
    to = scratch[end[DX] :]
    if dy.shape[3] == C:
        _load(dy, at, sides, end, to)
        return
    to[: sides[0] * sides[1] * sides[2] * C] = 0
    for i in range(sides[0]):
        for j in range(sides[1]):
            for n in range(sides[2]):
                start = ((i * sides[1] + j) * sides[2] + n) * C + given
                copy(dy[at[0] + i, at[1] + j, at[2] + n], to[start : start + dy.shape[3]])


@inner
def _store(block: Array, at: Pixels, sides: Pixels, row: Array, C: int, wanted: int, y: Array, adds: bool) -> None:
    """Copy a block to a map, all channels or some; or add it to what is there."""
    flat, own = y.reshape(y.size), y.shape[3]
    run, width = sides[2] * C, _extent(row, sides[1])
    pieces = 1 if own == C else sides[2]
    length = run // pieces if own == C else own
    for i in range(_extent(row, sides[0])):
        for j in range(width):
            pixel = (at[0] * row[SIDE] + i) * y.shape[1] + at[1] * row[SIDE] + j
            start = (pixel * y.shape[2] + at[2]) * own
            for piece in range(pieces):
                to = flat[start + piece * own : start + piece * own + length]
                source = block[(i * width + j) * run + piece * C + wanted :]
                if adds:
                    add_run(source, to)
                else:
                    copy(source, to)
