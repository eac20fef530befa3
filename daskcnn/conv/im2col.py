"""What each tap of a convolution meets: for loops, and as views of the padded map for expressions over whole arrays.

Convolution as matrix products over columns: on processors block by block, elsewhere all at once or tap by tap.

backward_data is a correlation too: of dy with the kernels flipped, one for each phase of the stride (Dumoulin &
Visin, A guide to convolution arithmetic for deep learning, section 4, without the zeros they insert). Taps that meet
the same phase are stride / gcd(stride, dilation) apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import Any

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.conv.spec import ConvSpec, Direction, Prepared, Work


def taps(spec: ConvSpec, origin: tuple[int, int] | None = None) -> Any:
    """Return what loops are told of the taps. origin: where the first kernel begins; None: where the padding does."""
    top, left = (-spec.pad[0], -spec.pad[1]) if origin is None else origin
    return compiled.im2col.Taps(spec.R, spec.S, *spec.stride, top, left, *spec.dilation)


def padded(spec: ConvSpec, x: Array | None, xp: Any) -> Array:
    """Return the map x (H, W, N, C) with its padding; zeros alone without x."""
    (top, left), (H, W, N, C) = spec.pad, spec.x_shape
    whole = xp.zeros((*spec.padded, N, C), spec.dtype)
    if x is not None:
        whole[top : top + H, left : left + W] = x
    return whole


def unpadded(spec: ConvSpec, whole: Array, xp: Any) -> Array:
    """Invert `padded`: return the map (H, W, N, C) alone."""
    top, left = spec.pad
    return xp.ascontiguousarray(whole[top : top + spec.H, left : left + spec.W])


def windows(spec: ConvSpec, whole: Array) -> Iterator[tuple[int, int, Array]]:
    """Yield each tap (r, s) and what it meets: (out_H, out_W, N, C), views of the padded map."""
    for r, s in product(range(spec.R), range(spec.S)):
        axes = zip((r, s), spec.dilation, spec.y_shape, spec.stride, strict=False)
        firsts = [(tap * apart, size, stride) for tap, apart, size, stride in axes]
        rows, cols = (slice(first, first + (size - 1) * stride + 1, stride) for first, size, stride in firsts)
        yield r, s, whole[rows, cols]


def columns(spec: ConvSpec, source: Array, origin: tuple[int, int], xp: Any) -> Array:
    """Return (out_H·out_W·N, R·S·C): what the kernels meet at each output, the first one at `origin` of the source.

    Outside of the source there are zeros.
    """
    whole = _extended(spec, source, origin, xp)
    rows, cols, samples, channels = whole.strides
    (down, right), (apart, beside) = spec.stride, spec.dilation
    shape = (*spec.y_shape[:3], spec.R, spec.S, spec.C)
    strides = (rows * down, cols * right, samples, rows * apart, cols * beside, channels)
    return xp.lib.stride_tricks.as_strided(whole, shape, strides).reshape(-1, spec.R * spec.S * spec.C)


def _extended(spec: ConvSpec, source: Array, origin: tuple[int, int], xp: Any) -> Array:
    """Return the part of the source that kernels meet, and zeros where they reach over it."""
    axes = zip(spec.y_shape, spec.stride, (spec.R, spec.S), spec.dilation, strict=False)
    met = [(outputs - 1) * stride + (taps - 1) * apart + 1 for outputs, stride, taps, apart in axes]
    whole, sizes = xp.zeros((*met, spec.N, spec.C), spec.dtype), source.shape[:2]
    firsts = [max(0, -first) for first in origin]
    ends = [max(lo, min(size, n - first)) for lo, size, n, first in zip(firsts, met, sizes, origin, strict=True)]
    inside = tuple(map(slice, firsts, ends))
    whole[inside] = source[tuple(slice(lo + o, hi + o) for lo, hi, o in zip(firsts, ends, origin, strict=True))]
    return whole


FEWEST_PIXELS, PIXELS = 32, 256
"""Pixels of the smallest block, below which products do not pay, and of the largest, whose columns stay in cache."""
STRIPS = 8
"""Strips of a map, for threads to share and for as many partial sums of a kernel gradient."""
STRIP_BYTES = 4 << 20
"""Bytes of a strip's planes beyond which it is halved, to stay near the cache."""
THREAD_FLOPS = 2_500_000
"""Fewest operations of a thread: about 25 µs, the time that calling one takes."""

Origin = tuple[int, int]


