"""Initial weights. Biases start at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from daskcnn.arrays import Array

Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...], int, int], Array]
"""(rng, shape, inputs of a unit, units of an input) -> float64 values on the host."""


def he_normal(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draw from a normal distribution of variance 2 / fan_in, for weights before a ReLU (He et al. 2015, eq. 10)."""
    return rng.standard_normal(shape) * np.sqrt(2 / fan_in)


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draw from a uniform distribution of variance 2 / (fan_in + fan_out), for other weights (Glorot, Bengio 2010, eq.

    16).
    """
    limit = np.sqrt(6 / (fan_in + fan_out))
    return rng.uniform(-limit, limit, shape)
