"""Which algorithm computes a convolution, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from daskcnn.arrays import Array, Device
from daskcnn.conv.algorithm import ConvAlgorithm, Prepared
from daskcnn.conv.im2col import Im2col
from daskcnn.conv.spec import ConvSpec

ALGORITHMS: dict[str, ConvAlgorithm] = {"im2col": Im2col()}
"""Every algorithm by name, the one to be preferred first."""


@dataclass(frozen=True)
class ConvPlan:
    """A decision: the problem, the algorithm's name, bytes of scratch memory it needs and may use, the reason."""

    spec: ConvSpec
    algorithm: str
    workspace: int
    workspace_limit: int
    reason: str

    def explain(self) -> str:
        """The decision in one line."""
        s = self.spec
        need, limit = (f"{n / 2**20:.1f} MiB" for n in (self.workspace, self.workspace_limit))
        return (
            f"{s.R}×{s.S} {s.C}→{s.K} on {s.H}×{s.W}, batch {s.N}, stride {s.stride}, pad {s.pad}, {s.dtype}: "
            f"{self.algorithm} ({self.reason}); {s.flops / 1e9:.3g} GFLOP a direction, workspace {need} to {limit}"
        )

    def prepare(self, w: Array, device: Device) -> Prepared:
        """The algorithm's form of the kernels w (R, S, C, K)."""
        _expect("w", w, self.spec.w_shape)
        return ALGORITHMS[self.algorithm].prepare(self.spec, w, self._limited(device))

    def forward(self, x: Array, prepared: Prepared, device: Device) -> Array:
        """y (out_H, out_W, N, K) from x (H, W, N, C)."""
        _expect("x", x, self.spec.x_shape)
        return ALGORITHMS[self.algorithm].forward(self.spec, x, prepared, self._limited(device))

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        """dx (H, W, N, C) from dy (out_H, out_W, N, K)."""
        _expect("dy", dy, self.spec.y_shape)
        return ALGORITHMS[self.algorithm].backward_data(self.spec, dy, prepared, self._limited(device))

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """dw (R, S, C, K) from x (H, W, N, C) and dy (out_H, out_W, N, K)."""
        _expect("x", x, self.spec.x_shape)
        _expect("dy", dy, self.spec.y_shape)
        return ALGORITHMS[self.algorithm].backward_filter(self.spec, x, dy, self._limited(device))

    def _limited(self, device: Device) -> Device:
        return replace(device, workspace_limit=self.workspace_limit)


def plan(spec: ConvSpec, device: Device, *, workspace_limit: int | None = None) -> ConvPlan:
    """Choose the first algorithm that supports the problem and fits the limit (bytes; the device's by default).

    Raises ValueError where none does.
    """
    return _plan(spec, device.workspace_limit if workspace_limit is None else workspace_limit)


@lru_cache(maxsize=1024)
def _plan(spec: ConvSpec, limit: int) -> ConvPlan:
    needs = {name: a.workspace(spec) for name, a in ALGORITHMS.items() if a.supports(spec)}
    for name, need in needs.items():
        if need <= limit:
            return ConvPlan(spec, name, need, limit, f"the first of {', '.join(needs)} to fit")
    name, need = min(needs.items(), key=lambda item: item[1])
    raise ValueError(
        f"workspace_limit={limit} bytes: {name}, the least demanding algorithm, needs {need} for {spec}; "
        f"raise the limit or use a smaller batch"
    )


def _expect(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: the plan is for {shape}; plan again for these shapes")
