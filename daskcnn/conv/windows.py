"""What each tap of a convolution meets: for loops, and as views of the padded map for expressions over whole arrays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from daskcnn.arrays import Array
from daskcnn.conv.spec import ConvSpec


def taps(spec: ConvSpec, origin: tuple[int, int] | None = None) -> Any:
    """Return what loops are told of the taps. origin: where the first kernel begins; None: where the padding does."""
    from daskcnn.compiled.im2col import Taps

    top, left = (-spec.pad[0], -spec.pad[1]) if origin is None else origin
    return Taps(spec.R, spec.S, *spec.stride, top, left, *spec.dilation)


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