class Im2col:
    """Products over columns. Supports every problem of one group."""

    name = "im2col"
    version = 6
    rounding = 2e-6

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for one group."""
        return spec.groups == 1

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of the smallest strip, of its columns and of the kernels, as they are or flipped."""
        forward = _kernel_bytes(spec) + _least(spec)
        return ROUNDING + max([forward, *(_phase_bytes(p, spec) + _least(p.spec) for p in _phases(spec))])

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return columns and products of the direction."""
        size, pixels = spec.R * spec.S * spec.C, spec.out_H * spec.out_W * spec.N
        columns = Work("columns", 0, pixels * size * spec.itemsize // 4)  # written and read in cache
        forward = (columns, Work("products", spec.flops, _moved(spec), (pixels, size, spec.K)))
        dw = (columns, Work("products", spec.flops, _moved(spec), (size, pixels, spec.K)))
        return {"forward": forward, "backward": (*self.data_work(spec), *dw), "backward_filter": dw}[direction]

    def data_work(self, spec: ConvSpec) -> tuple[Work, ...]:
        """Return columns and products of the gradient of the data."""
        pixels = spec.H * spec.W * spec.N
        # none where no tap meets the map
        size = max((p.spec.R * p.spec.S * p.spec.C for p in _phases(spec)), default=0)
        columns = Work("columns", 0, pixels * size * spec.itemsize // 4)
        return columns, Work("products", spec.flops, _moved(spec), (pixels, max(1, size), spec.C))

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the kernels themselves, contiguous."""
        return device.backend.contiguous(w)

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        if not device.backend.compiled:
            forward = _forward_at_once if _fits(spec, device) else _forward_by_taps
            return forward(spec, x, prepared, bias, device.xp)
        held = 0 if bias is None else _kernel_bytes(spec)
        strips, y = _begin(spec, device, held=held), device.xp.empty(spec.y_shape, spec.dtype)
        w = prepared.reshape(-1, spec.K)
        if bias is not None:
            given, w = w, _take("kernels", (_columns(spec), spec.K), spec, device)
            w[:-1], w[-1] = given, bias
        _correlate(spec, x, None, w, y, strips, device)
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        if not device.backend.compiled:
            at_once = all(_fits(phase.spec, device) for phase in _phases(spec))
            backward_data = _backward_data_at_once if at_once else _backward_data_by_taps
            return backward_data(spec, dy, prepared, device.xp)
        whole, phases = spec.stride == (1, 1), _phases(spec)
        dx = device.xp.empty(spec.x_shape, spec.dtype)
        if len(phases) < prod(spec.stride):
            dx[...] = 0  # a phase without taps stays zero
        for phase in phases:
            held = _phase_bytes(phase, spec)
            strips = _begin(phase.spec, device, held=held)
            out = dx if whole else _take("phase", phase.spec.y_shape, spec, device)
            kernels = _take("kernels", phase.spec.w_shape, spec, device)
            kernels[...] = prepared[phase.taps][::-1, ::-1].transpose(0, 1, 3, 2)
            into = None if whole else dx[phase.pixels]
            _correlate(phase.spec, dy, phase.origin, kernels.reshape(-1, spec.C), out, strips, device, into)
        return dx

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K): columnsᵀ·dy summed over blocks, in an order that does not depend on the threads."""
        if not device.backend.compiled:
            backward_filter = _backward_filter_at_once if _fits(spec, device) else _backward_filter_by_taps
            return backward_filter(spec, x, dy, device.xp)
        kernel_bytes, room = _kernel_bytes(spec), device.workspace_limit - ROUNDING - _least(spec)
        parts = max(1, min(STRIPS, spec.out_H, room // kernel_bytes))
        strips = _begin(spec, device, held=parts * kernel_bytes)
        sums = _take("sums", (parts, spec.R * spec.S * spec.C, spec.K), spec, device)
        x, dy, step = device.backend.contiguous(x), device.backend.contiguous(dy), taps(spec)

        def add_up(first: int, last: int, scratch: Array) -> None:
            compiled.im2col.correlate_filter(
                x, dy, sums, step, strips.rows, strips.pixels, compiled.products.small_products(), first, last, scratch
            )

        _share(add_up, parts, strips, spec, device)
        return sums.sum(axis=0).reshape(spec.w_shape)

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw), computed one after the other: they share no work."""
        return self.backward_data(spec, dy, prepared, device), self.backward_filter(spec, x, dy, device)


# --- on processors: strips of rows, whose columns are expanded in blocks of pixels ---


@dataclass(frozen=True, slots=True)
class _Strips:
    """Output rows of a strip, output pixels of a block, threads, and the numbers of scratch memory of each."""

    rows: int
    pixels: int
    threads: int
    numbers: int


