"""Normalising: local response normalisation across channels, and batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.nn.blocks import over_rows
from daskcnn.nn.channels import add_to_channels, channel_sum, times_channels
from daskcnn.nn.initial import Initializer, glorot_uniform
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least


@dataclass(frozen=True)
class LRN(Layer):
    """y_c = x_c · s_c^-β with s_c = k + α/n · Σ x²  over the n = `size` channels around c.

    Krizhevsky et al. 2012, §3.3, with α divided by the size as in PyTorch, and its window: channels c - n//2 to
    c + (n-1)//2, those that exist. Works on maps and vectors, along the last axis.
    """

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "size")
        check_at_least(self, 0, "alpha")
        if self.k <= 0:
            raise ValueError(f"k={self.k}: LRN divides by a power of it, so it needs to be above 0")

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        xp, flat = ctx.device.xp, x.reshape(-1, x.shape[-1])
        y, scale = xp.empty(flat.shape, x.dtype), xp.empty(flat.shape, x.dtype)

        def normalise(rows: slice) -> None:
            before = self.size // 2
            squares = flat[rows] * flat[rows]
            squares *= self.alpha / self.size
            scale[rows] = _window_sum(xp, squares, before, self.size - 1 - before, start=self.k)
            xp.multiply(flat[rows], self._power(xp, scale[rows]), out=y[rows])

        over_rows(ctx.device, normalise, len(flat), flat[0].nbytes)
        return y.reshape(x.shape), state, (flat, scale)

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """dx_c = dy_c · s_c^-β - 2αβ/n · x_c · Σ dy·x·s^(-β-1) over the channels whose window holds c."""
        x, scale = residual
        xp, flat = ctx.device.xp, dy.reshape(x.shape)
        dx = xp.empty(x.shape, x.dtype)

        def differentiate(rows: slice) -> None:
            s = scale[rows]
            direct = self._power(xp, s)
            direct *= flat[rows]
            crossed = direct * x[rows]
            crossed /= s
            crossed *= 2 * self.alpha * self.beta / self.size
            before = self.size // 2
            crossed[...] = _window_sum(xp, crossed, self.size - 1 - before, before)
            crossed *= x[rows]
            xp.subtract(direct, crossed, out=dx[rows])

        over_rows(ctx.device, differentiate, len(x), x[0].nbytes)
        return dx.reshape(dy.shape), {}

    def _power(self, xp: Any, s: Array) -> Array:
        """s^-β, by square roots for the usual β, which is several times faster."""
        if self.beta != 0.75:
            return xp.power(s, -self.beta)
        root = xp.sqrt(s)
        fourth = xp.sqrt(root)
        root *= fourth
        return xp.divide(1, root, out=root)


def _window_sum(xp: Any, values: Array, before: int, after: int, *, start: float = 0.0) -> Array:
    """`start` and, for each c of the last axis, the sum of values[..., c-before : c+after+1] of the channels there are.

    Rows are laid side by side with zeros between them, so that each step adds two long runs of memory, whatever the
    number of channels. The result is a strided view.
    """
    C, size = values.shape[-1], before + after + 1
    padded = xp.zeros((*values.shape[:-1], C + size - 1), values.dtype)
    padded[..., before : before + C] = values
    flat, total = padded.reshape(-1), xp.empty_like(padded)
    sums = total.reshape(-1)[: flat.size - size + 1]
    xp.add(flat[: sums.size], start, out=sums)
    for shift in range(1, size):
        sums += flat[shift : shift + sums.size]
    return total[..., :C]


@dataclass(frozen=True)
class BatchNorm(Layer):
    """Each channel to mean 0 and variance 1 over a batch's samples and pixels, then scaled and shifted (learnt).

    Parameters: scale and shift (C,). State: running mean and (unbiased) variance (C,), which take `momentum` of every
    training batch's and stand for them outside training; Ioffe and Szegedy 2015, Alg. 1 and 2.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_at_least(self, 0, "momentum")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: BatchNorm divides by its root, so it needs to be above 0")

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        C = in_shape[-1]
        params = {"scale": np.ones(C), "shift": np.zeros(C)}
        return params, {"mean": np.zeros(C), "variance": np.ones(C)}, in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        xp, count = ctx.device.xp, x.size // x.shape[-1]
        mean, variance = state["mean"], state["variance"]
        if ctx.training:
            mean = channel_sum(x) * (1 / count)
        centred = add_to_channels(xp, x.copy(), -mean)
        if ctx.training:
            variance = channel_sum(centred * centred) * (1 / count)
            state = self._moved(state, mean, variance * (count / max(1, count - 1)))
        # Merging replicas' statistics out of order may leave a running variance below 0.
        deviation = 1 / xp.sqrt(xp.maximum(variance, 0) + self.epsilon)
        normal = times_channels(xp, centred, deviation)
        y = add_to_channels(xp, times_channels(xp, normal, params["scale"]), params["shift"])
        return y, state, (normal, deviation)

    def _moved(self, state: State, mean: Array, variance: Array) -> State:
        kept = 1 - self.momentum
        return {
            "mean": kept * state["mean"] + self.momentum * mean,
            "variance": kept * state["variance"] + self.momentum * variance,
        }

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """dx = scale/deviation · (dy - mean(dy) - normal · mean(dy · normal)): Alg. 1's chain rule, gathered."""
        normal, deviation = residual
        xp, share = ctx.device.xp, dy.shape[-1] / dy.size
        grads = {"scale": channel_sum(dy * normal), "shift": channel_sum(dy)}
        dx = dy - times_channels(xp, normal, grads["scale"] * share)
        dx = add_to_channels(xp, dx, grads["shift"] * -share)
        return times_channels(xp, dx, params["scale"] * deviation), grads
