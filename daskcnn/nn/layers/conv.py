"""Convolution of maps, of all kernels or of a shard of them, whose channels depend on the groups they are in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from daskcnn.arrays import Array
from daskcnn.conv import BothForms, BoundPlan, ConvSpec, bound
from daskcnn.conv.spec import check_divides, same_padding
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
    map_shape,
    passing_through,
    uniform_by_inputs,
)
from daskcnn.nn.scaled import channel_sum


class KernelPart(NamedTuple):
    """Kernels of a shard that make one convolution, the channels that they see, and the number of their groups."""

    kernels: slice
    channels: slice
    groups: int


def kernel_parts(first: int, count: int, *, kernels: int, channels: int, groups: int) -> list[KernelPart]:
    """Return the parts of a shard of `count` kernels from `first` on, cut at the borders of all kernels' groups."""
    if groups == 1:
        return [KernelPart(slice(0, count), slice(0, channels), 1)]
    of_group, seen, last = kernels // groups, channels // groups, first + count
    found, at = [], first
    while at < last:
        group = at // of_group
        several = max(1, (last - at) // of_group) if at % of_group == 0 else 1
        end = min(last, (group + several) * of_group)
        channels_seen = slice(group * seen, (group + several) * seen)
        found.append(KernelPart(slice(at - first, end - first), channels_seen, several))
        at = end
    return found


@dataclass(frozen=True)
class Conv(Layer):
    """`kernels` kernels over a map padded with zeros: (H, W, N, C) to (out_H, out_W, N, K).

    Sizes, strides, padding and dilation are one number for both axes, or a pair for height and width. Parameters:
    w (R, S, C / groups, K), whose kernels are in the order of their groups, and, with `bias`, b (K,). A shard of the
    layer is the same layer with slices of the last axis of w and b: K is taken from w, not from `kernels`, and the
    context's `channel` is the first of its kernels.

    Attributes
    ----------
    pad : rows of zeros above and below the map, and columns at each side; "same" for ceil(H / stride) rows of output,
        with one more row of zeros below than above where their number is odd
    groups : equal parts of the channels and of the kernels; a kernel sees the channels of its group alone. With as many
        groups as channels the convolution is depthwise
    dilation : rows and columns from one tap of a kernel to the next
    """

    kernels: int
    size: int | tuple[int, int]
    stride: int | tuple[int, int] = 1
    pad: int | tuple[int, int] | Literal["same"] = 0
    bias: bool = True
    groups: int = 1
    dilation: int | tuple[int, int] = 1
    initial: str | None = None
    """Initial kernels: "uniform", `nn.layer.uniform_by_inputs`; "dirac", of these each group's first pass its
    channels on; "whitening", made of the images (`nn.network`)."""

    def __post_init__(self) -> None:
        if self.initial not in (None, "uniform", "dirac", "whitening"):
            raise ValueError(f"initial={self.initial!r}: use 'uniform', 'dirac' or 'whitening', or leave it out")
        check_at_least(self, 1, "kernels", "size", "stride", "groups", "dilation")
        if not isinstance(self.pad, str):
            check_at_least(self, 0, "pad")
        check_divides(self.groups, "kernels", self.kernels)

    def spec(self, x_shape: Shape, kernels: int, dtype: str = "float32", *, groups: int | None = None) -> ConvSpec:
        """Return the problem of an input (H, W, N, C) and these kernels. Raises ValueError where it does not fit."""
        return _problem(self, tuple(x_shape), kernels, dtype, self.groups if groups is None else groups)

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (out_H, out_W, K). Raises ValueError if kernels do not fit the map, or groups not its channels."""
        H, W, C = map_shape(self, in_shape)
        spec = self.spec((H, W, 1, C), self.kernels)
        return spec.out_H, spec.out_W, self.kernels

    def numbers(self, in_shape: Shape) -> int:
        """Return the size of w and b."""
        return (prod(_pair(self.size)) * (in_shape[-1] // self.groups) + self.bias) * self.kernels

    def operations(self, in_shape: Shape) -> int:
        """Return those of the direct convolution."""
        H, W, C = map_shape(self, in_shape)
        return self.spec((H, W, 1, C), self.kernels).flops

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return weights w (R, S, C / groups, K) and, with `bias`, zeros b (K,)."""
        out_shape = self.out_shape(in_shape)
        (R, S), seen = _pair(self.size), in_shape[-1] // self.groups
        fan_in, fan_out = R * S * seen, R * S * self.kernels // self.groups
        draw = uniform_by_inputs if self.initial in ("uniform", "dirac") else initial
        params = {"w": draw(rng, (R, S, seen, self.kernels), fan_in, fan_out)}
        if self.initial == "dirac":
            params["w"] = passing_through(params["w"], self.groups)
        if self.bias:
            params["b"] = np.zeros(self.kernels)
        return params, {}, out_shape

    def residual(self, params: Params, x: Array, ctx: Context) -> Residual:
        """Return what `backward` needs, without a forward pass: the two passes of a shard may be separate tasks."""
        w, C = params["w"], x.shape[-1]
        parts = kernel_parts(ctx.channel, w.shape[-1], kernels=self.kernels, channels=C, groups=self.groups)
        return x, [self._passed(part, w, x, ctx) for part in parts]

    def _passed(self, part: KernelPart, w: Array, x: Array, ctx: Context) -> _Passed:
        if len(range(x.shape[-1])[part.channels]) < x.shape[-1]:
            x = ctx.device.backend.contiguous(x[..., part.channels])
        own = w[..., part.kernels]
        spec = self.spec(x.shape, own.shape[-1], x.dtype.name, groups=part.groups)
        conv = bound(spec, ctx.device, need_dx=ctx.need_dx)
        if ctx.kept is None:
            return _Passed(part, conv, x, conv.prepare(own, ctx.device))
        key = id(w), part.kernels.start, conv.plan.algorithm, replace(conv.plan.spec, N=1)
        if key not in ctx.kept:
            # w is held too, so that its id stays its own
            ctx.kept[key] = w, conv.prepare(own, ctx.device, keep=True)
        return _Passed(part, conv, x, ctx.kept[key][1])

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return y = x ⋆ w + b; the residual holds the plan, x and the prepared kernels."""
        residual, b, ys = self.residual(params, x, ctx), params.get("b"), []
        for p in residual[1]:
            own = None if b is None else b[p.part.kernels]
            ys.append(p.conv.forward(p.x, p.prepared, ctx.device, bias=own))
        return _side_by_side(ys, ctx), state, residual

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dx (None if not needed) and the gradients of w and b."""
        x, passed = residual
        dx: Array | None = None
        dws = []
        for p in passed:
            own = dy if len(passed) == 1 else ctx.device.backend.contiguous(dy[..., p.part.kernels])
            if not ctx.need_dx:
                dws.append(p.conv.backward_filter(p.x, own, ctx.device))
                continue
            of_part, dw = p.conv.backward(p.x, own, p.prepared, ctx.device)
            dws.append(dw)
            if p.x is x:
                dx = of_part
                continue
            dx = ctx.device.xp.zeros(x.shape, x.dtype) if dx is None else dx
            dx[..., p.part.channels] += of_part  # two parts may see the same channels
        dw = _side_by_side(dws, ctx)
        return dx, {"w": dw, "b": channel_sum(dy, ctx.device)} if self.bias else {"w": dw}

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform


class _Passed(NamedTuple):
    """A part's way there: its plan, the channels that it sees, and its prepared kernels."""

    part: KernelPart
    conv: BoundPlan
    x: Array
    prepared: BothForms


@lru_cache(maxsize=1024)  # every pass asks for it, and it takes as long as a small layer's loop
def _problem(layer: Conv, x_shape: Shape, kernels: int, dtype: str, groups: int) -> ConvSpec:
    H, W, N, C = x_shape
    size, stride, dilation = _pair(layer.size), _pair(layer.stride), _pair(layer.dilation)
    if isinstance(layer.pad, str):
        pad, pad_end = same_padding((H, W), size, stride, dilation)
    else:
        pad, pad_end = _pair(layer.pad), (0, 0)
    more = {"stride": stride, "pad": pad, "dilation": dilation, "pad_end": pad_end}
    return ConvSpec(N=N, H=H, W=W, C=C, K=kernels, R=size[0], S=size[1], dtype=dtype, groups=groups, **more)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _side_by_side(parts: list[Array], ctx: Context) -> Array:
    return parts[0] if len(parts) == 1 else ctx.device.xp.concatenate(parts, axis=-1)
