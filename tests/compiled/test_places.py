"""Numbers do not depend on where arrays lie in memory: a run repeats itself to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from daskcnn import compiled

CLASSES, APART = 10, 60


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_loss_and_its_gradient_are_the_same_whichever_array_lies_first(
    samples: int, smoothing: float, dtype: str
) -> None:
    """Also where the arrays touch each other."""
    rng, memory, size = np.random.default_rng(0), np.zeros(1000, dtype), samples * CLASSES
    labels, weights = rng.integers(0, CLASSES, samples), np.empty(0, dtype)
    for _ in range(20):
        given, found = 2 * rng.normal(size=(samples, CLASSES)), set()
        for distance in [*range(-size - APART, -size + 1), *range(size, size + APART)]:
            scores = memory[300 : 300 + size].reshape(samples, CLASSES)
            gradient = memory[300 + distance : 300 + distance + size].reshape(samples, CLASSES)
            scores[...] = given
            loss = compiled.activations.cross_entropy(scores, labels, weights, smoothing, gradient)
            found.add((float(loss), gradient.tobytes()))
        assert len(found) == 1
