"""Normalisation: local response normalisation across channels, and batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn.blocks import arena, each
from daskcnn.nn.channels import over_pixels, pixel_blocks, pixel_rows, sum_rows
from daskcnn.nn.initial import Initializer, glorot_uniform
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least
from daskcnn.nn.local import BlockSteps, LocalLayer


@dataclass(frozen=True)
class LRN(LocalLayer):
    """y_c = x_c · s_c^-β with s_c = k + α/n · Σ x²  over the n = `size` channels around c.

    Krizhevsky et al. 2012, §3.3, with α divided by the size as in PyTorch, and PyTorch's window: the existing channels
    of c - n//2 to c + (n-1)//2. Works on maps and vectors, along the last axis.
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
        """Return the shape of the input."""
        return in_shape

    def window(self, in_shape: Shape) -> int | None:
        """Return 1: an output pixel depends on one pixel."""
        return 1

    @property
    def reach(self) -> int | None:
        """Half of the window, `size` // 2 channels to each side."""
        return self.size // 2

    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        """Note y; the residual is x, y, s and s^-β."""
        xp, do = block.xp, block.do
        scale, power, spare = (block.take(x.shape) for _ in range(3))
        squares = do(xp.multiply, x, x, out=power)
        _window_sums(squares, self.size // 2, self.size, scale, spare, block)
        do(xp.multiply, scale, self.alpha / self.size, out=scale)
        do(xp.add, scale, self.k, out=scale)
        self._power(scale, power, spare, block)
        y = do(xp.multiply, x, power, out=block.result(x.shape, free=spare))
        return y, (x, y, scale, power)

    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        """Note dx_c = dy_c · s_c^-β - 2αβ/n · x_c · Σ dy·y/s over the channels whose window holds c."""
        x, y, scale, power = residual
        xp, do = block.xp, block.do
        crossed = do(xp.multiply, y, dy, out=y)
        do(xp.divide, crossed, scale, out=crossed)
        direct = do(xp.multiply, dy, power, out=block.result(x.shape, free=dy))
        total = _window_sums(crossed, (self.size - 1) // 2, self.size, scale, power, block)
        do(xp.multiply, total, x, out=total)
        do(xp.multiply, total, 2 * self.alpha * self.beta / self.size, out=total)
        return do(xp.subtract, direct, total, out=direct)

    def _power(self, s: Array, out: Array, spare: Array, block: BlockSteps) -> None:
        """Write s^-β to `out`."""
        xp, do = block.xp, block.do
        if _FAST_EXP2:
            do(xp.log2, s, out=out)
            do(xp.multiply, out, -self.beta, out=out)
            do(xp.exp2, out, out=out)
        elif self.beta == 0.75:
            root = do(xp.sqrt, s, out=spare)
            do(xp.sqrt, root, out=out)
            do(xp.multiply, out, root, out=out)
            do(xp.divide, 1, out, out=out)
        else:
            do(xp.power, s, -self.beta, out=out)


def _exp2_is_vectorised() -> bool:
    """Return whether this processor has NumPy's fast log2 and exp2. They then beat two square roots, for any power.

    Elsewhere they are ten times slower than roots.
    """
    found = np.lib.introspect.opt_func_info("^exp2$", "float32")
    return any(not kind["current"].startswith("baseline") for kinds in found.values() for kind in kinds.values())


_FAST_EXP2 = _exp2_is_vectorised()


def _window_sums(values: Array, before: int, size: int, out: Array, spare: Array, block: BlockSteps) -> Array:
    """Write to `out`, for each c of the last axis, the sum of channels c - before to c - before + size - 1.

    Channels that do not exist count as 0. All three arrays are contiguous. All rows are summed as one long run of
    memory, which is wrong where a window reaches into the next row; those few channels are then summed again.
    """
    C = values.shape[-1]
    before, after = min(before, C - 1), min(size - 1 - before, C - 1)  # a window may be far wider than the channels
    size = before + after + 1
    if size <= C:
        _runs(values.reshape(-1), size, out.reshape(-1), spare.reshape(-1), block, at=before)
    columns, sums = values.reshape(-1, C).T, out.reshape(-1, C).T
    _edge(columns, sums, after, before, block)
    _edge(columns[::-1], sums[::-1], before, after, block)
    return out


def _runs(values: Array, size: int, out: Array, spare: Array, block: BlockSteps, *, at: int = 0) -> None:
    """Write out[at + i] = sum of values[i : i + size], by doubling; all three are vectors of one length."""
    half, count, add = size // 2, len(values) - size + 1, block.xp.add
    total, part = out[at : at + count], values
    if size == 1:
        block.copy(values, total)
        return
    if half > 1:
        part = spare
        _runs(values, half, part, out, block)
    block.do(add, part[:count], part[half : half + count], out=total)
    if size % 2:
        block.do(add, total, values[size - 1 :], out=total)


def _edge(columns: Array, sums: Array, reach: int, count: int, block: BlockSteps) -> None:
    """Write sums[c] = columns[0] + … + columns[c + reach], as far as they exist, for c < count."""
    total = columns[0]
    if count:
        block.copy(total, sums[0])
    for newest in range(1, reach + count):
        here = sums[max(0, newest - reach)]
        if newest < len(columns):
            total = block.do(block.xp.add, total, columns[newest], out=here)
        elif newest > reach:
            block.copy(total, here)


@dataclass(frozen=True)
class BatchNorm(Layer):
    """Normalises each channel to mean 0 and variance 1 over a batch, then scales and shifts it by learnt numbers.

    Parameters: scale and shift (C,). State: running mean and (unbiased) variance (C,). A training batch contributes
    `momentum` of its own values to them; outside training they replace the batch's. Ioffe and Szegedy 2015, Alg. 1, 2.
    A `fixed` layer normalises by the running values in training too, and leaves them as they are.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5
    fixed: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, 0, "momentum")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: BatchNorm divides by its root, so it needs to be above 0")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the input."""
        return in_shape

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone."""
        return 0

    @property
    def mixes_samples(self) -> bool:
        """In training it takes the mean of a whole minibatch, unless it is fixed."""
        return not self.fixed

    def numbers(self, in_shape: Shape) -> int:
        """Return the size of scale, shift, mean and variance."""
        return 4 * in_shape[-1]

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        """Return scale 1 and shift 0, running mean 0 and variance 1, each (C,)."""
        C = in_shape[-1]
        params = {"scale": np.ones(C), "shift": np.zeros(C)}
        return params, {"mean": np.zeros(C), "variance": np.ones(C)}, in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return the normalised x: by the batch's moments in training unless fixed, else by the running ones."""
        device, count = ctx.device, x.size // x.shape[-1]
        mean, variance = state["mean"], state["variance"]
        if ctx.training and not self.fixed:
            mean, variance = _moments(x, device)
            state = self._moved(state, mean, variance * (count / max(1, count - 1)))
        # Merging replicas' statistics out of order may leave a running variance below 0.
        deviation = 1 / device.xp.sqrt(device.xp.maximum(variance, 0) + self.epsilon)
        y = _transformed(x, mean, params["scale"] * deviation, params["shift"], device)
        return y, state, (x, mean, deviation)

    def _moved(self, state: State, mean: Array, variance: Array) -> State:
        kept = 1 - self.momentum
        return {
            "mean": kept * state["mean"] + self.momentum * mean,
            "variance": kept * state["variance"] + self.momentum * variance,
        }

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dx = scale/deviation · (dy - mean(dy) - normal · mean(dy · normal)) and gradients: Alg.

        1's chain rule. Where the layer is fixed, dx = scale/deviation · dy: its moments do not depend on x.
        """
        x, mean, deviation = residual
        share = dy.shape[-1] / dy.size
        shift, moment = _gradient_sums(x, mean, dy, ctx.device)
        grads = {"scale": moment * deviation, "shift": shift}
        slope = params["scale"] * deviation
        if self.fixed:
            none = ctx.device.xp.zeros_like(mean)
            return _transformed(dy, none, slope, none, ctx.device) if ctx.need_dx else None, grads
        by_x = -share * deviation * grads["scale"]
        return _back(x, mean, dy, slope, by_x, -share * shift, ctx.device) if ctx.need_dx else None, grads


def _moments(x: Array, device: Device) -> tuple[Array, Array]:
    """Return mean and variance of every channel: each block's own while it is in cache, then combined.

    Chan, Golub and LeVeque 1983, eq. 2.1: squares about the block's mean, and of the blocks' means about the whole's.
    """
    xp, rows, (N, C) = device.xp, pixel_rows(x), x.shape[-2:]
    blocks = pixel_blocks(device, rows)

    def moments(block: slice) -> tuple[Array, Array]:
        values = rows[block]
        mean = sum_rows(xp, values, C) * (1 / (len(values) * N))
        centred = xp.subtract(values, xp.tile(mean, N), out=arena(device, x.nbytes).take(values.shape, values.dtype))
        centred *= centred
        return mean, sum_rows(xp, centred, C)

    means, squares = zip(*each(device, moments, blocks), strict=True)
    weights = [(block.stop - block.start) / len(rows) for block in blocks]
    mean = sum(m * w for m, w in zip(means, weights, strict=True))
    within = sum(squares) * (1 / (len(rows) * N))
    return mean, within + sum((m - mean) ** 2 * w for m, w in zip(means, weights, strict=True))


def _transformed(x: Array, mean: Array, factor: Array, shift: Array, device: Device) -> Array:
    """Return (x - mean) · factor + shift, each by channel."""
    xp, rows = device.xp, pixel_rows(x)
    mean, factor, shift = (xp.tile(values, x.shape[-2]) for values in (mean, factor, shift))
    y = xp.empty(rows.shape, x.dtype)

    def transform(block: slice) -> None:
        out = xp.subtract(rows[block], mean, out=y[block])
        out *= factor
        out += shift

    over_pixels(device, transform, rows)
    return y.reshape(x.shape)


def _gradient_sums(x: Array, mean: Array, dy: Array, device: Device) -> tuple[Array, Array]:
    """Return the sums over pixels and samples of dy and of dy · (x - mean): (C,) each."""
    xp, C = device.xp, len(mean)
    rows, drows, row = pixel_rows(x), pixel_rows(dy), xp.tile(mean, x.shape[-2])

    def sums(block: slice) -> tuple[Array, Array]:
        product = xp.subtract(rows[block], row, out=arena(device, x.nbytes).take(rows[block].shape, x.dtype))
        product *= drows[block]
        return sum_rows(xp, drows[block], C), sum_rows(xp, product, C)

    totals, products = zip(*each(device, sums, pixel_blocks(device, rows)), strict=True)
    return sum(totals), sum(products)


def _back(x: Array, mean: Array, dy: Array, slope: Array, by_x: Array, shift: Array, device: Device) -> Array:
    """Return (dy + (x - mean) · by_x + shift) · slope, each by channel."""
    xp, rows, drows = device.xp, pixel_rows(x), pixel_rows(dy)
    mean, slope, by_x, shift = (xp.tile(values, x.shape[-2]) for values in (mean, slope, by_x, shift))
    dx = xp.empty(rows.shape, x.dtype)

    def transform(block: slice) -> None:
        out = xp.subtract(rows[block], mean, out=dx[block])
        out *= by_x
        out += drows[block]
        out += shift
        out *= slope

    over_pixels(device, transform, rows)
    return dx.reshape(x.shape)
