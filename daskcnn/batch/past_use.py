"""Use of a cluster by its users lately: the workers that their jobs had. No clock: times are arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf, log

from daskcnn.batch.records import Grant, QueuedJob


def used(grants: Iterable[Grant], now: float, half_life: float) -> dict[str, float]:
    """Return each user's worker-seconds until now. Half of them are forgotten in every half-life."""
    found, rate = defaultdict[str, float](float), log(2) / half_life
    for grant in grants:
        until = now if grant.ended is None else min(grant.ended, now)
        if until > grant.begun:  # a clock that was set back counts nothing
            age, length = now - until, until - grant.begun
            found[grant.user] += 2 ** (-age / half_life) * (1 - 2 ** (-length / half_life)) / rate
    return dict(found)


def oldest_since(waiting: Iterable[QueuedJob], grants: Iterable[Grant]) -> dict[int, float]:
    """Return since when each user's oldest waiting job is the oldest, by its id: until then an older one waited."""
    oldest = dict[str, QueuedJob]()
    for job in waiting:
        if job.user not in oldest or job.id < oldest[job.user].id:
            oldest[job.user] = job
    started = dict[tuple[str, int], float]()
    for grant in grants:
        if grant.user in oldest and grant.job < oldest[grant.user].id:
            key = grant.user, grant.job
            started[key] = min(grant.begun, started.get(key, inf))
    found = {job.id: job.since for job in oldest.values()}
    for (user, _), begun in started.items():
        found[oldest[user].id] = max(begun, found[oldest[user].id])
    return found
