"""A replica: a full copy of the network, its optimizer's state, and its training and evaluation on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.conv.planner import candidates
from daskcnn.errors import Diverged
from daskcnn.job import network
from daskcnn.job.tables import Job
from daskcnn.nn import (
    Context,
    OptimizerState,
    Params,
    Sequential,
    State,
    StepPace,
    correct,
    first_not_finite,
    labels_for,
    leaves,
    loss_and_gradients,
)
from daskcnn.nn.losses import Targets
from daskcnn.nn.metrics import measured
from daskcnn.nn.network import Views, most_held, predict_views
from daskcnn.nn.optimizers import Gradients
from daskcnn.nn.score import Collected, Score
from daskcnn.partition.step_shares import StepSizes
from daskcnn.ps.gradient_noise import GradientNoise
from daskcnn.store import Batch, BatchPlan, Dataset, Split, batches
from daskcnn.training.gradient_parts import GrowingGradients, TellPart, TellStep, parts_of
from daskcnn.training.judging import JudgedPart
from daskcnn.training.stopwatch import Clock, Stopwatch
from daskcnn.training.weighting import Weighting, weighting_of, weights_of

EVALUATION_BATCH = 500
"""Images scored at once, where they fit."""
EVALUATION_BYTES = 1 << 28
"""Bytes of maps that scoring several images at once may hold."""
ALONE = 1 << 18
"""Bytes of a parameter from which its gradient is not copied."""
_QUIET = np.errstate(over="ignore", invalid="ignore")  # a network that diverges says so by its loss

Adjust = Callable[[Array], Array]


def _partners(batch: Batch) -> Batch:
    """Return the batch with labels and weights of the samples that it is mixed with."""
    assert batch.mixture is not None
    of = batch.mixture.partners
    return replace(batch, labels=batch.labels[of], weights=None if batch.weights is None else batch.weights[of])


class Stopped(Exception):
    """The driver asked the round to end; its work is dropped."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The sums of a round of training so far: score, seconds of waiting for batches and of computing.

    lr, progress: the pace of the last step.
    """

    score: Score
    lr: float
    load: float
    compute: float
    progress: float = 0.0


class _TrainingPass(NamedTuple):
    """The mean loss of a pass, its right answers, and the gradients and state that it leads to."""

    loss: float
    right: int | None
    gradients: Params
    state: State


def evaluation_batch(model: Sequential, in_shape: Sequence[int], dtype: str, device: Device, most: int) -> int:
    """Return the images to score at once: `most`, or fewer if they exceed a limit, of their maps or of the device."""
    maps = np.dtype(dtype).itemsize * (math.prod(in_shape) + most_held(model, tuple(in_shape)))
    return workspace_batch(model, in_shape, dtype, device, max(1, min(most, EVALUATION_BYTES // maps)))


def workspace_batch(model: Sequential, in_shape: Sequence[int], dtype: str, device: Device, most: int) -> int:
    """Return the images of a pass: `most`, or fewer if a convolution of them exceeds the device's limit."""
    size = most
    while size > 1 and not all(
        candidates(spec, device) for _, spec in network.convolutions(model, in_shape, size, dtype)
    ):
        size //= 2
    return size


def presentations(
    job: Job, ranges: tuple[tuple[int, int], ...], samples: int, first: int, steps: int | None
) -> Iterator[BatchPlan]:
    """Yield a plan for every pass over the ranges in a round of `samples` samples; the last one is cut short.

    first: the number of the first pass. steps: minibatches of each pass; None: of the job's size.
    """
    train, augment = job.train, job.data.augment or "none"
    whole = sum(hi - lo for lo, hi in ranges)
    for number, begun in enumerate(range(0, samples, whole)):
        limit = min(whole, samples - begun)
        yield BatchPlan(ranges, train.batch_size, train.seed, first + number, limit, augment, steps=steps)


AGAIN = (1 << 20) + 1
"""Passes over a worker's samples in one round are numbered so far apart: no later round repeats their order."""


