"""Loops over plain arrays, compiled by Numba: what a processor spends a training step in.

Every loop is a function of arrays and numbers that reads like its formula. It holds no lock of the interpreter, so the
threads of a worker run side by side; it writes to the arrays it is given and allocates nothing of their size. A loop
that may run on several threads takes the range it works on, and its numbers do not depend on how the range was cut.
Products of matrices are BLAS's, through `numpy.dot`.

A module here is imported when it is first used, as `compiled.winograd.correlate`: Numba takes a process half a second
and 140 MB, and planners need none of it. `Device.warm` imports and compiles all of them ahead.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskcnn.compiled import (
        activations,
        batchnorm,
        chain,
        depthwise,
        direct,
        given,
        im2col,
        loop,
        lrn,
        minibatch,
        minimal,
        pool,
        pooled,
        products,
        program,
        runs,
        scaled,
        signals,
        sizes,
        spectral,
        updates,
        warm,
        winograd,
        winograd_gradients,
    )

__all__ = [
    "activations",
    "batchnorm",
    "chain",
    "depthwise",
    "direct",
    "given",
    "im2col",
    "loop",
    "lrn",
    "minibatch",
    "minimal",
    "pool",
    "pooled",
    "products",
    "program",
    "runs",
    "scaled",
    "signals",
    "sizes",
    "spectral",
    "updates",
    "warm",
    "winograd",
    "winograd_gradients",
]


def __getattr__(name: str) -> ModuleType:
    """Import a module when it is first used."""
    if name in __all__:
        return import_module(f"daskcnn.compiled.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
