"""Fully connected layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn.layer import (
    Context,
    Initializer,
    Layer,
    Params,
    Residual,
    Shape,
    Start,
    State,
    check_at_least,
    glorot_uniform,
    uniform_by_inputs,
)
from daskcnn.nn.layers.reshape import as_map, as_vectors

_PIECE = 512
"""Inputs in a piece of a long vector: enough for BLAS's full speed."""
_WIDE = 16
"""Outputs for each channel from which a map is copied into vectors: adding up the pixels' products costs more."""
_PARTS, _PART_BYTES = 8, 1 << 18
"""Parts that threads share if a product stays in cache, and fewest bytes of one: less takes as long as to share it."""


@dataclass(frozen=True)
class Dense(Layer):
    """Connects every input to every output: a map (H, W, N, C) or a vector (N, F) to (N, units).

    Parameters: w (H, W, C, units) or (F, units), and b (units,) unless `bias` is off. A map takes one GEMM per pixel,
    added up, without a copy into vectors, unless there are many units for each channel. Reshaped to (H·W·C, units), w
    is that of the same layer behind `Flatten`.

    tied: name of an earlier dense layer of the same `Sequential`, whose w it uses, transposed (`nn.sequential`).
    """

    units: int
    bias: bool = True
    tied: str | None = None
    initial: str | None = None
    """Initial weights: "uniform", `nn.layer.uniform_by_inputs`."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "units")
        if self.initial not in (None, "uniform"):
            raise ValueError(f"initial={self.initial!r}: use 'uniform', or leave it out")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (units,)."""
        return (self.units,)

    def numbers(self, in_shape: Shape) -> int:
        """Return the size of w, if it is its own, and b."""
        return ((prod(in_shape) if self.tied is None else 0) + self.bias) * self.units

    @property
    def tied_to(self) -> str | None:
        """The owner of w, if it is another layer's."""
        return self.tied

    def operations(self, in_shape: Shape) -> int:
        """Return those of one product."""
        return 2 * prod(in_shape) * self.units

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return weights w (*in_shape, units), unless they are another layer's, and, with `bias`, zeros b (units,)."""
        params: Params = {}
        if self.tied is None:
            draw = uniform_by_inputs if self.initial == "uniform" else initial
            params["w"] = draw(rng, (*in_shape, self.units), prod(in_shape), self.units)
        if self.bias:
            params["b"] = np.zeros(self.units)
        return params, {}, (self.units,)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return y = x·w + b, the products of blocks of pixels added up in a fixed order; the residual is x."""
        pixels, weights, blocks = _blocks(x, params["w"], ctx.device)
        matmul = ctx.device.xp.matmul
        parts = ctx.device.pool.map(lambda b: matmul(pixels[b], weights[b]).sum(axis=0), blocks)
        y = sum(parts[1:], start=parts[0])
        if self.bias:
            y += params["b"]
        return y, state, x

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dx = dy·wᵀ (None if not needed), dw = xᵀ·dy and db, the sum of dy over the samples."""
        x, w, xp = residual, params["w"], ctx.device.xp
        pixels, weights, blocks = _blocks(x, w, ctx.device)
        dw, dx = xp.empty(weights.shape, w.dtype), xp.empty(pixels.shape, x.dtype) if ctx.need_dx else None

        def back(b: slice) -> None:
            xp.matmul(pixels[b].swapaxes(1, 2), dy, out=dw[b])
            if dx is not None:
                xp.matmul(dy, weights[b].swapaxes(1, 2), out=dx[b])

        ctx.device.pool.map(back, blocks)
        grads = {"w": dw.reshape(w.shape)} | ({"b": dy.sum(axis=0)} if self.bias else {})
        return None if dx is None else _joined(dx, x.shape), grads

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform


@dataclass(frozen=True)
class Bias(Layer):
    """Adds b (units,) to every output of a `Dense` layer whose own `bias` is off: (N, units) to (N, units)."""

    def numbers(self, in_shape: Shape) -> int:
        """Return the size of b."""
        return prod(in_shape)

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return zeros b of the input's shape."""
        return {"b": np.zeros(in_shape)}, {}, in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return x + b."""
        return x + params["b"], state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dx = dy, and db, the sum of dy over the samples."""
        return dy, {"b": dy.sum(axis=0)}


def _blocks(x: Array, w: Array, device: Device) -> tuple[Array, Array, list[slice]]:
    """Return views of x as (P, N, F) and of w as (P, F, units), and slices of range(P).

    P counts the pixels of a map, or the pieces of long vectors, for threads to share. The slices are the same for any
    number of threads.
    """
    if x.ndim == 4 and w.shape[-1] >= _WIDE * x.shape[-1]:
        x, w = as_vectors(x), w.reshape(-1, w.shape[-1])
    pixels, weights, limit = x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-2:]), device.backend.block_bytes
    if x.ndim == 2 and w.nbytes > limit:
        pieces = next(p for p in range(max(1, len(w) // _PIECE), 0, -1) if len(w) % p == 0)
        pixels = x.reshape(len(x), pieces, -1).swapaxes(0, 1)
        weights = w.reshape(pieces, -1, w.shape[-1])
    count, size = len(weights), w.nbytes + x.nbytes
    few = min(_PARTS, size // _PART_BYTES) if device.backend.compiled else 1
    parts = max(1, min(count, max(few, size // limit)))
    return pixels, weights, [slice(a, b) for a, b in pairwise(count * i // parts for i in range(parts + 1))]


def _joined(dx: Array, x_shape: Shape) -> Array:
    """Return dx (P, N, F) in the shape of x."""
    if len(x_shape) == 4 and dx.shape[-1] == x_shape[-1]:
        return dx.reshape(x_shape)
    vectors = dx.swapaxes(0, 1).reshape(dx.shape[1], -1)
    return as_map(vectors, x_shape) if len(x_shape) == 4 else vectors
