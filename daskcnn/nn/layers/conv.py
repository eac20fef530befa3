"""Convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from daskcnn.arrays import Array
from daskcnn.conv import ConvPlan, ConvSpec, Prepared, plan
from daskcnn.nn.channels import channel_sum
from daskcnn.nn.initial import Initializer, glorot_uniform, passing_through
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least, map_shape


@dataclass(frozen=True)
class Conv(Layer):
    """`kernels` kernels of size×size over a map padded with zeros: (H, W, N, C) to (out_H, out_W, N, K).

    Parameters: w (size, size, C, K) and, with `bias`, b (K,). A shard of the layer is the same layer with slices of
    the last axis of w and b: K is taken from w, not from `kernels`.
    """

    kernels: int
    size: int
    stride: int = 1
    pad: int = 0
    bias: bool = True
    initial: str | None = None
    """Initial kernels: "dirac", the first C pass their channel on; "whitening", made of the images (`nn.whitening`)."""

    def __post_init__(self) -> None:
        if self.initial not in (None, "dirac", "whitening"):
            raise ValueError(f"initial={self.initial!r}: use 'dirac' or 'whitening', or leave it out")
        check_at_least(self, 1, "kernels", "size", "stride")
        check_at_least(self, 0, "pad")

    def spec(self, x_shape: Shape, kernels: int, dtype: str = "float32") -> ConvSpec:
        """Return the convolution problem for an input (H, W, N, C) and this number of kernels."""
        H, W, N, C = x_shape
        size, stride, pad = (self.size,) * 2, (self.stride,) * 2, (self.pad,) * 2
        return ConvSpec(N=N, H=H, W=W, C=C, K=kernels, R=size[0], S=size[1], stride=stride, pad=pad, dtype=dtype)

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (out_H, out_W, kernels). Raises ValueError if the kernel does not fit the map."""
        H, W, C = map_shape(self, in_shape)
        spec = self.spec((H, W, 1, C), self.kernels)
        return spec.out_H, spec.out_W, self.kernels

    def numbers(self, in_shape: Shape) -> int:
        """Return the size of w and b."""
        return (self.size**2 * in_shape[-1] + self.bias) * self.kernels

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        """Return weights w (size, size, C, K) and, with `bias`, zeros b (K,)."""
        out_shape = self.out_shape(in_shape)
        taps, C = self.size**2, in_shape[-1]
        params = {"w": initial(rng, (self.size, self.size, C, self.kernels), taps * C, taps * self.kernels)}
        if self.initial == "dirac":
            params["w"] = passing_through(params["w"])
        if self.bias:
            params["b"] = np.zeros(self.kernels)
        return params, {}, out_shape

    def residual(self, params: Params, x: Array, ctx: Context) -> Residual:
        """Return what `backward` needs, without a forward pass: the two passes of a shard may be separate tasks."""
        w = params["w"]
        conv = plan(self.spec(x.shape, w.shape[-1], x.dtype.name), ctx.device, need_dx=ctx.need_dx)
        return conv, x, self._prepared(conv, w, ctx)

    def _prepared(self, conv: ConvPlan, w: Array, ctx: Context) -> Prepared:
        """Return the algorithm's form of the kernels, made once for all passes that share `ctx.kept`."""
        if ctx.kept is None:
            return conv.prepare(w, ctx.device)
        key = id(w), conv.algorithm, replace(conv.spec, N=1)
        if key not in ctx.kept:
            # w is held too, so that its id stays its own
            ctx.kept[key] = w, conv.prepare(w, ctx.device, keep=True)
        return ctx.kept[key][1]

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return y = x ⋆ w + b; the residual holds the plan, x and the prepared kernels."""
        residual = conv, _, prepared = self.residual(params, x, ctx)
        return conv.forward(x, prepared, ctx.device, bias=params.get("b")), state, residual

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dx (None if not needed) and the gradients of w and b."""
        conv, x, prepared = residual
        dx: Array | None = None
        if ctx.need_dx:
            dx, dw = conv.backward(x, dy, prepared, ctx.device)
        else:
            dw = conv.backward_filter(x, dy, ctx.device)
        return dx, {"w": dw, "b": channel_sum(dy, ctx.device)} if self.bias else {"w": dw}

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform
