"""Convolution of maps with few channels as sums in registers: no columns are made, and nothing is copied.

Its products are too thin for BLAS, which copies its factors first. Here the sums of a tile of the product stay in
registers until they are whole, and a factor's numbers are read where they lie: each row and each step of the sum has a
place. At an output pixel every tap that meets the map has a place in it. The numbers of a tap for all samples lie a
pixel's channels apart, from that place on.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.im2col import TAPS
from daskcnn.compiled.loop import array_data, counted, inner, intp, intrinsic, ir, loop, place_for, void
from daskcnn.compiled.sizes import BYTES, ROWS


def lanes(itemsize: int) -> int:
    """Return the columns of a tile, for numbers of this size."""
    return BYTES // itemsize


@intrinsic  # type: ignore[untyped-decorator]
def add_tile(
    typing: Any,
    a: Any,
    rows: Any,
    steps: Any,
    b: Any,
    places: Any,
    start: Any,
    begin: Any,
    c: Any,
    to: Any,
    first: Any,
    count: Any,
    k: Any,
) -> Any:
    """Write c[to[i] + k + lane] = start[begin[i] + k + lane] + Σ a[rows[i] + steps[d]] · b[places[d] + k + lane].

    The sum is over `count` d; ROWS rows i from `first` on.

    a, b, start, c : numbers
    rows, steps, places, begin, to : integers, places in them
    All of `start` is read before c is written: a row that is there twice gets its sum once. Nothing is checked: rows,
    begin and to have ROWS places from `first` on, and from k on there are as many numbers as `lanes` says.
    """
    if not a.dtype == b.dtype == start.dtype == c.dtype:
        raise TypeError(f"numbers of several types: {a.dtype}, {b.dtype}, {start.dtype}, {c.dtype}")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *arrays, first, count, k = arguments
        data = [array_data(context, builder, kind, each) for kind, each in zip(signature.args, arrays, strict=False)]
        a, rows, steps, b, places, start, begin, c, to = data
        number, size = a.type.pointee, context.get_abi_sizeof(a.type.pointee)
        vector, none = ir.VectorType(number, lanes(size)), ir.Constant(ir.IntType(32), 0)
        nothing, everywhere = (
            ir.Constant(vector, ir.Undefined),
            ir.Constant(ir.VectorType(none.type, lanes(size)), None),
        )

        def read(integers: Any, at: Any) -> Any:
            return builder.load(builder.gep(integers, [at]))

        def run(numbers: Any, place: Any) -> Any:
            return builder.bitcast(builder.gep(numbers, [builder.add(place, k)]), vector.as_pointer())

        own = [builder.add(first, ir.Constant(first.type, i)) for i in range(ROWS)]
        of_rows = [read(rows, i) for i in own]
        sums = [place_for(builder, vector) for _ in own]  # the compiler keeps them in registers
        for i, total in zip(own, sums, strict=True):
            builder.store(builder.load(run(start, read(begin, i)), align=size), total)
        with counted(builder, count) as turn:
            step, right = read(steps, turn.index), builder.load(run(b, read(places, turn.index)), align=size)
            for row, total in zip(of_rows, sums, strict=True):
                left = builder.insert_element(nothing, read(a, builder.add(row, step)), none)
                factor = builder.shuffle_vector(left, nothing, everywhere)
                product = builder.fmul(factor, right, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for i, total in zip(own, sums, strict=True):
            builder.store(builder.load(total), run(c, read(to, i)), align=size)
        return context.get_dummy_value()

    return void(a, rows, steps, b, places, start, begin, c, to, first, count, k), generate


LONGEST = 1_024
"""Products that are added up one after the other: longer sums round more."""


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[::1], T[:, :, :, ::1], TAPS, intp, intp, intp[:, ::1], intp[:, ::1]))
def correlate(x: Any, w: Any, bias: Any, y: Any, taps: Any, first: int, last: int, met: Any, samples: Any) -> None:
    """Write the rows first … last of y (out_H, out_W, N, K) = x ⋆ w + bias; x (H, W, N, C), w (R·S·C, K), bias (K,).

    met : (2, R·S·C rounded up to whole tiles), the places of taps
    samples : (3, N rounded up to whole tiles), those of samples in x, in y and in the bias
    """
    N, C, K, columns = x.shape[2], x.shape[3], y.shape[3], BYTES // x.itemsize
    source, kernels, target = x.reshape(x.size), w.reshape(w.size), y.reshape(y.size)
    own, to, of_bias = samples[0], samples[1], samples[2]
    _every(N, C, own)
    _every(N, K, to)
    of_bias[:] = 0
    for row in range(first, last):
        for column in range(y.shape[1]):
            count = _taps_met(x, row, column, taps, K, met)
            pixel = target[(row * y.shape[1] + column) * N * K :]
            for k in range(0, K, columns):
                for tile in range(0, len(own), ROWS):
                    add_tile(source, own, met[0], kernels, met[1], bias, of_bias, pixel, to, tile, count, k)


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, ::1], TAPS, intp, intp, intp),
        *(intp[:, ::1], intp[:, ::1], T[:, ::1]),
    )
)
def correlate_filter(
    x: Any, dy: Any, sums: Any, taps: Any, together: int, first: int, last: int, met: Any, samples: Any, own: Any
) -> None:
    """Write the sums first … last (R·S·C, K) of x · dy, each over an equal share of the rows of dy.

    x : (H, W, N, C), dy (out_H, out_W, N, K)
    together : samples that are added up at once
    met : (2, R·S·C rounded up to whole tiles), the places of taps
    samples : (2, `together`), those of samples in x and dy
    own : (R·S·C, K), sums of up to LONGEST samples and those of a pixel
    """
    (rows, across, N, K), C, columns = dy.shape, x.shape[3], BYTES // x.itemsize
    source, change, totals = x.reshape(x.size), dy.reshape(dy.size), own.reshape(own.size)
    _every(together, C, samples[0])
    _every(together, K, samples[1])
    sums[first:last] = 0
    own[:] = 0
    for part in range(first, last):
        added = 0
        for row in range(rows * part // len(sums), rows * (part + 1) // len(sums)):
            for column in range(across):
                added += N
                count = _taps_met(x, row, column, taps, K, met)
                for start in range(0, N, together):
                    n = min(together, N - start)
                    a, b = source[start * C :], change[((row * across + column) * N + start) * K :]
                    for k in range(0, K, columns):
                        for tile in range(0, count, ROWS):
                            to = met[1]
                            add_tile(a, met[0], samples[0], b, samples[1], totals, to, totals, to, tile, n, k)
                if added >= LONGEST:
                    _move(own, sums[part])
                    added = 0
        _move(own, sums[part])


@inner
def _move(own: Any, total: Any) -> None:
    """Add sums to a total, and begin them anew."""
    for i in range(own.shape[0]):
        for k in range(own.shape[1]):
            total[i, k] += own[i, k]
            own[i, k] = 0


@inner
def _every(count: int, apart: int, places: Any) -> None:
    """Write the places of things that lie `apart`; those beyond are the last again."""
    for i in range(len(places)):
        places[i] = min(i, count - 1) * apart


@inner
def _taps_met(x: Any, row: int, column: int, taps: Any, K: int, met: Any) -> int:
    """Write where the taps that meet the map under an output pixel lie, in x and among the kernels; return how many.

    Those beyond are the last again, as far as to a whole tile.
    """
    H, W, N, C = x.shape
    found = 0
    for r in range(taps.height):
        above = row * taps.down + taps.top + r * taps.rows_apart
        if above < 0 or above >= H:
            continue
        for s in range(taps.width):
            left = column * taps.right + taps.left + s * taps.columns_apart
            if left < 0 or left >= W:
                continue
            for c in range(C):
                met[0, found] = (above * W + left) * N * C + c
                met[1, found] = ((r * taps.width + s) * C + c) * K
                found += 1
    for i in range(found, -(-found // ROWS) * ROWS):
        met[0, i], met[1, i] = met[0, found - 1], met[1, found - 1]
    return found
