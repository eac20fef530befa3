"""The matrices of Winograd's minimal filtering, written out: each brings runs of numbers to points, or back from them.

They are those of `daskcnn.conv.minimal`. A run's numbers are of one pixel, and all go through the same few additions.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import inner, uintp


@inner
def to_points(d: Any, at: int, step: int, inputs: int, v: Any, to: int, apart: int, points: int, n: int) -> None:
    """Multiply Bᵀ by runs d[at + i·step …] of inputs into v[to + i·apart …], along one axis; or A by runs of outputs.

    The outputs of a tile are fewer than its inputs: their number tells which of both is meant.
    """
    if inputs == 6:
        _input_6(d, at, step, v, to, apart, n)
    elif inputs == 8:
        _input_8(d, at, step, v, to, apart, n)
    elif inputs == 9:
        _input_9(d, at, step, v, to, apart, n)
    elif inputs == 5:
        _input_5(d, at, step, v, to, apart, n)
    elif inputs == 4 and points == 4:
        _input_4(d, at, step, v, to, apart, n)
    elif points == 6:
        _change_4_6(d, at, step, v, to, apart, n)
    elif points == 8:
        _change_4_8(d, at, step, v, to, apart, n)
    elif points == 9:
        _change_4_9(d, at, step, v, to, apart, n)
    else:
        _change_2_4(d, at, step, v, to, apart, n)


@inner
def from_points(m: Any, at: int, step: int, points: int, y: Any, to: int, apart: int, outputs: int, n: int) -> None:
    """Multiply Aᵀ by runs m[at + i·step …] into y[to + i·apart …], along one axis."""
    if points == 6:
        _output_6_4(m, at, step, y, to, apart, n)
    elif points == 8:
        _output_8_4(m, at, step, y, to, apart, n)
    elif points == 9 and outputs == 4:
        _output_9_4(m, at, step, y, to, apart, n)
    elif points == 9:
        _output_9_8(m, at, step, y, to, apart, n)
    else:
        _output_4_2(m, at, step, y, to, apart, n)


@inner
def to_inputs(m: Any, at: int, step: int, d: Any, to: int, apart: int, inputs: int, n: int) -> None:
    """Multiply B by runs m[at + i·step …] into d[to + i·apart …], along one axis: the adjoint of `to_points`."""
    if inputs == 6:
        _adjoint_6(m, at, step, d, to, apart, n)
    elif inputs == 8:
        _adjoint_8(m, at, step, d, to, apart, n)
    elif inputs == 9:
        _adjoint_9(m, at, step, d, to, apart, n)
    else:
        _adjoint_4(m, at, step, d, to, apart, n)


@inner
def places(at: int, step: int) -> Any:
    """Return the places where runs begin, unsigned: with signed ones Numba tests for less than zero at each use."""
    return (
        *(uintp(at), uintp(at + step), uintp(at + 2 * step), uintp(at + 3 * step)),
        *(uintp(at + 4 * step), uintp(at + 5 * step), uintp(at + 6 * step), uintp(at + 7 * step)),
        uintp(at + 8 * step),
    )


# --- points 0, 1, −1, ∞ ---


@inner
def _input_4(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b = places(at, step), places(to, apart)
    for i in range(uintp(n)):
        d1, d2 = d[a[1] + i], d[a[2] + i]
        v[b[0] + i] = d[a[0] + i] - d2
        v[b[1] + i] = d1 + d2
        v[b[2] + i] = d2 - d1
        v[b[3] + i] = d[a[3] + i] - d1


@inner
def _output_4_2(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b = places(at, step), places(to, apart)
    for i in range(uintp(n)):
        m1, m2 = m[a[1] + i], m[a[2] + i]
        y[b[0] + i] = m[a[0] + i] + m1 + m2
        y[b[1] + i] = m1 - m2 + m[a[3] + i]


@inner
def _change_2_4(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b = places(at, step), places(to, apart)
    for i in range(uintp(n)):
        d0, d1 = d[a[0] + i], d[a[1] + i]
        z[b[0] + i] = d0
        z[b[1] + i] = d0 + d1
        z[b[2] + i] = d0 - d1
        z[b[3] + i] = d1


@inner
def _adjoint_4(m: Any, at: int, step: int, d: Any, to: int, apart: int, n: int) -> None:
    a, b = places(at, step), places(to, apart)
    for i in range(uintp(n)):
        m0, difference, m3 = m[a[0] + i], m[a[1] + i] - m[a[2] + i], m[a[3] + i]
        d[b[0] + i] = m0
        d[b[1] + i] = difference - m3
        d[b[2] + i] = m[a[1] + i] + m[a[2] + i] - m0
        d[b[3] + i] = m3


# --- points 0, 1, −1, ½, −2, ∞ ---


@inner
def _input_6(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    one_and_half, two, three = T(1.5), T(2), T(3)
    for i in range(uintp(n)):
        d2, d3 = d[a[2] + i], d[a[3] + i]
        odd, even = d[a[1] + i] - d3, d2 - d[a[4] + i]
        v[b[0] + i] = d[a[0] + i] - one_and_half * odd - d2 - even
        v[b[1] + i] = three * (d2 + d3) - two * (odd + even)
        v[b[2] + i] = three * (d2 - d3) - two * (odd - even)
        v[b[3] + i] = two * odd + even
        v[b[4] + i] = odd - two * even
        v[b[5] + i] = d[a[5] + i] + odd - d3 - one_and_half * even


@inner
def _output_6_4(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    half, quarter, eighth, two, four, eight = T(0.5), T(0.25), T(0.125), T(2), T(4), T(8)
    for i in range(uintp(n)):
        m1, m2, m3, m4 = m[a[1] + i], m[a[2] + i], m[a[3] + i], m[a[4] + i]
        even, odd = m1 + m2, m1 - m2
        y[b[0] + i] = m[a[0] + i] + even + m3 + m4
        y[b[1] + i] = odd + half * m3 - two * m4
        y[b[2] + i] = even + quarter * m3 + four * m4
        y[b[3] + i] = odd + eighth * m3 - eight * m4 + m[a[5] + i]


@inner
def _change_4_6(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    half, quarter, eighth, two, four, eight = T(0.5), T(0.25), T(0.125), T(2), T(4), T(8)
    for i in range(uintp(n)):
        d0, d1, d2, d3 = d[a[0] + i], d[a[1] + i], d[a[2] + i], d[a[3] + i]
        even, odd = d0 + d2, d1 + d3
        z[b[0] + i] = d0
        z[b[1] + i] = even + odd
        z[b[2] + i] = even - odd
        z[b[3] + i] = d0 + half * d1 + quarter * d2 + eighth * d3
        z[b[4] + i] = d0 - two * d1 + four * d2 - eight * d3
        z[b[5] + i] = d3


@inner
def _adjoint_6(m: Any, at: int, step: int, d: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    one_and_half, two, three = T(1.5), T(2), T(3)
    for i in range(uintp(n)):
        m0, m3, m4, m5 = m[a[0] + i], m[a[3] + i], m[a[4] + i], m[a[5] + i]
        total, difference = m[a[1] + i] + m[a[2] + i], m[a[1] + i] - m[a[2] + i]
        odd = two * (m3 - total) + m4 + m5 - one_and_half * m0
        even = m3 - m0 - two * (difference + m4) - one_and_half * m5
        d[b[0] + i] = m0
        d[b[1] + i] = odd
        d[b[2] + i] = three * total + even - m0
        d[b[3] + i] = three * difference - odd - m5
        d[b[4] + i] = -even
        d[b[5] + i] = m5


# --- points 0, 1, −1, 2, −2, ½, −½, ∞ ---


@inner
def _input_8(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    two, four, five, large, small = T(2), T(4), T(5), T(5.25), T(4.25)
    for i in range(uintp(n)):
        d1, d2, d3, d4, d5, d6 = d[a[1] + i], d[a[2] + i], d[a[3] + i], d[a[4] + i], d[a[5] + i], d[a[6] + i]
        v[b[0] + i] = d[a[0] + i] - d6 + large * (d4 - d2)
        even, odd = small * d4 - d2 - d6, small * d3 - d1 - d5
        v[b[1] + i] = even + odd
        v[b[2] + i] = even - odd
        even, odd = d2 - five * d4 + four * d6, two * (d1 - five * d3 + four * d5)
        v[b[3] + i] = even + odd
        v[b[4] + i] = even - odd
        even, odd = two * (four * d2 - five * d4 + d6), four * d1 - five * d3 + d5
        v[b[5] + i] = even + odd
        v[b[6] + i] = even - odd
        v[b[7] + i] = d[a[7] + i] - d1 + large * (d3 - d5)


@inner
def _output_8_4(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    half, quarter, eighth, two, four, eight = T(0.5), T(0.25), T(0.125), T(2), T(4), T(8)
    for i in range(uintp(n)):
        m1, m2, m3, m4, m5, m6 = m[a[1] + i], m[a[2] + i], m[a[3] + i], m[a[4] + i], m[a[5] + i], m[a[6] + i]
        y[b[0] + i] = m[a[0] + i] + (m1 + m2) + (m3 + m4) + (m5 + m6)
        y[b[1] + i] = (m1 - m2) + two * (m3 - m4) + half * (m5 - m6)
        y[b[2] + i] = (m1 + m2) + four * (m3 + m4) + quarter * (m5 + m6)
        y[b[3] + i] = (m1 - m2) + eight * (m3 - m4) + eighth * (m5 - m6) + m[a[7] + i]


@inner
def _change_4_8(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    half, quarter, two, four = T(0.5), T(0.25), T(2), T(4)
    for i in range(uintp(n)):
        d0, d1, d2, d3 = d[a[0] + i], d[a[1] + i], d[a[2] + i], d[a[3] + i]
        z[b[0] + i] = d0
        z[b[1] + i] = (d0 + d2) + (d1 + d3)
        z[b[2] + i] = (d0 + d2) - (d1 + d3)
        even, odd = d0 + four * d2, two * (d1 + four * d3)
        z[b[3] + i] = even + odd
        z[b[4] + i] = even - odd
        even, odd = d0 + quarter * d2, half * (d1 + quarter * d3)
        z[b[5] + i] = even + odd
        z[b[6] + i] = even - odd
        z[b[7] + i] = d3


@inner
def _adjoint_8(m: Any, at: int, step: int, d: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    two, four, five, large, small = T(2), T(4), T(5), T(5.25), T(4.25)
    for i in range(uintp(n)):
        m0, m7 = m[a[0] + i], m[a[7] + i]
        even1, odd1 = m[a[1] + i] + m[a[2] + i], m[a[1] + i] - m[a[2] + i]
        even2, odd2 = m[a[3] + i] + m[a[4] + i], two * (m[a[3] + i] - m[a[4] + i])
        even3, odd3 = two * (m[a[5] + i] + m[a[6] + i]), m[a[5] + i] - m[a[6] + i]
        d[b[0] + i] = m0
        d[b[1] + i] = odd2 - odd1 + four * odd3 - m7
        d[b[2] + i] = even2 - even1 + four * even3 - large * m0
        d[b[3] + i] = small * odd1 - five * (odd2 + odd3) + large * m7
        d[b[4] + i] = small * even1 - five * (even2 + even3) + large * m0
        d[b[5] + i] = four * odd2 - odd1 + odd3 - large * m7
        d[b[6] + i] = four * even2 - even1 + even3 - m0
        d[b[7] + i] = m7


# --- points 0, 1, −1, 2, ∞ of every second number, and the numbers between them as they are ---


@inner
def _input_9(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    for i in range(uintp(n)):
        every = d[a[0] + i], d[a[2] + i], d[a[4] + i], d[a[6] + i], d[a[8] + i]
        v[b[0] + i], v[b[1] + i], v[b[2] + i], v[b[3] + i], v[b[4] + i] = _five_points(every, T)
        v[b[5] + i], v[b[6] + i], v[b[7] + i], v[b[8] + i] = d[a[1] + i], d[a[3] + i], d[a[5] + i], d[a[7] + i]


@inner
def _input_5(d: Any, at: int, step: int, v: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    for i in range(uintp(n)):
        d0, d1, d2, d3 = d[a[0] + i], d[a[1] + i], d[a[2] + i], d[a[3] + i]
        every = d0, d1, d2, d3, d[a[4] + i]
        v[b[0] + i], v[b[1] + i], v[b[2] + i], v[b[3] + i], v[b[4] + i] = _five_points(every, T)
        v[b[5] + i], v[b[6] + i], v[b[7] + i], v[b[8] + i] = d0, d1, d2, d3


@inner
def _output_9_4(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    for i in range(uintp(n)):
        y0, y1, y2, y3 = _four_outputs((m[a[0] + i], m[a[1] + i], m[a[2] + i], m[a[3] + i], m[a[4] + i]), T)
        y[b[0] + i], y[b[1] + i] = y0 + m[a[5] + i], y1 + m[a[6] + i]
        y[b[2] + i], y[b[3] + i] = y2 + m[a[7] + i], y3 + m[a[8] + i]


@inner
def _output_9_8(m: Any, at: int, step: int, y: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    for i in range(uintp(n)):
        every = m[a[0] + i], m[a[1] + i], m[a[2] + i], m[a[3] + i], m[a[4] + i]
        y[b[1] + i], y[b[3] + i], y[b[5] + i], y[b[7] + i] = _four_outputs(every, T)
        y[b[0] + i], y[b[2] + i], y[b[4] + i], y[b[6] + i] = m[a[5] + i], m[a[6] + i], m[a[7] + i], m[a[8] + i]


@inner
def _change_4_9(d: Any, at: int, step: int, z: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), d.dtype.type
    two, four = T(2), T(4)
    for i in range(uintp(n)):
        d0, d1, d2, d3 = d[a[0] + i], d[a[1] + i], d[a[2] + i], d[a[3] + i]
        even, odd = d0 + d2, d1 + d3
        z[b[0] + i], z[b[1] + i], z[b[2] + i] = d0, even + odd, even - odd
        z[b[3] + i], z[b[4] + i] = d0 + four * d2 + two * (d1 + four * d3), d3
        z[b[5] + i], z[b[6] + i], z[b[7] + i], z[b[8] + i] = d0, d1, d2, d3


@inner
def _adjoint_9(m: Any, at: int, step: int, d: Any, to: int, apart: int, n: int) -> None:
    a, b, T = places(at, step), places(to, apart), m.dtype.type
    two, three = T(2), T(3)
    for i in range(uintp(n)):
        m0, m1, m2, m4 = m[a[0] + i], m[a[1] + i], m[a[2] + i], m[a[4] + i]
        rise = m0 + m[a[3] + i] - two * m4
        d[b[0] + i] = two * m0
        d[b[2] + i] = two * (m1 - m2) - rise
        d[b[4] + i] = m1 + three * m2 - two * m0 - m4
        d[b[6] + i] = rise - m1 - m2
        d[b[8] + i] = m4
        d[b[1] + i], d[b[3] + i], d[b[5] + i], d[b[7] + i] = m[a[5] + i], m[a[6] + i], m[a[7] + i], m[a[8] + i]


@inner
def _five_points(d: Any, T: Any) -> Any:
    """Multiply Bᵀ of these points by five numbers."""
    two, rise = T(2), d[3] - d[1]
    return (
        two * (d[0] - d[2]) + rise,
        two * d[1] + d[2] - d[3],
        T(3) * d[2] - two * d[1] - d[3],
        rise,
        d[4] - d[2] - two * rise,
    )


@inner
def _four_outputs(m: Any, T: Any) -> Any:
    """Multiply Aᵀ of these points by five numbers."""
    even, odd = m[1] + m[2], m[1] - m[2]
    return m[0] + even + m[3], odd + T(2) * m[3], even + T(4) * m[3], odd + T(8) * m[3] + m[4]


# --- kernels of five taps at points 0, ±1, ±2, ±½, ∞: what pairs of points share is computed once ---


@inner
def kernels_5_8(w: Any, at: int, step: int, g: Any, u: Any, to: int, apart: int, n: int) -> None:
    """Multiply G (8, 5), or that of turned kernels, by runs of taps w[at + r·step …] into u[to + i·apart …]."""
    a, b = places(at, step), places(to, apart)
    first0, first4, last0, last4 = g[0, 0], g[0, 4], g[7, 0], g[7, 4]
    p0, p1, p2, p3, p4 = g[1, 0], g[1, 1], g[1, 2], g[1, 3], g[1, 4]
    q0, q1, q2, q3, q4 = g[3, 0], g[3, 1], g[3, 2], g[3, 3], g[3, 4]
    r0, r1, r2, r3, r4 = g[5, 0], g[5, 1], g[5, 2], g[5, 3], g[5, 4]
    for i in range(uintp(n)):
        w0, w1, w2, w3, w4 = w[a[0] + i], w[a[1] + i], w[a[2] + i], w[a[3] + i], w[a[4] + i]
        u[b[0] + i] = first0 * w0 + first4 * w4
        even, odd = p0 * w0 + p2 * w2 + p4 * w4, p1 * w1 + p3 * w3
        u[b[1] + i] = even + odd
        u[b[2] + i] = even - odd
        even, odd = q0 * w0 + q2 * w2 + q4 * w4, q1 * w1 + q3 * w3
        u[b[3] + i] = even + odd
        u[b[4] + i] = even - odd
        even, odd = r0 * w0 + r2 * w2 + r4 * w4, r1 * w1 + r3 * w3
        u[b[5] + i] = even + odd
        u[b[6] + i] = even - odd
        u[b[7] + i] = last0 * w0 + last4 * w4


@inner
def folded_8_5(u: Any, at: int, step: int, gt: Any, w: Any, to: int, apart: int, n: int) -> None:
    """Multiply Gᵀ (5, 8) by runs u[at + i·step …] into w[to + r·apart …]: the adjoint of `kernels_5_8`."""
    a, b = places(at, step), places(to, apart)
    first, last = gt[0, 0], gt[4, 7]
    p0, p1, p2, p3, p4 = gt[0, 1], gt[1, 1], gt[2, 1], gt[3, 1], gt[4, 1]
    q0, q1, q2, q3, q4 = gt[0, 3], gt[1, 3], gt[2, 3], gt[3, 3], gt[4, 3]
    r0, r1, r2, r3, r4 = gt[0, 5], gt[1, 5], gt[2, 5], gt[3, 5], gt[4, 5]
    for i in range(uintp(n)):
        p, q, r = u[a[1] + i] + u[a[2] + i], u[a[3] + i] + u[a[4] + i], u[a[5] + i] + u[a[6] + i]
        w[b[0] + i] = first * u[a[0] + i] + p0 * p + q0 * q + r0 * r
        w[b[2] + i] = p2 * p + q2 * q + r2 * r
        w[b[4] + i] = p4 * p + q4 * q + r4 * r + last * u[a[7] + i]
        p, q, r = u[a[1] + i] - u[a[2] + i], u[a[3] + i] - u[a[4] + i], u[a[5] + i] - u[a[6] + i]
        w[b[1] + i] = p1 * p + q1 * q + r1 * r
        w[b[3] + i] = p3 * p + q3 * q + r3 * r
