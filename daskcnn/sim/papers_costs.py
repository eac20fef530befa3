"""The papers' own formulas for time: layer-sharded steps (Marques et al.), and the rules of Hegde & Usmani, §5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskcnn import events
from daskcnn.conv import ConvSpec
from daskcnn.partition.proportions import kernel_shards
from daskcnn.sharded.stages import eq2_elements
from daskcnn.sim.cluster import Worker

EPSILON = 1e-2
"""The default error to reach: it only sets the number of iterations in the formulas, ln(1/ε)."""


@dataclass(frozen=True)
class Constants:
    """A job on a cluster, in the paper's letters.

    k: workers; p: numbers in the vector; D: samples; q: threads of a worker; epsilon: ε; theta: θ, updates in the run;
    T: seconds between two pushes of a worker; tau: τ, seconds from one push to the next that the server can take
    (receiving one while it merges another); add: seconds to add two numbers; B: bytes a second of a link; L: seconds a
    message; itemsize, sample_bytes: bytes of a number, of a sample.
    """

    k: int
    p: int
    D: int
    q: int
    theta: int
    T: float
    tau: float
    add: float
    B: float
    L: float
    itemsize: float
    sample_bytes: int
    epsilon: float = EPSILON

    @property
    def saturation(self) -> float | None:
        """Number of workers from which on Downpour waits for the server: T/τ; None if τ is not known."""
        return self.T / self.tau if self.tau else None


@dataclass(frozen=True)
class Cost:
    """One line of the table. unit: "s" or "B"."""

    rule: str
    what: str
    formula: str
    value: float
    unit: str


def costs(c: Constants) -> list[Cost]:
    """Return all of the paper's costs for these constants."""
    vector, turns, iterations = c.p * c.itemsize, math.log2(c.k), math.log(1 / c.epsilon)
    meeting, meeting_time = 2 * vector * (c.k - 1), 2 * turns * (c.L + vector / c.B)
    summing, descent = turns * c.p * c.add, iterations * c.T
    return [
        Cost("parallel-sgd", "computation", "(p/q)·log k + p·log 1/ε", summing / c.q + descent, "s"),
        Cost("parallel-sgd", "shuffle", "N·k", c.D * c.sample_bytes, "B"),
        Cost("parallel-sgd", "communication", "p·k", meeting, "B"),
        Cost("parallel-sgd", "communication time", "p·log k", meeting_time, "s"),
        Cost("admm", "computation", "p·log k·log 1/ε + p·log 1/ε", iterations * summing + descent, "s"),
        Cost("admm", "communication", "k·p·log 1/ε", iterations * meeting, "B"),
        Cost("admm", "communication time", "p·log 1/ε·log k", iterations * meeting_time, "s"),
        Cost("downpour", "one update", "T + τ", c.T + c.tau, "s"),
        Cost("downpour", "communication", "θ·p", c.theta * vector, "B"),
        Cost("downpour", "all updates", "θ·max((T + τ)/k, τ)", c.theta * max((c.T + c.tau) / c.k, c.tau), "s"),
    ]


PAPER_ITEMSIZE = 8
"""Bytes of the doubles that the paper sends."""


def ceiling(serial: float) -> float:
    """Return the largest speed-up of any number of workers if this part of the work is serial (Amdahl)."""
    return math.inf if serial == 0 else 1 / serial


@dataclass(frozen=True)
class ShardedStep:
    """Seconds of a step and its parts.

    kernels, taken: kernels of each layer and worker, and their seconds there. up, down: bytes that each worker sends
    and gets. busy: seconds that each computes.
    """

    comm: float
    conv: float
    comp: float
    kernels: tuple[tuple[int, ...], ...]
    taken: tuple[tuple[float, ...], ...]
    up: tuple[int, ...]
    down: tuple[int, ...]
    busy: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.comm + self.conv + self.comp

    def slowed(self, home: int, times: Sequence[float]) -> float:
        """Return the seconds of the step if the computation of each worker takes this multiple of its time."""
        conv = sum(max(s * t for s, t in zip(own, times, strict=True)) for own in self.taken)
        return self.comm + conv + self.comp * times[home]


