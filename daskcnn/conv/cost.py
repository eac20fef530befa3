"""Predicted time of a convolution: an algorithm's work at the rates of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from daskcnn.conv.algorithm import ConvAlgorithm, Work
from daskcnn.conv.spec import ConvSpec


class Seconds(NamedTuple):
    """Seconds of the directions of one problem; `forward` includes the transform of the kernels."""

    forward: float
    backward: float
    backward_filter: float

    def way_back(self, need_dx: bool) -> float:
        """Return the seconds of the backward pass, with or without the gradient of the input."""
        return self.backward if need_dx else self.backward_filter

    def step(self, need_dx: bool) -> float:
        """Return the seconds of a training step, forward and backward."""
        return self.forward + self.way_back(need_dx)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one thread of a device does per second, in float32.

    Attributes
    ----------
    gemm_flops : operations of a large GEMM
    bytes_per_second : bytes read or written
    half : (m, k, n); a GEMM that is this short along one axis alone has half the rate
    memory_threads : this many threads together use the memory's whole bandwidth
    stage : seconds to start a stage
    """

    gemm_flops: float
    bytes_per_second: float
    half: tuple[float, float, float]
    memory_threads: float
    stage: float


CPU = Rates(105e9, 9e9, (8, 6, 16), 4, 20e-6)
"""Fitted on one core of a two-core x86 virtual machine with AVX-512 and OpenBLAS 0.3.31.

GEMM: 137 shapes of 3 to 32,000 numbers a side, root mean square error 20 %. Memory: what the stages of im2col and
spectral that are memory-bound reach, which is less than a copy of large arrays (34e9). For 14 layers the algorithm
predicted as the best was at most 9 % slower than the best measured one. `memory_threads` is a guess.
"""
GPU = Rates(15e12, 500e9, (64, 16, 64), 1, 30e-6)
"""A graphics card of the middle range by its data sheet; never fitted."""
RATES: Mapping[str, Rates] = {"cupy": GPU}
"""Rates by the backend's name; CPU for all others."""


def predict(algorithm: ConvAlgorithm, spec: ConvSpec, rates: Rates, threads: int) -> Seconds:
    """Return the predicted seconds of the algorithm on this number of threads."""
    forward, backward, backward_filter = (
        total_seconds(algorithm.work(spec, direction), rates, threads, spec.itemsize)
        for direction in ("forward", "backward", "backward_filter")
    )
    return Seconds(forward, backward, backward_filter)


def total_seconds(works: Iterable[Work], rates: Rates, threads: int, itemsize: int) -> float:
    """Return the seconds of stages one after the other, each as long as the slower of its arithmetic and its traffic.

    This is a roofline model.
    """
    memory = rates.bytes_per_second * min(threads, rates.memory_threads)
    return sum(
        rates.stage + max(arithmetic_seconds(work, rates, itemsize) / threads, work.bytes / memory) for work in works
    )


def arithmetic_seconds(work: Work, rates: Rates, itemsize: int) -> float:
    """Return one thread's seconds at the GEMM rate, which falls with every short axis and with the numbers' size."""
    seconds = work.flops / rates.gemm_flops * itemsize / 4
    for size, half in zip(work.gemm or (), rates.half, strict=False):
        seconds *= 1 + half / size
    return seconds
