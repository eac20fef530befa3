"""How far rounding may take what a network says of images, from its layers' sums (`rounding`)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Device
from daskcnn.conv import ALGORITHMS
from daskcnn.job.network import convolutions
from daskcnn.nn import leaves
from daskcnn.store import normalise
from daskcnn.training.trained_network import Classifier
from tests.rounding import limits, of_pass, of_sum


def of_probabilities(network: Classifier, images: npt.NDArray[Any]) -> float:
    """Return how far apart, as a share, a network's probabilities may be that are made in batches of different sizes.

    Each batch may be convolved by another algorithm, and BLAS may multiply it in another order. A probability is off
    by what two scores are: its own, and that of the sum of all.
    """
    facts, dtype = network.facts, network.job.model.dtype
    scores = network.on(Device(exact=True))._scores(normalise(facts, images, dtype))
    roundings = 0.0
    for _, spec in convolutions(network.model, facts.shape, len(images), dtype):
        supported = [name for name, algorithm in ALGORITHMS.items() if algorithm.supports(spec)]
        roundings += max(of_pass(name, spec, "forward", compiled=True) for name in supported)
    params, _ = network.layout.views(network.weights)
    # dense layers; it counts the sums of convolutions once more, which are few beside their transforms
    roundings += sum(of_sum(prod(array.shape[:-1])) for name, array in leaves(params) if name.endswith("w"))
    return 4 * limits(roundings, scores.size, dtype).largest * float(np.abs(scores).max())
