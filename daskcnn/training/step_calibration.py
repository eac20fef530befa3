"""How long a worker takes for a step of training, and for each convolution of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.conv.tuner import Begun, tune
from daskcnn.job.network import convolutions
from daskcnn.nn import Context, Shape, StepPace, inside, walk
from daskcnn.nn.layers.conv import Conv
from daskcnn.store import Batch
from daskcnn.training.replica import Replica

TUNING = 10.0
"""Seconds a worker may spend on measuring convolutions before it is calibrated; next time it remembers."""


def tune_convolutions(replica: Replica, seconds: float = TUNING, *, begun: Begun = lambda done, of, spec: None) -> None:
    """Let the planner measure the network's convolutions, those that this machine does not remember.

    `begun` is told which one comes next. It comes before `step_seconds`, which should see the speed of training.
    """
    specs = convolutions(replica.model, replica.dataset.shape, replica.batch_size, replica.job.model.dtype)
    tune([spec for _, spec in specs], replica.device, clock=replica.watch.clock, seconds=seconds, begun=begun)


def step_seconds(replica: Replica, *, steps: int = 5) -> tuple[float, dict[str, float]]:
    """Seconds a sample of a whole step, and of each convolution (forward and backward), on random values.

    The shapes are the real ones, and the code path is that of training. A warm-up is dropped and the median kept.
    Weights and the optimizer's state are the same afterwards.
    """
    batch, watch = _random_batch(replica), replica.watch
    n = len(batch.labels)
    weights, state = replica.host_weights(), replica.host_optimizer()
    whole = watch.median_seconds(lambda: replica.step(batch, StepPace(0.0)), steps) / n
    convs = {
        name: watch.median_seconds(_conv_step(replica, name, layer, shape), steps) / n
        for name, layer, shape in walk(replica.model, replica.dataset.shape)
        if isinstance(layer, Conv)
    }
    replica.adopt(weights)
    replica.adopt_optimizer(state)
    return whole, convs


def _random_batch(replica: Replica) -> Batch:
    rng, n = np.random.default_rng(replica.job.train.seed), replica.batch_size
    H, W, C = replica.dataset.shape
    x = rng.standard_normal((H, W, n, C)).astype(replica.job.model.dtype)
    return Batch(x, _labels(replica, rng, n), rng.integers(0, 2**63, n).astype(np.uint64))


def random_labels(replica: Replica, rng: np.random.Generator, n: int) -> npt.NDArray[Any]:
    """Labels of n samples such as the replica's loss takes."""
    if replica.loss.labels == "image":
        H, W, C = replica.dataset.shape
        return rng.standard_normal((H, W, n, C)).astype(replica.job.model.dtype)
    return _labels(replica, rng, n)


def _labels(replica: Replica, rng: np.random.Generator, n: int) -> npt.NDArray[np.integer]:
    """Labels of n samples such as the replica's data set has."""
    classes = len(replica.dataset.classes)
    return rng.integers(0, classes, n) if replica.dataset.labels == "classes" else rng.integers(0, 2, (n, classes))


def _conv_step(replica: Replica, name: str, layer: Conv, in_shape: Shape) -> Callable[[], None]:
    """One convolution, there and back."""
    params, xp = inside(replica.layout.views(replica.weights)[0], name), replica.device.xp
    H, W, C = in_shape
    x, ctx = xp.ones((H, W, replica.batch_size, C), replica.job.model.dtype), Context(replica.device, training=True)

    def step() -> None:
        y, _, residual = layer.forward(params, {}, x, ctx)
        layer.backward(params, residual, y, ctx)

    return step