def _begin(spec: ConvSpec, device: Device, *, held: int) -> _Strips:
    """Begin a pass that holds `held` bytes, and on each thread a strip with its columns.

    Rows and pixels depend on the limit, not on the number of threads: fewer threads run where memory is short.
    """
    room, size = (device.workspace_limit - ROUNDING - held) // spec.itemsize, _columns(spec)
    rows = -(-spec.out_H // STRIPS)
    while rows > 1 and _plane_numbers(spec, rows) > min(room - size * FEWEST_PIXELS, STRIP_BYTES // spec.itemsize):
        rows = -(-rows // 2)
    planes = _plane_numbers(spec, rows)
    pixels = max(FEWEST_PIXELS, min(PIXELS, (room - planes) // size))
    numbers = planes + size * pixels
    threads = max(1, min(device.pool.threads, room // numbers, spec.flops // THREAD_FLOPS))
    device.workspace.recycle(held + threads * numbers * spec.itemsize + ROUNDING)
    return _Strips(rows, pixels, threads, numbers)


def _correlate(
    spec: ConvSpec,
    source: Array,
    origin: Origin | None,
    w: Array,
    out: Array,
    strips: _Strips,
    device: Device,
    into: Array | None = None,
) -> None:
    """Write out (out_H, out_W, N, K) = source ⋆ w, whose first kernel begins at `origin`; w (R·S·C [+ 1], K).

    Each thread copies what it made of it to `into`, if given, whose pixels may lie apart.
    """
    source, step = device.backend.contiguous(source), taps(spec, origin)

    def correlate(first: int, last: int, scratch: Array) -> None:
        compiled.im2col.correlate(
            source, w, out, step, strips.rows, strips.pixels, compiled.products.small_products(), first, last, scratch
        )
        if into is not None:
            rows = slice(first * strips.rows, last * strips.rows)
            into[rows] = out[rows]

    _share(correlate, -(-spec.out_H // strips.rows), strips, spec, device)


def _share(
    work: Callable[[int, int, Array], None], count: int, strips: _Strips, spec: ConvSpec, device: Device
) -> None:
    """Call `work(first, last, scratch)` on the threads, each with a share of `count` strips or parts."""
    threads = min(strips.threads, count)
    scratch = [_take(f"strip{i}", (strips.numbers,), spec, device) for i in range(threads)]

    def own(i: int) -> None:
        work(count * i // threads, count * (i + 1) // threads, scratch[i])

    device.pool.map(own, range(threads))


def _columns(spec: ConvSpec) -> int:
    """Return the rows of the columns' matrix, with that of the bias."""
    return spec.R * spec.S * spec.C + 1


def _plane_numbers(spec: ConvSpec, rows: int) -> int:
    """Return the numbers of the planes below this many output rows."""
    height, right = (rows - 1) * spec.stride[0] + spec.extent[0], spec.stride[1]
    return height * right * (spec.out_W + (spec.extent[1] - 1) // right) * spec.N * spec.C


def _least(spec: ConvSpec) -> int:
    """Return the bytes of the smallest strip and its columns."""
    return (_plane_numbers(spec, 1) + _columns(spec) * FEWEST_PIXELS) * spec.itemsize


def _take(name: str, shape: tuple[int, ...], spec: ConvSpec, device: Device) -> Array:
    return device.workspace.take(f"im2col.{name}", shape, spec.dtype)


# --- elsewhere, one product of all columns: on a GPU each operation of an expression takes as long to start as a small
# one runs ---


def _fits(spec: ConvSpec, device: Device) -> bool:
    """Return True if the columns of all pixels fit the device's limit."""
    return prod(spec.y_shape[:3]) * spec.R * spec.S * spec.C * spec.itemsize <= device.workspace_limit


def _forward_at_once(spec: ConvSpec, x: Array, w: Array, bias: Array | None, xp: Any) -> Array:
    top, left = spec.pad
    y = xp.matmul(columns(spec, x, (-top, -left), xp), w.reshape(-1, spec.K))
    if bias is not None:
        y += bias
    return y.reshape(spec.y_shape)


def _backward_data_at_once(spec: ConvSpec, dy: Array, w: Array, xp: Any) -> Array:
    dx = xp.zeros(spec.x_shape, spec.dtype)
    for phase in _phases(spec):
        kernels = w[phase.taps][::-1, ::-1].transpose(0, 1, 3, 2).reshape(-1, spec.C)
        part = xp.matmul(columns(phase.spec, dy, phase.origin, xp), kernels)
        dx[phase.pixels] = part.reshape(phase.spec.y_shape)
    return dx


def _backward_filter_at_once(spec: ConvSpec, x: Array, dy: Array, xp: Any) -> Array:
    top, left = spec.pad
    dw = xp.matmul(columns(spec, x, (-top, -left), xp).T, dy.reshape(-1, spec.K))
    return dw.reshape(spec.w_shape)


# --- where they do not fit: a product of the whole map for every tap ---


def _forward_by_taps(spec: ConvSpec, x: Array, w: Array, bias: Array | None, xp: Any) -> Array:
    y = xp.zeros((prod(spec.y_shape[:3]), spec.K), spec.dtype)
    if bias is not None:
        y += bias
    for r, s, window in windows(spec, padded(spec, x, xp)):
        y += xp.matmul(window.reshape(-1, spec.C), w[r, s])
    return y.reshape(spec.y_shape)


def _backward_data_by_taps(spec: ConvSpec, dy: Array, w: Array, xp: Any) -> Array:
    dpadded, change = padded(spec, None, xp), dy.reshape(-1, spec.K)
    for r, s, window in windows(spec, dpadded):
        window += xp.matmul(change, w[r, s].T).reshape(window.shape)
    return unpadded(spec, dpadded, xp)


def _backward_filter_by_taps(spec: ConvSpec, x: Array, dy: Array, xp: Any) -> Array:
    dw, change = xp.empty(spec.w_shape, spec.dtype), dy.reshape(-1, spec.K)
    for r, s, window in windows(spec, padded(spec, x, xp)):
        dw[r, s] = xp.matmul(window.reshape(-1, spec.C).T, change)
    return dw


# --- the data's gradient: a phase for every remainder of (h, w) by the stride ---


@dataclass(frozen=True, slots=True)
class _Phase:
    """The pixels of dx that the same taps reach, as a correlation of dy, without stride, from `origin` on."""

    spec: ConvSpec
    origin: Origin
    pixels: tuple[slice, slice]
    taps: tuple[slice, slice]


@lru_cache(maxsize=1024)
def _phases(spec: ConvSpec) -> tuple[_Phase, ...]:
    """Return a phase for every remainder of (h, w) by the stride that has pixels and taps."""
    rows = _phases_along(spec.H, spec.R, spec.stride[0], spec.pad[0], spec.dilation[0])
    cols = _phases_along(spec.W, spec.S, spec.stride[1], spec.pad[1], spec.dilation[1])
    return tuple(_phase(spec, row, col) for row, col in product(rows, cols))


Along = tuple[int, slice, slice, int]
"""A phase along one axis: origin in dy, pixels, taps, and rows of dy from one of these taps to the next."""


def _phases_along(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[Along]:
    """Return the phases along one axis.

    Pixel h + pad = stride·(h' + shift) + dilation·r meets tap r + step·j at dy[h' + shift − apart·j], where step and
    apart are stride and dilation over their greatest common divisor.
    """
    found, common = [], gcd(stride, dilation)
    step, apart = stride // common, dilation // common
    for first in range(min(stride, size)):
        for r in range(min(step, kernel)):
            shift, beside = divmod(first + pad - dilation * r, stride)
            if not beside:
                count = len(range(r, kernel, step))
                pixels = slice(first, size, stride)
                found.append((shift - apart * (count - 1), pixels, slice(r, kernel, step), apart))
    return found


def _phase(spec: ConvSpec, row: Along, col: Along) -> _Phase:
    (h, pixel_rows, r, down), (w, pixel_cols, s, right) = row, col
    R, S = len(range(spec.R)[r]), len(range(spec.S)[s])
    H = len(range(spec.H)[pixel_rows]) + (R - 1) * down
    W = len(range(spec.W)[pixel_cols]) + (S - 1) * right
    inner = ConvSpec(spec.N, H, W, C=spec.K, K=spec.C, R=R, S=S, dtype=spec.dtype, dilation=(down, right))
    return _Phase(inner, (h, w), (pixel_rows, pixel_cols), (r, s))


def _moved(spec: ConvSpec) -> int:
    """Return the bytes of the map, the kernels and the output."""
    shapes = (spec.x_shape, spec.w_shape, spec.y_shape)
    return sum(prod(shape) for shape in shapes) * spec.itemsize


def _kernel_bytes(spec: ConvSpec) -> int:
    """Return the bytes of the kernels, with a bias."""
    return _columns(spec) * spec.K * spec.itemsize


def _phase_bytes(phase: _Phase, spec: ConvSpec) -> int:
    """Return the scratch bytes of the flipped kernels, and of the pixels where they are not the whole of dx."""
    return _kernel_bytes(phase.spec) + (prod(phase.spec.y_shape) * spec.itemsize if spec.stride != (1, 1) else 0)
