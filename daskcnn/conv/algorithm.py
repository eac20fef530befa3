"""What every convolution algorithm offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from daskcnn.arrays import Array, Device
from daskcnn.conv.spec import ConvSpec

Prepared: TypeAlias = Any
"""An algorithm's own form of the kernels; only the algorithm that made it looks inside."""

Direction = Literal["forward", "backward", "backward_filter"]
"""What is asked for: y; dx and dw together; dw alone, as of a network's first layer."""


@dataclass(frozen=True, slots=True)
class Work:
    """One stage of a direction: floating-point operations, bytes read and written, and the shape of its GEMMs.

    `gemm` is (m, k, n) of one product, m rows of the left factor; None for a stage that only moves numbers.
    """

    stage: str
    flops: int
    bytes: int
    gemm: tuple[int, int, int] | None = None


class ConvAlgorithm(Protocol):
    """One way to compute a convolution and its two adjoints.

    Arrays belong to `device.xp`: x, dx (H, W, N, C), w, dw (R, S, C, K), y, dy (out_H, out_W, N, K), all of
    `spec.dtype`. Inputs are not changed; results are new arrays and do not depend on the number of threads.
    The caller keeps BLAS single-threaded (`single_threaded_blas`).
    """

    name: str
    version: int
    """Raised when its speed changes, so that measurements of an older one are not believed."""

    def supports(self, spec: ConvSpec) -> bool:
        """Whether this algorithm can compute the problem at all."""
        ...

    def workspace(self, spec: ConvSpec) -> int:
        """Bytes of scratch memory on one thread at the smallest blocking, the largest of the three directions."""
        ...

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """What the direction costs, stage by stage, for the planner's model."""
        ...

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Bring kernels into the algorithm's form; good for any batch size and both uses, until w changes.

        `keep` says that many passes will use it: then it may take memory to spare them work.
        """
        ...

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """y = x ⋆ w, and bias (K,) added on the way, which spares a pass over y."""
        ...

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """dx, the adjoint of `forward` in x."""
        ...

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """dw, the adjoint of `forward` in w."""
        ...

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """(dx, dw): both adjoints, what they have in common done once."""
        ...
