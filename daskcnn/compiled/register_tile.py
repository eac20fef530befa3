"""A tile of a product of matrices, whose sums stay in registers until they are whole.

The products that a convolution with few channels makes are too thin for BLAS, which copies its factors first. Here a
factor's numbers are taken from where they lie: each row and each step of the sum says its place.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import array_data, counted, intrinsic, ir, place_for, void
from daskcnn.compiled.register_size import BYTES, ROWS


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
