"""The measurements that a layer-sharded run's shares depend on: calibrations, links, and the scheduler's time a task.

Links are measured with results as training sends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
from dask.task_spec import Alias
from distributed import get_worker

from daskcnn.cluster.layers.task_context import TaskResult
from daskcnn.cluster.run.context import RunContext
from daskcnn.events import LinkSpeed, LinkSpeeds
from daskcnn.job.network import network_of, training_samples
from daskcnn.job.tables import Job
from daskcnn.sharded.balance import ShareSearch, WorkerLink, WorkerLinks
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.plan_parts import ALL
from daskcnn.sharded.stages import Stage, eq2_elements, stage_shapes
from daskcnn.store import Dataset
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import LayerSettings
from daskcnn.training.sharded_prices import share_search

SMALLEST, LARGEST = 64 << 10, 4 << 20
"""Bytes of the first result and of the largest one."""
LONG = 0.1  # seconds of a transfer that is long enough to be measured
TIMES = 3
TURNS = 8
"""Turns between two workers, by which Dask's time for one is measured."""


def measure_links(context: RunContext, home: str, workers: Collection[str]) -> WorkerLinks:
    """Measure these workers' links to home and back, and the scheduler's time for a task. Emits them as an event.

    The slower direction counts. Home's own link, if it is one of them, is as good as the best. Links are measured one
    after the other, because all of them share home's. Raises Lost, and WorkersLost, also for a worker whose results do
    not arrive within the stall timeout.
    """
    others = [worker for worker in workers if worker != home]
    if not others:
        return WorkerLinks()
    begun = context.connection.scheduler_seconds()
    here, *turns = (_turn(context, home, worker) for worker in (home, *others))
    task = (context.connection.scheduler_seconds() - begun) / ((2 * TURNS + 1) * (1 + len(others)))
    links: dict[str, WorkerLink] = {}
    for worker, turn in zip(others, turns, strict=True):
        ways = [_way(partial(_transfer, context, worker, *ends)) for ends in ((home, worker), (worker, home))]
        bandwidth, latency = min(way.bandwidth for way in ways), max(way.latency for way in ways)
        links[worker] = WorkerLink(bandwidth, latency, max(0.0, turn - here - latency))
    if home in workers:
        links[home] = WorkerLink(
            max(each.bandwidth for each in links.values()),
            min(each.latency for each in links.values()),
            min(each.handover for each in links.values()),
        )
    rows = [LinkSpeed(name=worker, **asdict(own)) for worker, own in links.items()]
    context.emit(LinkSpeeds(home=home, task=task, workers=rows))
    return WorkerLinks(links, task)


def _turn(context: RunContext, home: str, other: str) -> float:
    """Measure the seconds from one task to the next, which run at home and there in turn."""
    bundle = context.dispatch.bundle()
    ends: Alias | None = None
    for _ in range(TURNS):
        ends = bundle.add("turn", _ended, *([ends] if ends else []), worker=home)
        ends = bundle.add("turn", list, ends, worker=other)
    last = bundle.add("turn", _ended, ends, worker=home)
    found = context.results.gather({other: bundle.submit([last])[last.key]}, within=context.job.cluster.stall_timeout)
    return median(b - a for a, b in pairwise(found[other])) / 2


def _ended(before: list[float] | None = None) -> list[float]:
    """Return the times at which the tasks at home have run, by its clock."""
    return [*(before or ()), time.monotonic()]


def _way(seconds: Callable[[int], float]) -> WorkerLink:
    """Time empty results, the first of which makes the connection, then larger ones until one takes `LONG`."""
    seconds(0)
    latency = median(seconds(0) for _ in range(TIMES))
    nbytes, first = SMALLEST, seconds(SMALLEST)
    while first < LONG and nbytes < LARGEST:
        nbytes *= 4
        first = seconds(nbytes)
    whole = median([first, *(seconds(nbytes) for _ in range(TIMES - 1))])
    return WorkerLink(nbytes / max(whole - latency, whole / 10), latency)


def _transfer(context: RunContext, measured: str, sender: str, receiver: str, nbytes: int) -> float:
    """Seconds that a result of this size takes."""
    sent = context.dispatch.submit("link-sent", _sent, sender, nbytes, worker=sender)
    took = context.dispatch.submit("link", _took, sent, sent.key, worker=receiver)
    found = context.results.gather({measured: took}, within=context.job.cluster.stall_timeout)
    return float(found[measured])


def _sent(maker: str, nbytes: int) -> TaskResult:
    return TaskResult(maker, {ALL: np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)})


def _took(sent: TaskResult, key: object) -> float:
    """Seconds from asking for the result to having it, as this worker has noted them."""
    log = list(get_worker().transfer_incoming_log)
    return next(float(entry["duration"]) for entry in reversed(log) if key in entry["keys"])


def settings_of(job: Job, dataset: Dataset) -> LayerSettings:
    """The settings of a layer-sharded run's coordinator. They follow from job and data alone."""
    stages, samples, batch = stages_of(network_of(job, dataset)), training_samples(job, dataset), job.train.batch_size

    def balancing(home: str, workers: Mapping[str, Measured], links: WorkerLinks) -> ShareSearch:
        rows = {name: own.row for name, own in workers.items()}
        search = share_search(job, dataset.shape, samples, stages, home, rows, links)
        return search.asked_for(job.train.kernel_shares, job.train.first_conv)

    shaped = zip(stages, stage_shapes(stages, dataset.shape), strict=True)
    convs = [(stage.conv, H, W, C) for stage, (H, W, C) in shaped if stage.conv]
    eq2 = eq2_elements([conv.spec((H, W, batch, C), conv.kernels) for conv, H, W, C in convs])
    return LayerSettings.of(job, samples, balancing, eq2, guessing_on(job, dataset))


def fastest(context: RunContext) -> str:
    """The worker that is home to what is not sharded."""
    return min(context.workers.alive, key=lambda name: context.calibrations[name].seconds_per_sample)


def balance_of(context: RunContext, stages: Sequence[Stage], home: str) -> ShareSearch:
    """The search for the best shares of the workers that are alive, by their latest measurements."""
    measured = {name: context.calibrations[name] for name in context.workers.alive}
    data = context.dataset.shape, context.samples
    search = share_search(context.job, *data, stages, home, measured, context.links or WorkerLinks())
    return search.asked_for(context.job.train.kernel_shares, context.job.train.first_conv)
