"""One replica: a full copy of the network, its momentum, and what a round does with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.conv.planner import candidates
from daskcnn.conv.tuner import tune
from daskcnn.errors import Diverged
from daskcnn.job.network import convolutions, initial_weights, network_of, optimizer_of, rate_of, training_samples
from daskcnn.job.tables import Job
from daskcnn.nn import (
    LOSSES,
    Context,
    Sequential,
    correct,
    leaves,
    loss_and_gradients,
    predict,
)
from daskcnn.nn.auc import Collected
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.losses import softmax
from daskcnn.nn.score import Score
from daskcnn.store import Batch, BatchPlan, Dataset, Split, batches

Clock = Callable[[], float]
EVALUATION_BATCH = 500
TUNING = 10.0
"""Seconds a worker may spend on measuring convolutions before it is calibrated; next time it remembers."""
_QUIET = np.errstate(over="ignore", invalid="ignore")  # a network that diverges says so by its loss


Adjust = Callable[[Array], Array]


def _unchanged(grads: Array) -> Array:
    return grads


class Stopped(Exception):
    """The driver asked the round to end; its work is dropped."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The sums of a round of training so far: score, seconds of waiting for batches and of computing."""

    score: Score
    lr: float
    load: float
    compute: float


def evaluation_batch(model: Sequential, in_shape: Sequence[int], dtype: str, device: Device, most: int) -> int:
    """Images scored at once: fewer than `most` where a convolution of that many does not fit the device's limit."""
    size = most
    while size > 1 and not all(candidates(spec, device) for _, spec in convolutions(model, in_shape, size, dtype)):
        size //= 2
    return size


def presentations(
    job: Job, ranges: tuple[tuple[int, int], ...], samples: int, first: int, steps: int | None
) -> Iterator[BatchPlan]:
    """A round of `samples` samples: a plan for every pass over the ranges, the last one cut short.

    first: the number of the first pass. steps: minibatches of each pass; None: of the job's size.
    """
    train, augment = job.train, job.data.augment or "none"
    whole = sum(hi - lo for lo, hi in ranges)
    for number, begun in enumerate(range(0, samples, whole)):
        limit = min(whole, samples - begun)
        yield BatchPlan(ranges, train.batch_size, train.seed, first + number, limit, augment, steps=steps)