@dataclass(frozen=True)
class Sharding:
    """A network's convolutions at the job's batch size, over these workers; the fastest of them is home.

    bandwidth: bytes a second of home's link each way, besides those of the workers' own. overhead: seconds of handing
    out a step's tasks, part of its communication. itemsize: bytes a number.
    """

    specs: tuple[ConvSpec, ...]
    names: tuple[str, ...]
    workers: tuple[Worker, ...]
    bandwidth: float = math.inf
    overhead: float = 0.0
    itemsize: int = 4

    @property
    def batch(self) -> int:
        """Samples of a minibatch."""
        return self.specs[0].N

    @property
    def home(self) -> int:
        """The worker whose step is shortest."""
        return min(range(len(self.workers)), key=lambda i: self.workers[i].step(self.batch))

    def conv_seconds(self, worker: Worker) -> list[float]:
        """Return a worker's seconds for each whole layer of a step: measured, or its part of a step by operations."""
        if worker.conv_seconds:
            return [self.batch * worker.conv_seconds[name] for name in self.names]
        passes = [2, *[3] * (len(self.specs) - 1)]  # the first layer's input needs no gradient
        work = [n * spec.flops for n, spec in zip(passes, self.specs, strict=True)]
        return [worker.step(self.batch) * worker.conv_share * w / sum(work) for w in work]

    def rest_seconds(self, worker: Worker) -> float:
        """Return the seconds a step of the work that only home does: layers that are not divided, the loss.

        Without a measurement they are all of a worker's step besides its convolutions.
        """
        if worker.conv_seconds and worker.rest_seconds is not None:
            return self.batch * worker.rest_seconds
        return max(0.0, worker.step(self.batch) - sum(self.conv_seconds(worker)))

    @property
    def alone(self) -> float:
        """Seconds a step takes home by itself."""
        home = self.workers[self.home]
        return sum(self.conv_seconds(home)) + self.rest_seconds(home)

    @property
    def serial(self) -> float:
        """The part of the home's step that other workers cannot take over."""
        return self.rest_seconds(self.workers[self.home]) / self.alone

    def step(self) -> ShardedStep:
        """Return a step of all workers."""
        per_worker = [self.conv_seconds(worker) for worker in self.workers]
        kernels, taken = [], []
        for spec, seconds in zip(self.specs, zip(*per_worker, strict=True), strict=True):
            shares = kernel_shards(spec.K, seconds)
            taken.append(tuple(s * n / spec.K for s, n in zip(seconds, shares, strict=True)))
            kernels.append(tuple(shares))
        rest = self.rest_seconds(self.workers[self.home])
        comm, up, down = self._communication(kernels)
        conv, busy = sum(map(max, taken)), self._busy(taken, rest)
        return ShardedStep(comm, conv, rest, tuple(kernels), tuple(taken), up, down, busy)

    def _busy(self, taken: Sequence[Sequence[float]], alone: float) -> tuple[float, ...]:
        """Return the seconds of each worker: its shards', and at home those of the work done there alone."""
        return tuple(sum(own) + (alone if w == self.home else 0.0) for w, own in enumerate(zip(*taken, strict=True)))

    def speedup(self) -> float:
        """Return the speed-up against home alone."""
        return self.alone / self.step().seconds

    def paper_speedup(self, bandwidth: float) -> float:
        """Return the same by the paper's own count: eq. 2 in doubles over a link if there are several workers."""
        step = self.step()
        comm = PAPER_ITEMSIZE * eq2_elements(self.specs) / bandwidth if len(self.workers) > 1 else 0.0
        return self.alone / (comm + step.conv + step.comp)

    def division(self) -> dict[str, Any]:
        """Return the division of layers for the log; none, as all are divided by kernels."""
        return {}

    def _communication(self, kernels: Sequence[Sequence[int]]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """Return seconds, and bytes of each worker up and down.

        Every layer's inputs go to each worker that has kernels of it and their outputs come back; the same backwards
        with gradients, where the first layer's input needs none. Kernels stay where they are.
        """
        seconds, up, down = self.overhead, [0] * len(self.workers), [0] * len(self.workers)
        for i, (spec, shares) in enumerate(zip(self.specs, kernels, strict=True)):
            away = {w: n for w, n in enumerate(shares) if n and w != self.home}
            whole = spec.H * spec.W * spec.C * spec.N * self.itemsize
            parts = {w: spec.out_H * spec.out_W * n * spec.N * self.itemsize for w, n in away.items()}
            inputs = dict.fromkeys(away, whole)
            for way, sent in ((down, inputs), (up, parts), (down, parts), (up, inputs if i else {})):
                seconds += self._phase(sent)
                for w, nbytes in sent.items():
                    way[w] += nbytes
        return seconds, tuple(up), tuple(down)

    def _phase(self, sent: dict[int, int]) -> float:
        """Return the seconds until the last of these bytes is there, over home's link and the workers' at once."""
        if not sent:
            return 0.0
        links = {w: self.workers[w].link() for w in sent}
        home = self.workers[self.home].bandwidth or math.inf
        shared = sum(sent.values()) / min(self.bandwidth, home)
        own = max(nbytes / links[w].bandwidth for w, nbytes in sent.items())
        return max(shared, own) + max(link.latency for link in links.values())


def sharded_events(sharding: Sharding, samples: int, epochs: int, about: Mapping[str, Any]) -> list[events.Event]:
    """Return the log of a layer-sharded run by the step model: every step takes as long as any other.

    about: further fields of the first event.
    """
    step, steps = sharding.step(), -(-samples // sharding.batch)
    seconds = steps * step.seconds
    start = {"run": "simulated", "strategy": "layer", "epochs": epochs, "batch_size": sharding.batch, "simulated": True}
    names = [worker.name for worker in sharding.workers]
    rows = [
        events.CalibratedWorker(name=w.name, device=w.kind, threads=w.threads, images_per_second=w.images_per_second)
        for w in sharding.workers
    ]
    home, kernels = names[sharding.home], dict(zip(names, map(list, zip(*step.kernels, strict=True)), strict=True))
    by_layer = {name: dict(zip(sharding.names, own, strict=True)) for name, own in kernels.items()}
    return [
        events.RunStarted(at=0.0, samples=samples, **start | dict(about)),
        events.WorkersCalibrated(at=0.0, workers=rows),
        events.KernelsSharded(at=0.0, home=home, kernels=by_layer, **sharding.division()),
        *(_epoch(sharding, step, samples, epoch, epochs) for epoch in range(1, epochs + 1)),
        events.RunEnded(at=epochs * seconds, status="done"),
    ]


def _epoch(sharding: Sharding, step: ShardedStep, samples: int, epoch: int, epochs: int) -> events.EpochEnded:
    steps = -(-samples // sharding.batch)
    seconds = steps * step.seconds
    workers = [
        events.EpochWorker(
            name=worker.name,
            samples=samples,
            busy=steps * busy,
            wait=max(0.0, seconds - steps * busy),
            communication=0.0,
            bytes_up=steps * up,
            bytes_down=steps * down,
            conv_seconds={name: steps * own for name, own in zip(sharding.names, taken, strict=True)},
        )
        for worker, busy, up, down, taken in zip(
            sharding.workers, step.busy, step.up, step.down, zip(*step.taken, strict=True), strict=True
        )
    ]
    return events.EpochEnded(
        at=epoch * seconds,
        epoch=float(epoch),
        epochs=epochs,
        step=epoch * steps,
        samples_per_second=samples / seconds,
        seconds=seconds,
        workers=workers,
    )
