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


def uniform_by_inputs(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draw from a uniform distribution of variance 1 / (3 · fan_in): PyTorch's own start.

    It matters where normalising follows: steps turn small weights further than large ones.
    """
    limit = 1 / np.sqrt(fan_in)
    return rng.uniform(-limit, limit, shape)


def passing_through(w: Array) -> Array:
    """Return kernels w (R, S, C, K) whose first C ones, or all K, pass a channel on each: 1 at the centre, 0 elsewhere.

    This is `torch.nn.init.dirac_`: a convolution padded by half its size starts as the identity on these channels.
    """
    R, S, C, K = w.shape
    through, first = w.copy(), min(C, K)
    through[..., :first] = 0
    through[R // 2, S // 2, range(first), range(first)] = 1
    return through
