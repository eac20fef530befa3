"""Normalisation across channels and over a batch; multiplication by a constant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.compiled.program import LRN as LRN_LOOP
from daskcnn.nn.layer import Context, Initializer, Layer, Params, Shape, Start, State, check_at_least, glorot_uniform
from daskcnn.nn.local import LocalLayer, ScalingLayer
from daskcnn.nn.scaled import Scaling, moments


@dataclass(frozen=True)
class LRN(LocalLayer):
    """y_c = x_c · s_c^-β with s_c = k + α/n · Σ x²  over the n = `size` channels around c.

    Krizhevsky et al. 2012, §3.3, with α divided by the size as in PyTorch, and PyTorch's window: the existing channels
    of c - n//2 to c + (n-1)//2. Works on maps and vectors, along the last axis.
    """

    code = LRN_LOOP
    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "size")
        check_at_least(self, 0, "alpha")
        if self.k <= 0:
            raise ValueError(f"k={self.k}: LRN divides by a power of it, so it needs to be above 0")

    @property
    def reach(self) -> int | None:
        """Half of the window, `size` // 2 channels to each side."""
        return self.size // 2

    @property
    def constants(self) -> tuple[float, ...]:
        """Channels before the own one in the window, its size, α/n, k and β."""
        return self.size // 2, self.size, self.alpha / self.size, self.k, self.beta

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Any]:
        """Return y; the residual is x, s and s^-β."""
        s = self.k + self.alpha / self.size * _window_sums(x * x, self.size // 2, self.size, ctx.device.xp)
        power = s**-self.beta
        return x * power, (x, s, power)

    def array_backward(self, residual: Any, dy: Array, ctx: Context) -> Array:
        """Return dx_c = dy_c · s_c^-β - 2αβ/n · x_c · Σ dy·x·s^(-β-1) over the channels whose window holds c."""
        x, s, power = residual
        crossed = _window_sums(dy * x * power / s, (self.size - 1) // 2, self.size, ctx.device.xp)
        return dy * power - 2 * self.alpha * self.beta / self.size * x * crossed


def _window_sums(values: Array, before: int, size: int, xp: Any) -> Array:
    """Return, for each c of the last axis, the sum of channels c - before, …, c - before + size - 1 that exist."""
    C = values.shape[-1]
    before, after = min(before, C - 1), min(size - 1 - before, C - 1)  # a window may be far wider than the channels
    size = before + after + 1
    padded = xp.zeros((*values.shape[:-1], C + size - 1), values.dtype)
    padded[..., before : before + C] = values
    return sum(padded[..., i : i + C] for i in range(size))


@dataclass(frozen=True)
class BatchNorm(ScalingLayer):
    """Normalises each channel to mean 0 and variance 1 over a batch, then scales and shifts it by learnt numbers.

    Parameters: scale and shift (C,). State: running mean and (unbiased) variance (C,). A training batch contributes
    `momentum` of its own values to them; outside training they replace the batch's. Ioffe and Szegedy 2015, Alg. 1, 2.
    A `fixed` layer normalises by the running values in training too, and leaves them as they are. So does any layer for
    a batch with one number a channel, such as a vector of one sample: it has no variance. Without `scale` or `shift` it
    has no such parameter: it scales by 1, shifts by 0.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5
    fixed: bool = False
    scale: bool = True
    shift: bool = True

    reach = 0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum <= 1:
            wanted = "needs 0 <= momentum <= 1, a batch's part of the running values; Keras's 0.99 is 0.01 here"
            raise ValueError(f"momentum={self.momentum}: BatchNorm {wanted}")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: BatchNorm divides by its root, so it needs to be above 0")

    @property
    def mixes_samples(self) -> bool:
        """True unless it is fixed: in training it takes the mean of a whole minibatch."""
        return not self.fixed

    def numbers(self, in_shape: Shape) -> int:
        """Return the size of scale and shift, as far as it has them, mean and variance."""
        return (2 + self.scale + self.shift) * in_shape[-1]

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return scale 1 and shift 0, as far as it has them, running mean 0 and variance 1, each (C,)."""
        C = in_shape[-1]
        params = ({"scale": np.ones(C)} if self.scale else {}) | ({"shift": np.zeros(C)} if self.shift else {})
        return params, {"mean": np.zeros(C), "variance": np.ones(C)}, in_shape

    def scaling(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Scaling, State]:
        """Return what normalises x: the batch's moments in training unless fixed, else the running ones."""
        xp, count = ctx.device.xp, x.size // x.shape[-1]
        mean, rest, variance = state["mean"], xp.zeros_like(state["mean"]), state["variance"]
        if ctx.training and not self.fixed and count > 1:
            kept, part = 1 - self.momentum, self.momentum
            mean, rest, variance = moments(x, ctx.device)
            unbiased = variance * (count / (count - 1))
            state = {"mean": kept * state["mean"] + part * mean, "variance": kept * state["variance"] + part * unbiased}
        # Merging replicas' statistics out of order may leave a running variance below 0.
        deviation = 1 / xp.sqrt(xp.maximum(variance, 0) + self.epsilon)
        factor = params["scale"] * deviation if self.scale else deviation
        shift = params["shift"] - rest * factor if self.shift else -rest * factor
        return Scaling(mean, rest, deviation, factor, shift), state

    def gradients(
        self, params: Params, scaling: Scaling, total: Array, product: Array, count: int
    ) -> tuple[Params, Scaling]:
        """Return gradients, and what else dx is made of by Alg. 1's chain rule.

        dx = factor · (dy - mean(dy) - normal · mean(dy · normal)) with normal = (x - mean) · deviation. Where the layer
        is fixed, or the batch has one number a channel, dx = factor · dy: its moments do not depend on x.
        """
        s, dtype = scaling, scaling.mean.dtype
        moment = (product - s.rest * total) * s.deviation
        grads = {"scale": moment.astype(dtype, copy=False)} if self.scale else {}
        grads |= {"shift": total.astype(dtype, copy=False)} if self.shift else {}
        share = 0 if self.fixed or count == 1 else -1 / count
        by_x = share * s.factor * s.deviation * moment
        shift = (share * s.factor * total - by_x * s.rest).astype(dtype, copy=False)
        return grads, replace(s, factor=by_x.astype(dtype, copy=False), shift=shift)


@dataclass(frozen=True)
class Multiply(Layer):
    """y = factor · x, of maps and of vectors. Behind the last layer it tempers the scores."""

    factor: float
    reach = 0

    def __post_init__(self) -> None:
        if not abs(self.factor) > 0:
            raise ValueError(f"factor={self.factor}: Multiply needs one that is not 0, which would leave nothing of x")

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Any]:
        """Return factor · x; nothing is kept."""
        return x * self.factor, state, None

    def backward(self, params: Params, residual: Any, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return factor · dy."""
        return dy * self.factor, {}
