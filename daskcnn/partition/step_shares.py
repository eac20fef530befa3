"""The minibatches of workers that make each step together, changed within a round as the workers' speeds change.

`StepShares` is told how long the last meeting of all took each worker. Where other shares shorten a step by enough, it
says how many samples more or fewer each worker has, and from which step on. What it adds and takes adds up to 0, so a
step keeps its samples, and a round its presentations. It goes by the whole time of a step (LB-BSP, OmniLearn), which is
taken to be f + c·b at b samples (Cannikin): f is as calibrated, else 0 at first, and is learnt where a change has shown
what it takes. The fewer the steps that were measured, and the more they differ by chance, the more a change has to
save.

`StepSizes` are a worker's own minibatches of a round, with all changes so far. No clock, no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

LAG = 3
"""Steps from a decision to the first one that it counts for: minibatches are prepared ahead of the steps."""
_ENOUGH = ((3, 0.4), (5, 0.15), (10, 0.05), (25, 0.02))
"""Number of the last meetings whose median is taken; the part of a step's time that a change by it must save."""
SETTLED = 30
"""Steps of a round in which shares settle."""
LEAST = 2
"""A worker's least samples in the step at hand. Its next minibatches may be smaller by one."""
_TELLING = 0.5
"""The part of a worker's samples whose change tells what they take."""
_MOST_FIXED = 1.5
"""The most that a step's fixed time counts for, in times that of its samples before or after such a change."""
_CERTAIN = 2.0
"""Standard errors of the seconds of a step by which a change has to save more, else it follows chance."""
_NO_TIME = 1e-9
_Meeting: TypeAlias = tuple[Mapping[str, int], Mapping[str, float]]
"""Samples and seconds of each worker."""


@dataclass(frozen=True, slots=True)
class Change:
    """Other minibatches from step `since` of the round on. more: samples that each worker adds, or takes away."""

    since: int
    more: Mapping[str, int]


_LARGEST_FIXED = 50.0
"""The most that a calibrated fixed time counts for, in times that of a step's samples: a GPU's may be nearly all."""


def fixed_samples(step_fixed: float | None, seconds: float, batch: int) -> float:
    """Return a step's fixed time, in samples that take as long. seconds: of a sample in steps of `batch` samples."""
    if not step_fixed:
        return 0.0
    each = max(seconds - step_fixed / batch, step_fixed / (_LARGEST_FIXED * batch))
    return step_fixed / each


