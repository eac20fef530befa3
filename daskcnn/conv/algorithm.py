"""The interface of a convolution algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from daskcnn.arrays import Array, Device
from daskcnn.conv.spec import ConvSpec

Prepared: TypeAlias = Any
"""An algorithm's own form of the kernels; only the algorithm that made it looks inside."""

LONGEST = 1024
"""Most numbers that a loop adds up one by one for a kernel gradient, before it adds up such sums.

A gradient sums all pixels of a minibatch, and the kernels of BLAS for some processors add up all they are given one by
one. Rounding grows as the root of that.
"""

Direction = Literal["forward", "backward", "backward_filter"]
"""The result: y; dx and dw together; dw alone, for a network's first layer."""


@dataclass(frozen=True, slots=True)
class Work:
    """One stage of a direction, as the planner's model counts it.

    Attributes
    ----------
    stage : name of the stage
    flops : floating-point operations
    bytes : bytes read and written
    gemm : (m, k, n) of one product, m rows of the left factor; None for a stage that only moves numbers
    """

    stage: str
    flops: int
    bytes: int
    gemm: tuple[int, int, int] | None = None


class ConvAlgorithm(Protocol):
    """One way to compute a convolution and its two adjoints.

    Arrays belong to `device.xp`: x, dx (H, W, N, C), w, dw (R, S, C / groups, K), y, dy (out_H, out_W, N, K),
    all of `spec.dtype`. Inputs are not changed. Results are new arrays and do not depend on the number of threads.
    The caller keeps BLAS single-threaded (`single_threaded_blas`).
    """

    name: str
    version: int
    """Raise it when the speed changes, so that measurements of an older version are not used."""
    rounding: float
    """The largest error in float32, as a share of the largest number of the result, for any BLAS.

    It is that of sums of 256 products of numbers around 0. Sums of four times as many round twice as much.
    """

    def supports(self, spec: ConvSpec) -> bool:
        """Return whether this algorithm can compute the problem."""
        ...

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of scratch memory on one thread with the smallest blocks: the most of all directions."""
        ...

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return what the direction costs, stage by stage, for the planner's model."""
        ...

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Bring kernels into the algorithm's form. It is valid for any batch size and all directions, until w changes.

        `keep` says that many passes will use it: the algorithm may then spend memory to save work.
        """
        ...

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y = x ⋆ w. bias (K,) is added on the way, which saves a pass over y."""
        ...

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx, the adjoint of `forward` in x."""
        ...

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw, the adjoint of `forward` in w."""
        ...

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw). Work that both adjoints share is done once."""
        ...
