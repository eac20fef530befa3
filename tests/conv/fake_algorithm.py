"""Algorithms that compute nothing but say what they cost, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from daskcnn.conv import Convolution, ConvSpec
from daskcnn.conv.spec import Direction, Work

Only: TypeAlias = Callable[..., None]
"""The fixture `only`: called with FakeAlgorithms, it lets these be all there are."""


class FakeClock:
    """Seconds that pass only when an algorithm takes them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeAlgorithm:
    """Says that a direction takes `predicted` seconds at the rates of a CPU; in truth it takes the `seconds` to come.

    `seconds`: of forward, backward, backward_filter, for one run after the other, the last for all that follow.
    """

    def __init__(
        self,
        name: str,
        predicted: float,
        *seconds: tuple[float, float, float],
        clock: FakeClock | None = None,
        workspace: int = 1,
        version: int = 1,
        strides: bool = True,
        rounding: float = 1e-7,
    ) -> None:
        self.name, self.version, self.rounding = name, version, rounding
        self.predicted, self.seconds, self.runs = predicted, list(seconds), 0
        self._clock, self._workspace, self._strides = clock or FakeClock(), workspace, strides

    def supports(self, spec: ConvSpec) -> bool:
        return self._strides or spec.stride == (1, 1)

    def workspace(self, spec: ConvSpec) -> int:
        return self._workspace

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        return (Work("all", int(self.predicted * 105e9), 0),)

    def bind(self, spec: ConvSpec, backend: Any, limit: int) -> Convolution:
        return FakeConvolution(self, spec, limit)

    def passed(self, direction: int) -> None:
        self._clock.now += self.seconds[min(self.runs, len(self.seconds)) - 1][direction]


class FakeConvolution(Convolution):
    """A fake algorithm bound to a problem."""

    def __init__(self, algorithm: FakeAlgorithm, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit)
        self._algorithm = algorithm

    def prepare(self, w: Any, device: Any, *, keep: bool = False) -> Any:
        self._algorithm.runs += 1
        return w

    def forward(self, x: Any, prepared: Any, device: Any, *, bias: Any = None) -> Any:
        assert prepared.shape == self.spec.w_shape
        self._algorithm.passed(0)
        return device.backend.from_host(np.zeros(self.spec.y_shape, self.spec.dtype))

    def backward_data(self, dy: Any, prepared: Any, device: Any) -> Any:
        raise AssertionError("a training step never asks for dx alone")

    def backward(self, x: Any, dy: Any, prepared: Any, device: Any) -> tuple[Any, Any]:
        assert (x.shape, dy.shape) == (self.spec.x_shape, self.spec.y_shape)
        self._algorithm.passed(1)
        return x, prepared

    def backward_filter(self, x: Any, dy: Any, device: Any) -> Any:
        self._algorithm.passed(2)
        return device.backend.from_host(np.zeros(self.spec.w_shape, self.spec.dtype))