class Replica:
    """The network on one device. `clock` gives seconds; `pause(seconds)` slows a throttled worker down."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        device: Device,
        *,
        clock: Clock,
        throttle: float = 1.0,
        pause: Callable[[float], Any] | None = None,
    ) -> None:
        self.job, self.dataset, self.device = job, dataset, device
        self.model = network_of(job, dataset)
        self.layout, host = initial_weights(job, dataset)
        self.optimizer, self.rate, self.loss = optimizer_of(job), rate_of(job.train.schedule), LOSSES[job.train.loss]
        self._clock, self._throttle, self._pause = clock, throttle, pause
        self.weights = device.backend.from_host(host)
        self._params, self._state = self.layout.views(self.weights)
        self.velocity = device.xp.zeros(self.layout.parameter_size, self.layout.dtype)
        self._grads = device.xp.empty_like(self.velocity)

    def adopt(self, weights: Array) -> None:
        """Go on from these host weights (size,), which stay untouched."""
        self.weights[...] = self.device.backend.from_host(weights)

    def adopt_velocity(self, velocity: Array | None) -> None:
        """Go on with this momentum (parameter_size,), or from rest."""
        self.velocity[...] = 0 if velocity is None else self.device.backend.from_host(velocity)

    def host_weights(self) -> Array:
        """A copy of the weights on the host."""
        return np.array(self.device.backend.to_host(self.weights))

    def host_velocity(self) -> Array:
        """A copy of the momentum on the host."""
        return np.array(self.device.backend.to_host(self.velocity))

    @_QUIET
    def step(self, batch: Batch, lr: float, adjust: Adjust = _unchanged) -> tuple[float, int]:
        """One minibatch: mean loss and right answers before the step.

        `adjust` is given the gradients (parameter_size,) and returns those to descend by.
        Raises Diverged where the loss is not finite, with weights and momentum as they were.
        """
        ctx = Context(self.device, training=True, keys=batch.keys)
        loss, right, grads, new_state = loss_and_gradients(
            self.model, self._params, self._state, batch.x, batch.labels, self.loss, ctx
        )
        value = self.device.backend.scalar(loss)
        if not math.isfinite(value):
            raise Diverged(f"loss = {value}", f"training diverged at learning rate {lr:.3g}", "lower train.lr")
        self.layout.flatten(grads, {}, xp=self.device.xp, out=self._grads, device=self.device)
        parameters = self.weights[: self.layout.parameter_size]
        self.optimizer.step(parameters, adjust(self._grads), self.velocity, lr, self.device)
        for (_, kept), (_, new) in zip(leaves(self._state), leaves(new_state), strict=True):
            kept[...] = new
        return value, int(self.device.backend.scalar(right))

    def train(
        self,
        ranges: tuple[tuple[int, int], ...],
        samples: int,
        *,
        presentation: int,
        progress: tuple[float, float],
        steps: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        adjust: Adjust = _unchanged,
        after: Callable[[Trained, bool], None] = lambda so_far, last: None,
        scale: float = 1.0,
    ) -> Trained:
        """Present `samples` of the ranges, once or more often; the run's progress goes from one value to the other.

        steps: minibatches to cut that into, nearly equal; None: as many as it takes at the job's batch size.
        after: called after each step, with what the round came to so far and whether it was the last. scale: of the
        learning rate. Raises Stopped when `stop` says so before a step.
        """
        trained = Trained(Score(0.0, 0, 0), self.job.train.lr, 0.0, 0.0)
        how: dict[str, Any] = {"presentation": presentation, "progress": progress, "steps": steps}
        with closing(self.training(ranges, samples, **how, stop=stop, adjust=adjust, scale=scale)) as each:
            for trained in each:
                after(trained, trained.score.samples == samples)
        return trained

    def training(
        self,
        ranges: tuple[tuple[int, int], ...],
        samples: int,
        *,
        presentation: int,
        progress: tuple[float, float],
        steps: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        adjust: Adjust = _unchanged,
        scale: float = 1.0,
    ) -> Generator[Trained, None, None]:
        """`train` a step at a time: after each, what the round came to so far. To be closed by who does not end it."""
        score, load, compute = Score(0.0, 0, 0), 0.0, 0.0
        for plan in presentations(self.job, ranges, samples, presentation, steps):
            with batches(self.dataset, self.dataset.train, plan, self.job.model.dtype) as ready:
                for seconds, batch in self._timed(ready):
                    if stop():
                        raise Stopped
                    begun = self._clock()
                    lr = scale * self.rate_at(progress[0] + (progress[1] - progress[0]) * score.samples / samples)
                    loss, right = self.step(batch, lr, adjust)
                    n = len(batch.labels)
                    score += Score(loss * n, right, n)
                    load += seconds
                    compute += self.slowed(self._clock() - begun)
                    yield Trained(score, lr, load, compute)

    def rate_at(self, progress: float) -> float:
        """The learning rate at this part (0…1) of the run."""
        return self.rate.rate(self.job.train.lr, progress, progress * self.job.train.epochs)

    @_QUIET
    def evaluate(
        self,
        split: Split,
        lo: int,
        hi: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        weights: Array | None = None,
        whole: int | None = None,
    ) -> Score:
        """Loss and right answers on samples lo…hi of a split, of the present weights or of these on the device.

        whole: samples that are judged, if lo…hi is a part of them; the score then has what their AUC is made of.
        """
        params, state = (self._params, self._state) if weights is None else self.layout.views(weights)
        dtype = self.job.model.dtype
        size = evaluation_batch(self.model, self.dataset.shape, dtype, self.device, EVALUATION_BATCH)
        plan = BatchPlan(((lo, hi),), size, seed=0, shuffle=False)
        total, backend = Score(0.0, 0, 0), self.device.backend
        collected = None if whole is None else Collected(lo, whole)
        ctx = Context(self.device, kept={})
        with batches(self.dataset, split, plan, self.job.model.dtype) as ready:
            for batch in ready:
                if stop():
                    raise Stopped
                scores = predict(self.model, params, state, batch.x, ctx)
                labels = backend.from_host(batch.labels)
                if collected is not None:
                    collected.add(softmax(backend.to_host(scores)), batch.labels)
                loss, _ = self.loss(scores, labels, self.device.xp)
                right = int(backend.scalar(correct(scores, labels)))
                total += Score(backend.scalar(loss) * len(batch.labels), right, len(batch.labels))
        return total if collected is None else replace(total, classes=collected.done())

    def tune(self, seconds: float = TUNING) -> None:
        """Let the planner measure the network's convolutions, those that this machine does not remember.

        To be called before `calibrate`, which should see the speed of training.
        """
        shapes = convolutions(self.model, self.dataset.shape, self.batch_size, self.job.model.dtype)
        tune([spec for _, spec in shapes], self.device, clock=self._clock, seconds=seconds)

    def calibrate(self, *, steps: int = 5) -> tuple[float, dict[str, float]]:
        """Seconds a sample of a whole step, and of each convolution (forward and backward), on random values.

        The real shapes through the code path of training; a warm-up is dropped and the median kept. Weights and
        momentum are the same afterwards.
        """
        batch = self._random_batch()
        n = len(batch.labels)
        weights, velocity = self.host_weights(), self.host_velocity()
        whole = self.median_seconds(lambda: self.step(batch, 0.0), steps) / n
        convs = {
            name: self.median_seconds(self._conv_step(name, layer, shape, n), steps) / n
            for name, layer, shape in self.model.shapes(self.dataset.shape)
            if isinstance(layer, Conv)
        }
        self.adopt(weights)
        self.adopt_velocity(velocity)
        return whole, convs

    @property
    def batch_size(self) -> int:
        """Samples of a whole minibatch."""
        return min(self.job.train.batch_size, training_samples(self.job, self.dataset))

    def _random_batch(self) -> Batch:
        rng = np.random.default_rng(self.job.train.seed)
        n = self.batch_size
        H, W, C = self.dataset.shape
        x = rng.standard_normal((H, W, n, C)).astype(self.job.model.dtype)
        return Batch(x, rng.integers(0, len(self.dataset.classes), n), rng.integers(0, 2**63, n).astype(np.uint64))

    def _conv_step(self, name: str, layer: Conv, in_shape: tuple[int, ...], n: int) -> Callable[[], Any]:
        params, xp = self._params[name], self.device.xp
        H, W, C = in_shape
        x, ctx = xp.ones((H, W, n, C), self.job.model.dtype), Context(self.device, training=True)

        def step() -> None:
            y, _, residual = layer.forward(params, {}, x, ctx)
            layer.backward(params, residual, y, ctx)

        return step

    def median_seconds(self, step: Callable[[], Any], steps: int) -> float:
        """Seconds that a step takes, throttled, the first one left out."""
        return median([self.seconds_of(step) for _ in range(steps + 1)][1:])

    def seconds_of(self, step: Callable[[], Any]) -> float:
        """Seconds that it takes this once, throttled."""
        begun = self._clock()
        step()
        self.device.backend.synchronize()
        return self.slowed(self._clock() - begun)

    def _timed(self, ready: Iterator[Batch]) -> Iterator[tuple[float, Batch]]:
        """Each batch with the seconds it was waited for."""
        begun = self._clock()
        for batch in ready:
            yield self._clock() - begun, batch
            begun = self._clock()

    def slowed(self, seconds: float) -> float:
        """The same seconds times the throttle, spent."""
        if self._throttle > 1 and self._pause is not None:
            self._pause(seconds * (self._throttle - 1))
            return seconds * self._throttle
        return seconds
