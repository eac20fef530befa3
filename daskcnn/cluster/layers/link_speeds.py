"""Measures workers' links, with results as training sends them, and the scheduler's time a task."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
from dask.task_spec import Alias
from distributed import get_worker

from daskcnn.cluster.layers.messages import TaskResult
from daskcnn.cluster.run.context import RunContext
from daskcnn.events import LinkSpeed, LinkSpeeds
from daskcnn.sharded import ALL, WorkerLink, WorkerLinks

SMALLEST, LARGEST = 64 << 10, 4 << 20
"""Bytes of the results: the first one's, and the most."""
LONG = 0.1  # seconds of a transfer that is long enough to be measured by
TIMES = 3
TURNS = 8
"""Between two workers, to see what Dask takes for one."""
_TASKS = 2 * TURNS + 1
"""Of these turns."""


def measure_links(context: RunContext, home: str) -> WorkerLinks:
    """Every worker's link, measured to home and back, the slower way; home's own is as good as the best of them.

    And what the scheduler takes for a task. Emits what was found. One after the other, for home's link is everybody's.
    Raises WorkersLost, also for a worker whose results do not arrive within the stall timeout, and Lost.
    """
    others = [worker for worker in context.workers.alive if worker != home]
    if not others:
        return WorkerLinks()
    begun = context.connection.scheduler_seconds()
    here, *turns = (_turn(context, home, worker) for worker in (home, *others))
    task = (context.connection.scheduler_seconds() - begun) / (_TASKS * (1 + len(others)))
    links = {
        worker: _link(context, home, worker, max(0.0, turn - here)) for worker, turn in zip(others, turns, strict=True)
    }
    links[home] = WorkerLink(
        max(each.bandwidth for each in links.values()),
        min(each.latency for each in links.values()),
        min(each.handover for each in links.values()),
    )
    rows = [LinkSpeed(name=worker, **asdict(own)) for worker, own in links.items()]
    context.emit(LinkSpeeds(home=home, task=task, workers=rows))
    return WorkerLinks(links, task)


def _link(context: RunContext, home: str, worker: str, handover: float) -> WorkerLink:
    """handover: seconds that a step takes longer to go on there than at home."""
    ways = [_way(partial(_transfer, context, worker, *ends)) for ends in ((home, worker), (worker, home))]
    bandwidth, latency = min(way.bandwidth for way in ways), max(way.latency for way in ways)
    return WorkerLink(bandwidth, latency, max(0.0, handover - latency))


def _turn(context: RunContext, home: str, other: str) -> float:
    """Seconds from one task to the next, which run at home and there in turn."""
    bundle = context.dispatch.bundle()
    ends: Alias | None = None
    for _ in range(TURNS):
        ends = bundle.add("turn", _ended, *([ends] if ends else []), worker=home)
        ends = bundle.add("turn", _passed_on, ends, worker=other)
    last = bundle.add("turn", _ended, ends, worker=home)
    found = context.results.gather({other: bundle.submit([last])[last.key]}, within=context.job.cluster.stall_timeout)
    return median(b - a for a, b in pairwise(found[other])) / 2


def _ended(before: list[float] | None = None) -> list[float]:
    """When the tasks at home have run, by its clock."""
    return [*(before or ()), time.monotonic()]


def _passed_on(before: list[float]) -> list[float]:
    return before


def _way(seconds: Callable[[int], float]) -> WorkerLink:
    """Empty results first, of which one makes the connection; then larger ones, as long as they are there at once."""
    seconds(0)
    latency = median(seconds(0) for _ in range(TIMES))
    nbytes, first = SMALLEST, seconds(SMALLEST)
    while first < LONG and nbytes < LARGEST:
        nbytes *= 4
        first = seconds(nbytes)
    whole = median([first, *(seconds(nbytes) for _ in range(TIMES - 1))])
    return WorkerLink(nbytes / max(whole - latency, whole / 10), latency)


def _transfer(context: RunContext, measured: str, sender: str, receiver: str, nbytes: int) -> float:
    """Seconds that a result of so many bytes takes."""
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