class StepShares:
    """Decides for all workers of a run, from one meeting to the next.

    fixed: the fixed time of workers' steps as it was calibrated, in samples that take as long.
    """

    def __init__(self, fixed: Mapping[str, float] | None = None) -> None:
        self._step = self._since = 0
        self._workers: frozenset[str] = frozenset()
        self._measured: deque[_Meeting] = deque(maxlen=_ENOUGH[-1][0])
        self._before: dict[str, tuple[int, float]] = {}  # samples and seconds of a step at the last change
        self._fixed = dict(fixed or {})  # a step's fixed time, in samples that take as long

    def met(self, step: int, samples: Mapping[str, int], seconds: Mapping[str, float]) -> Change | None:
        """Take in a meeting after this step of the round. Returns a change, where it is worth it.

        step: counted from 1 in each round, the same for all. samples: of each worker since the meeting before. seconds:
        from its answer to each worker's part in this meeting. Those of a round's first meeting are not looked at.
        """
        before, self._step = self._step, step
        if step <= before or samples.keys() != self._workers:  # a round begins, or somebody is gone
            self._workers, self._since = frozenset(samples), 0
            self._measured.clear()
            return None
        if before + 1 < self._since:
            return None
        sizes = {worker: number // (step - before) for worker, number in samples.items()}
        self._measured.append((sizes, dict(seconds)))
        for number, worth in _ENOUGH:
            if step % max(1, number // 5):  # what takes long to show is not looked for at each step
                continue
            if number <= len(self._measured) and (more := self._better(sizes, number, worth)):
                self._since = step + LAG
                self._measured.clear()
                return Change(self._since, more)
        return None

    def _better(self, sizes: Mapping[str, int], number: int, worth: float) -> dict[str, int] | None:
        """Return what each worker should have more, by the last meetings; None: that saves too little."""
        last = [*self._measured][-number:]
        taken = {worker: max(median(each[worker] for _, each in last), _NO_TIME) for worker in sizes}
        self._learn(sizes, taken)
        fixed = {worker: self._fixed.get(worker, 0.0) for worker in sizes}
        mean = {worker: sum(each[worker] for each, _ in last) / number for worker in sizes}  # they differ by one
        rates = {worker: (mean[worker] + fixed[worker] or 1) / taken[worker] for worker in sizes}
        chance = _CERTAIN * max(_error([each[worker] for _, each in last]) for worker in sizes)
        enough = (1 - worth) * max(taken.values()) - chance
        if (sum(sizes.values()) + sum(fixed.values())) / sum(rates.values()) >= enough:
            return None
        wanted = _level(sizes, fixed, rates)
        if max((size + fixed[worker]) / rates[worker] for worker, size in wanted.items()) >= enough:
            return None
        self._before = {worker: (size, taken[worker]) for worker, size in sizes.items()}
        return {worker: wanted[worker] - size for worker, size in sizes.items()}

    def _learn(self, sizes: Mapping[str, int], taken: Mapping[str, float]) -> None:
        """Learn the fixed time of steps from the last change, once it shows."""
        for worker, (size, seconds) in [*self._before.items()]:
            now = sizes.get(worker, size)
            if abs(now - size) >= _TELLING * max(now, size):
                each = (taken[worker] - seconds) / (now - size)
                if each > 0:
                    self._fixed[worker] = min(max(taken[worker] / each - now, 0.0), _MOST_FIXED * max(now, size))
                del self._before[worker]


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the median of these, by their median distance from it."""
    middle = median(values)
    return 1.86 * median(abs(value - middle) for value in values) / math.sqrt(len(values))


def _level(sizes: Mapping[str, int], fixed: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, int]:
    """Return sizes with the same sum at which all take equally long, but for the least ones that they may have."""
    least = {worker: min(size, LEAST) for worker, size in sizes.items()}
    total, free, found = sum(sizes.values()), dict.fromkeys(sizes), dict[str, int]()
    while True:
        length = (total - sum(found.values()) + sum(fixed[w] for w in free)) / sum(rates[w] for w in free)
        below = [w for w in free if length * rates[w] - fixed[w] < least[w]]
        if len(below) == len(free):  # none has any to give
            return dict(sizes)
        if not below:
            break
        for worker in below:
            found[worker] = least[worker]
            del free[worker]
    found |= {worker: int(length * rates[worker] - fixed[worker]) for worker in free}
    for _ in range(total - sum(found.values())):  # fewer than there are workers
        found[min(free, key=lambda w: (found[w] + 1 + fixed[w]) / rates[w])] += 1
    return found


class StepSizes:
    """A worker's minibatches in a round of `steps` steps: `samples` cut into equal ones, and what changes add."""

    def __init__(self, samples: int, steps: int) -> None:
        self._samples, self.steps = samples, steps
        self._changes: list[tuple[int, int]] = []

    @property
    def changed(self) -> bool:
        """True if they are not as the round began."""
        return bool(self._changes)

    @property
    def last(self) -> float:
        """Samples of a step at the round's end; the mean, where steps differ by one."""
        return self._samples / self.steps + sum(more for _, more in self._changes)

    def change(self, since: int, more: int) -> None:
        """Add `more` samples to each minibatch from step `since` on. Nothing behind the round's end counts."""
        if more and since <= self.steps:
            self._changes.append((since, more))

    def planned(self, step: int) -> int:
        """Return the samples of all steps up to this one, as the round began."""
        return self._samples * step // self.steps

    def until(self, step: int) -> int:
        """Return the samples of all steps up to this one."""
        added = sum(more * (step + 1 - since) for since, more in self._changes if since <= step)
        return self.planned(step) + added

    def of(self, step: int) -> int:
        """Return the samples of a step."""
        return self.until(step) - self.until(step - 1)
