"""Convolution in groups: each group's problem by an algorithm for one group, one group after the other.

Threads share the work of a group, so results depend on their number no more than the inner algorithm's do.
"""

from __future__ import annotations

from math import prod

from daskcnn.arrays import Array, Backend, Device
from daskcnn.conv.spec import ConvAlgorithm, Convolution, ConvSpec, Direction, Prepared, Work


class Grouped:
    """`inner` for each group, but not for single channels with one kernel each, which `depthwise` does faster."""

    def __init__(self, inner: ConvAlgorithm) -> None:
        self.name, self.version, self.rounding = f"grouped-{inner.name}", inner.version, inner.rounding
        self._inner = inner

    def supports(self, spec: ConvSpec) -> bool:
        return 1 < spec.groups < max(spec.C, spec.K) and self._inner.supports(spec.group)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of a group's arrays, and of the inner algorithm's scratch memory."""
        return self._inner.workspace(spec.group) + _held(spec)

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        copied = 2 * (prod(spec.group.x_shape) + prod(spec.group.y_shape)) * spec.itemsize
        return (Work("channels", 0, copied), *self._inner.work(spec.group, direction)) * spec.groups

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        inner = self._inner.bind(spec.group, backend, limit - _held(spec))
        return _Groups(spec, limit, inner, self._inner.bind(spec.group, backend, limit // spec.groups))


class _Groups(Convolution):
    """One group after the other. The limit of `inner` leaves room for a group's arrays; `kept` has a share of it."""

    def __init__(self, spec: ConvSpec, limit: int, inner: Convolution, kept: Convolution) -> None:
        super().__init__(spec, limit)
        C, K = spec.group.C, spec.group.K
        self._inner, self._kept = inner, kept
        self._slices = [(slice(g * C, (g + 1) * C), slice(g * K, (g + 1) * K)) for g in range(spec.groups)]

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        return [self._kept.prepare(w[..., kernels], device, keep=keep) for _, kernels in self._slices]

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        y = device.xp.empty(self.spec.y_shape, self.spec.dtype)
        shifts = [None if bias is None else bias[kernels] for _, kernels in self._slices]
        for (channels, kernels), own, shift in zip(self._slices, prepared, shifts, strict=True):
            y[..., kernels] = self._inner.forward(_of(x, channels, device), own, device, bias=shift)
        return y

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        dx = device.xp.empty(self.spec.x_shape, self.spec.dtype)
        for (channels, kernels), own in zip(self._slices, prepared, strict=True):
            dx[..., channels] = self._inner.backward_data(_of(dy, kernels, device), own, device)
        return dx

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        dw = device.xp.empty(self.spec.w_shape, self.spec.dtype)
        for channels, kernels in self._slices:
            maps = _of(x, channels, device), _of(dy, kernels, device)
            dw[..., kernels] = self._inner.backward_filter(*maps, device)
        return dw

    def backward(self, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        spec, xp = self.spec, device.xp
        dx, dw = xp.empty(spec.x_shape, spec.dtype), xp.empty(spec.w_shape, spec.dtype)
        for (channels, kernels), own in zip(self._slices, prepared, strict=True):
            maps = _of(x, channels, device), _of(dy, kernels, device)
            dx[..., channels], dw[..., kernels] = self._inner.backward(*maps, own, device)
        return dx, dw


def _of(a: Array, part: slice, device: Device) -> Array:
    """Return these channels side by side: every algorithm wants them so, and some would copy them twice."""
    return device.backend.contiguous(a[..., part])


def _held(spec: ConvSpec) -> int:
    """Return the bytes of a group's maps and kernels, and of their gradients."""
    return 2 * spec.group.moved