def shared_presentations(
    job: Job, ranges: tuple[tuple[int, int], ...], sizes: StepSizes, first: int
) -> Iterator[BatchPlan]:
    """Yield plans for a round of minibatches whose sizes may change on the way.

    One that does not fit the rest of a pass over the ranges begins another, in another order. first: the number of the
    first pass.
    """
    whole, made = sum(hi - lo for lo, hi in ranges), 0

    def edges(samples: int) -> Iterator[tuple[int, int]]:
        nonlocal made
        lo = 0
        while made < sizes.steps and (hi := lo + sizes.of(made + 1)) <= samples:
            made += 1
            yield lo, hi
            lo = hi

    train, number = job.train, first
    while made < sizes.steps:
        times = -(-sizes.of(made + 1) // whole)  # more than once for a minibatch of more samples than there are
        augment = job.data.augment or "none"
        yield BatchPlan(ranges * times, train.batch_size, train.seed, number, augment=augment, edges=edges)
        number += AGAIN


class Replica:
    """The network on one device. clock, throttle, pause, own: of its `Stopwatch`.

    frozen: the places in `weights` of the layers that are not trained.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        device: Device,
        *,
        clock: Clock,
        throttle: float = 1.0,
        pause: Callable[[float], Any] | None = None,
        own: Clock | None = None,
    ) -> None:
        device.warm(job.model.dtype)
        self.job, self.dataset, self.device = job, dataset, device
        self.model = network.network_of(job, dataset)
        self.layout, host = network.initial_weights(job, dataset)
        self.descent, self.rate = network.descent_of(job, self.model.frozen), network.rate_of(job.train.schedule)
        self.loss, self.training_loss = network.loss_of(job, dataset), network.training_loss_of(job, dataset)
        self.watch = Stopwatch(clock, device.backend.synchronize, throttle, pause, own)
        self.weights = device.backend.from_host(host)
        self._params, self._state = self.layout.views(self.weights)
        self.optimizer_state = self._at_rest()
        self.gradients = device.xp.empty(self.layout.size, self.layout.dtype)
        """Of the last step that was not descended by (`training`), and the change of what layers keep behind them."""
        self.gradient_parts = parts_of(self.model, self.layout) if device.backend.compiled else ()
        self._grads = self.gradients[: self.layout.parameter_size]
        self.frozen = self.layout.spans(self.model.frozen)
        self._alone = {path for path, at in self.layout.places() if (at.stop - at.start) * host.itemsize >= ALONE}
        self._trained = self.descent.spans(self.layout, self._alone)

    @property
    def batch_size(self) -> int:
        """Samples of a whole minibatch."""
        return min(self.job.train.batch_size, network.training_samples(self.job, self.dataset))

    @cached_property
    def weighting(self) -> Weighting | None:
        """The weighting of training samples; None: all count alike. The first access may read all labels."""
        return weighting_of(self.job, self.dataset)

    def sample_weights(self, batch: Batch) -> Array | None:
        """Return the weight of each sample of a training batch by its own label, (N,) on the host; None: all 1.

        A mixed image that is its own label counts for both that it is mixed of.
        """
        shares = None if batch.mixture is None else batch.mixture.shares
        if shares is None or self.loss.labels != "image":
            return weights_of(self.weighting, batch, shares, self.job.model.dtype)
        if self.weighting is None:
            return None
        own, others = self.weighting.of(batch, shares.dtype), self.weighting.of(_partners(batch), shares.dtype)
        return (shares * own + (1 - shares) * others).astype(self.job.model.dtype)

    def partners(self, batch: Batch) -> Targets | None:
        """Return the labels that a training batch's samples are mixed with, and their weights.

        None: they are mixed with none, or the mixed image is the label.
        """
        if batch.mixture is None or self.loss.labels == "image":
            return None
        others = _partners(batch)
        return others.labels, weights_of(self.weighting, others, 1 - batch.mixture.shares, self.job.model.dtype)

    def adopt(self, weights: Array) -> None:
        """Go on from these host weights (size,), which stay untouched."""
        self.weights[...] = self.device.backend.from_host(weights)

    def adopt_optimizer(self, state: OptimizerState | None) -> None:
        """Go on with this state of the optimizer, on the host, which stays untouched; None: begin with the weights."""
        new = self._at_rest() if state is None else state.moved(self.device.backend.from_host)
        self.optimizer_state.vectors[...] = new.vectors
        self.optimizer_state = OptimizerState(self.optimizer_state.vectors, new.count)

    def restart_optimizer(self) -> None:
        """Restart the optimizer for weights that are not those of the last step."""
        self.optimizer_state = self.descent.optimizer.restarted(self.optimizer_state, self._parameters)

    @property
    def _parameters(self) -> Array:
        return self.weights[: self.layout.parameter_size]

    def _at_rest(self) -> OptimizerState:
        return self.descent.optimizer.init(self._parameters, self.device.xp)

    def host_weights(self) -> Array:
        """Return a copy of the weights on the host."""
        return np.array(self.device.backend.to_host(self.weights))

    def host_optimizer(self) -> OptimizerState:
        """Return a copy of the optimizer's state on the host."""
        return self.optimizer_state.moved(lambda vectors: np.array(self.device.backend.to_host(vectors)))

    @_QUIET
    def step(
        self,
        batch: Batch,
        pace: StepPace,
        adjust: Adjust | None = None,
        *,
        descends: bool = True,
        tell: TellPart | None = None,
        noise: GradientNoise | None = None,
    ) -> tuple[float, int | None]:
        """Train on one minibatch. Returns its mean weighted loss and its right answers, if any, before the step.

        adjust: changes the gradients (parameter_size,) before the descent. descends: step the weights by the gradients;
        if not, they stay, and `gradients` has what others may step them by. tell: is called with the place of each of
        `gradient_parts` once it is there, while the rest is computed. noise: takes in the gradients of both halves,
        whose mean the step goes by. Raises Diverged if the loss is not finite, with weights and the optimizer's state
        as they were.
        """
        growing = tell and GrowingGradients(self.gradient_parts, self.layout, self.gradients, self.weights, tell)
        passed = self._pass_over(batch, slice(None), growing) if noise is None else self._by_halves(batch, noise)
        value = passed.loss
        if not math.isfinite(value):
            ctx = Context(self.device, training=True, keys=batch.keys)
            found = first_not_finite(self.model, self._params, self._state, batch.x, ctx) or "loss"
            reason = f"training diverged at learning rate {pace.lr:.3g}, first in the {found}"
            raise Diverged(f"loss = {value}", reason, "lower train.lr")
        grads, new_state = passed.gradients, passed.state
        if not descends:
            there = growing.written if growing else ()
            where: dict[str, Any] = {"xp": self.device.xp, "out": self.gradients, "device": self.device}
            self.layout.flatten(grads, new_state, **where, but=there)
            self.gradients[len(self._grads) :] -= self.weights[len(self._grads) :]
            return value, passed.right
        self._descend(grads, pace, adjust)
        for (_, kept), (_, new) in zip(leaves(self._state), leaves(new_state), strict=True):
            kept[...] = new
        return value, passed.right

    def _pass_over(self, batch: Batch, own: slice, growing: GrowingGradients | None = None) -> _TrainingPass:
        """Pass once over these samples of a minibatch, forth and back."""
        whole = own == slice(None)
        x, keys = (batch.x, batch.keys) if whole else (np.ascontiguousarray(batch.x[:, :, own]), batch.keys[own])
        weights, partners = self.sample_weights(batch), self.partners(batch)
        if partners is not None:
            partners = partners[0][own], None if partners[1] is None else partners[1][own]
        loss, right, grads, state = loss_and_gradients(
            self.model,
            self._params,
            self._state,
            x,
            batch.labels[own],
            self.training_loss,
            Context(self.device, training=True, keys=keys),
            None if weights is None else weights[own],
            partners,
            growing,
        )
        scalar = self.device.backend.scalar
        return _TrainingPass(float(scalar(loss)), None if right is None else int(scalar(right)), grads, state)

    def _by_halves(self, batch: Batch, noise: GradientNoise) -> _TrainingPass:
        """Pass over each half of a minibatch, and take the mean, as that of two workers. Their gradients are noted."""
        n, where = len(batch.labels), {"xp": self.device.xp, "device": self.device}
        sizes = n // 2, n - n // 2
        halves = [self._pass_over(batch, slice(0, sizes[0])), self._pass_over(batch, slice(sizes[0], n))]
        vectors = [self.layout.flatten(half.gradients, half.state, **where) for half in halves]
        mean = sizes[0] / n * vectors[0] + sizes[1] / n * vectors[1]
        gradients = [vector[: len(self._grads)] for vector in (*vectors, mean)]
        noise.met(sizes, [float(self.device.backend.scalar(self.device.xp.vdot(each, each))) for each in gradients])
        loss = sum(size / n * half.loss for size, half in zip(sizes, halves, strict=True))
        right = None if halves[0].right is None else sum(half.right or 0 for half in halves)
        return _TrainingPass(loss, right, *self.layout.views(mean))

    def _descend(self, grads: Params, pace: StepPace, adjust: Adjust | None) -> None:
        """Step the weights by these gradients. Large ones are copied only where all are needed as one vector."""
        where: dict[str, Any] = {"xp": self.device.xp, "out": self._grads, "device": self.device}
        if adjust is not None or self.descent.clip is not None:
            vector = self.layout.flatten(grads, {}, **where)
            given: Array | Gradients = vector if adjust is None else adjust(vector)
        else:
            vector = self.layout.flatten(grads, {}, **where, but=self._alone)
            own = zip(self.layout.places(), leaves(grads), strict=True)
            given = Gradients(vector, {at.start: g.reshape(-1) for (path, at), (_, g) in own if path in self._alone})
        state = self.optimizer_state
        self.optimizer_state = self.descent.step(self.weights, given, state, self._trained, pace, self.device)

    def train(
        self,
        ranges: tuple[tuple[int, int], ...],
        samples: int,
        *,
        after: Callable[[Trained, bool], None] = lambda so_far, last: None,
        **how: Any,
    ) -> Trained:
        """Make all steps of `training`, which takes `how`, and return the last sums.

        after: called after each step with the sums so far, and True if it was the last.
        """
        trained = Trained(Score(0.0, 0, 0), self.job.train.lr, 0.0, 0.0)
        with closing(self.training(ranges, samples, **how)) as each:
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
        adjust: Adjust | None = None,
        scale: float = 1.0,
        descends: bool = True,
        sizes: StepSizes | None = None,
        tell: TellStep | None = None,
        halved: int = 0,
        noise: GradientNoise | None = None,
    ) -> Generator[Trained, None, None]:
        """Present `samples` of the ranges, once or more often. Yields the round's sums after each step.

        progress: of the run, from one value to the other. steps: minibatches to cut each pass into, nearly equal; None:
        as many as it takes at the job's batch size. scale: of the learning rate. descends: as for `step`. sizes: of the
        minibatches, where they may change on the way; the learning rate goes on as planned. tell: as for `step`, with
        the samples of the step and its pace besides. noise: as for `step`, at one step in `halved`. Raises Stopped when
        `stop` says so before a step. Call `close()` if you stop iterating early.
        """
        score, load, compute, made = Score(0.0, 0, 0), 0.0, 0.0, 0
        passes = (
            presentations(self.job, ranges, samples, presentation, steps)
            if sizes is None
            else shared_presentations(self.job, ranges, sizes, presentation)
        )
        for plan in passes:
            with batches(self.dataset, self.dataset.train, plan, self.job.model.dtype) as ready:
                for seconds, batch in self.watch.waited(ready):
                    if stop():
                        raise Stopped
                    begun = self.watch.begin()
                    done = score.samples if sizes is None else sizes.planned(made)
                    pace = self.pace_at(progress[0] + (progress[1] - progress[0]) * done / samples, scale)
                    told = tell and partial(tell, len(batch.labels), pace)
                    taken = noise if halved and made % halved == 0 and len(batch.labels) > 1 else None
                    loss, right = self.step(batch, pace, adjust, descends=descends, tell=told, noise=taken)
                    score += Score.of_batch(loss, right, batch.labels)
                    made += 1
                    load += seconds
                    compute += self.watch.since(begun)
                    yield Trained(score, pace.lr, load, compute, pace.progress)

    def pace_at(self, progress: float, scale: float = 1.0) -> StepPace:
        """Return the pace at this part (0…1) of the run. scale: of the learning rate."""
        return network.pace_at(self.job.train, self.rate, progress, scale)

    @_QUIET
    def evaluate(
        self,
        split: Split,
        lo: int,
        hi: int,
        stop: Callable[[], bool] = lambda: False,
        *,
        draw: int | None = None,
        weights: Array | None = None,
        whole: int | None = None,
        look: Callable[[Array, Array], None] | None = None,
        views: Views = "none",
    ) -> Score:
        """Return the score on samples lo…hi of a split, of the present weights or of these on the device.

        All samples count alike. draw: as in `JudgedPart`. whole: samples that are judged, if lo…hi is a part of them;
        the score then has the numbers behind their AUC and the job's metrics, if the loss is for labels. look: called
        with the scores and labels of each batch, on the host. views: of each image, whose scores are averaged.
        """
        params, state = (self._params, self._state) if weights is None else self.layout.views(weights)
        dtype = self.job.model.dtype
        size = evaluation_batch(self.model, self.dataset.shape, dtype, self.device, EVALUATION_BATCH)
        plan = BatchPlan(((lo, hi),), size, seed=0, shuffle=False)
        first, seed = network.training_samples(self.job, self.dataset), self.job.train.seed
        order = None if draw is None else JudgedPart(lo, hi, draw).indices(first, len(split), seed)
        total, backend = Score(0.0, 0, 0), self.device.backend
        collected = None if whole is None or self.loss.labels == "image" else Collected(lo, whole)
        ctx = Context(self.device, kept={})
        with batches(self.dataset, split, plan, dtype, order) as ready:
            for batch in ready:
                if stop():
                    raise Stopped
                scores = predict_views(self.model, params, state, batch.x, ctx, views)
                labels = backend.from_host(labels_for(self.loss, batch.x, batch.labels))
                metrics = {}
                if collected is not None:
                    probabilities = self.loss.probabilities(backend.to_host(scores))
                    collected.add(probabilities, batch.labels)
                    metrics = measured(self.job.train.metrics or (), probabilities, batch.labels)
                if look is not None:
                    look(backend.to_host(scores), batch.labels)
                loss, _ = self.loss(scores, labels, self.device.xp)
                right = correct(scores, labels, self.device.xp)
                right = None if right is None else int(backend.scalar(right))
                total += replace(Score.of_batch(backend.scalar(loss), right, batch.labels), metrics=metrics)
        return total if collected is None else replace(total, classes=collected.done())
