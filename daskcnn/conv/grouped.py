"""Convolution in groups: each group's problem by an algorithm for one group, one group after the other.

Threads share the work of a group, so results depend on their number no more than the inner algorithm's do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from daskcnn.arrays import Array, Device
from daskcnn.conv.spec import ConvAlgorithm, ConvSpec, Direction, Prepared, Work


class Grouped:
    """`inner` for each group. Supports the groups that `inner` supports, but no single channels with one kernel each.

    `depthwise` is for those: products of matrices gain nothing there.
    """

    def __init__(self, inner: ConvAlgorithm) -> None:
        self.name, self.version, self.rounding = f"grouped-{inner.name}", inner.version, inner.rounding
        self._inner = inner

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for several groups of a kind that the inner algorithm supports."""
        return 1 < spec.groups < max(spec.C, spec.K) and self._inner.supports(spec.group)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of a group's arrays, and of the inner algorithm's scratch memory."""
        return self._inner.workspace(spec.group) + _held(spec)

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return copies of the channels, and the inner stages of every group."""
        of_group = prod(spec.group.x_shape) + prod(spec.group.y_shape)
        copies = Work("channels", 0, 2 * of_group * spec.itemsize)
        return (copies, *self._inner.work(spec.group, direction)) * spec.groups

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the inner form of each group's kernels; those that are kept share the limit."""
        inner = replace(device, workspace_limit=device.workspace_limit // spec.groups) if keep else device
        return [self._inner.prepare(spec.group, w[..., kernels], inner, keep=keep) for _, kernels in _slices(spec)]

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        y, inner = device.xp.empty(spec.y_shape, spec.dtype), _inside(spec, device)
        for (channels, kernels), own in zip(_slices(spec), prepared, strict=True):
            shift = None if bias is None else bias[kernels]
            y[..., kernels] = self._inner.forward(spec.group, _of(x, channels, device), own, inner, bias=shift)
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C)."""
        dx, inner = device.xp.empty(spec.x_shape, spec.dtype), _inside(spec, device)
        for (channels, kernels), own in zip(_slices(spec), prepared, strict=True):
            dx[..., channels] = self._inner.backward_data(spec.group, _of(dy, kernels, device), own, inner)
        return dx

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C / groups, K)."""
        dw, inner = device.xp.empty(spec.w_shape, spec.dtype), _inside(spec, device)
        for channels, kernels in _slices(spec):
            own = _of(x, channels, device), _of(dy, kernels, device)
            dw[..., kernels] = self._inner.backward_filter(spec.group, *own, inner)
        return dw

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw)."""
        inner, xp = _inside(spec, device), device.xp
        dx, dw = xp.empty(spec.x_shape, spec.dtype), xp.empty(spec.w_shape, spec.dtype)
        for (channels, kernels), own in zip(_slices(spec), prepared, strict=True):
            maps = _of(x, channels, device), _of(dy, kernels, device)
            dx[..., channels], dw[..., kernels] = self._inner.backward(spec.group, *maps, own, inner)
        return dx, dw


def _slices(spec: ConvSpec) -> Iterator[tuple[slice, slice]]:
    """Yield the channels and the kernels of each group."""
    C, K = spec.group.C, spec.group.K
    for g in range(spec.groups):
        yield slice(g * C, (g + 1) * C), slice(g * K, (g + 1) * K)


def _of(a: Array, part: slice, device: Device) -> Array:
    """Return these channels side by side: every algorithm wants them so, and some would copy them twice."""
    return device.backend.contiguous(a[..., part])


def _held(spec: ConvSpec) -> int:
    """Return the bytes of a group's maps and kernels, and of their gradients."""
    shapes = (spec.group.x_shape, spec.group.w_shape, spec.group.y_shape)
    return 2 * sum(prod(shape) for shape in shapes) * spec.itemsize


def _inside(spec: ConvSpec, device: Device) -> Device:
    """Return the device for the inner algorithm, whose limit leaves room for a group's arrays."""
    return replace(device, workspace_limit=device.workspace_limit - _held(spec))
