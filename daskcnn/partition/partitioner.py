"""The base of the partitioners: increments, for one worker or all at a time, and workers that come and go.

Synchronous rules call `allocate` once a round for all workers together. Asynchronous rules call `grant_each` for
workers whose own round ends, with the latest times known of all. Only `leave`, `join`, `settle` and `levelled` move
samples.

Incremental and uniform data partitioning and allocation (BPT-CNN, §3.3.1 and §5.3.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import ClassVar

from daskcnn.partition.allocation import Allocation, count
from daskcnn.partition.proportions import as_counted, level, proportional, speeds

Seconds = Mapping[str, float]
"""Seconds a sample takes each worker: calibrated at first, measured later."""
WORTH = 0.02
"""The part of a step's time that other shares must save, once all increments are given."""


@dataclass(frozen=True)
class Partitioner(ABC):
    """Gives the samples out in `increments` steps. Raises ValueError for less than one.

    `laws` names what the law suite checks of this class, besides that parts are disjoint and only grow: "complete" (no
    sample is free after the last increment), "proportional" (targets by speed), "equal", or "served" (no worker gets a
    second sample while another has none). at_once: whether all samples are one increment, however many are asked for.
    follows: whether shares go on following the workers' speeds once all increments are given. even: whether all workers
    count as equally fast, so that nothing that is measured decides.
    """

    increments: int = 4
    even: bool = False
    laws: ClassVar[frozenset[str]]
    at_once: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.increments < 1:
            raise ValueError(f"increments={self.increments}: samples are given at least once; set 1 or more")

    @abstractmethod
    def weights(self, seconds: Sequence[float]) -> list[float]:
        """Return what the workers' shares are in proportion to."""

    def start(self, total: int, workers: Sequence[str]) -> Allocation:
        """Return an allocation that has given nothing. ValueError for no or equal workers, or too many increments."""
        if not workers or len(set(workers)) != len(workers):
            raise ValueError(f"workers={list(workers)}: need at least one worker, each name once")
        if total < self.increments:
            raise ValueError(
                f"increments={self.increments}: more than the {total} samples to give out; "
                "set train.increments lower, or give more data"
            )
        return Allocation(total, dict.fromkeys(workers, ()), ((0, total),), dict.fromkeys(workers, 0))

    def target(self, total: int, seconds_per_sample: Seconds) -> dict[str, int]:
        """Return how many of `total` samples each worker should have, whatever it has now."""
        sizes = proportional(total, self.weights(self._times(seconds_per_sample, tuple(seconds_per_sample))))
        return dict(zip(seconds_per_sample, sizes, strict=True))

    def allocate(self, allocation: Allocation, seconds_per_sample: Seconds, *, increment: int) -> Allocation:
        """Give all workers their next increment (1 … increments, in turn). Raises ValueError for another increment."""
        expected = 1 + max(allocation.granted.values())
        if increment != expected or increment > self.increments:
            raise ValueError(
                f"increment={increment}: {expected - 1} of {self.increments} were given; they are given once, in turn"
            )
        sizes = self._sizes(allocation, self._times(seconds_per_sample, allocation.workers), increment)
        return allocation.give(_growth(allocation, sizes), increment)

    def grant_each(self, allocation: Allocation, seconds_per_sample: Seconds, workers: Sequence[str]) -> Allocation:
        """Give each of these workers its next increment, one after the other, if it has not had them all.

        When the last worker gets its last increment, samples left over by drifting speeds go to all workers, so others
        may grow as well. Samples are kept back for workers that have none yet.
        """
        due = [worker for worker in workers if allocation.granted[worker] < self.increments]
        if not due:
            return allocation
        times = self._times(seconds_per_sample, allocation.workers)
        shares, place = self._shares(times), {worker: index for index, worker in enumerate(allocation.workers)}
        without = {worker for worker, ranges in allocation.ranges.items() if not ranges}
        for worker in due:
            has, increment, free = allocation.size(worker), allocation.granted[worker] + 1, count(allocation.free)
            wanted = self._wanted(allocation, times, shares, place[worker], increment)
            without.discard(worker)
            more = max(min(free, int(has == 0)), min(wanted - has, free - len(without)))
            allocation = allocation.give({worker: more}, increment)
            if not more and not has:
                without.add(worker)
        return self._finish(allocation, times)

    def give_rest(self, allocation: Allocation, seconds_per_sample: Seconds, workers: Sequence[str]) -> Allocation:
        """Give all that is free to these workers. Returns the same allocation if nothing is free."""
        return self._give_rest(allocation, self._times(seconds_per_sample, allocation.workers), workers)

    def leave(self, allocation: Allocation, worker: str, seconds_per_sample: Seconds) -> Allocation:
        """Give the worker's samples to the others, as near to proportional as possible without another move.

        Raises ValueError for a worker that is not there, or the last one, whose samples no other worker could take.
        """
        size, others = allocation.size(worker), [w for w in allocation.workers if w != worker]
        if not others:
            raise ValueError(f"worker={worker!r}: nobody is left for its {size} samples; let another join first")
        times = self._times(seconds_per_sample, others)
        have = [allocation.size(other) for other in others]
        sizes = level(allocation.given, self.weights(times), have, [allocation.given] * len(others))
        moved = {other: new - old for other, new, old in zip(others, sizes, have, strict=True)}
        return self._finish(allocation.without(worker, moved), times)

    def join(self, allocation: Allocation, worker: str, seconds_per_sample: Seconds) -> Allocation:
        """Give a new worker its share from those that have most for their speed, leaving each at least one sample.

        It counts as having had the increments that all others had. Raises ValueError for a worker that is there.
        """
        if worker in allocation.ranges:
            raise ValueError(f"worker={worker!r}: is part of the allocation already; let it leave first")
        times = self._times(seconds_per_sample, (*allocation.workers, worker))
        have = list(allocation.sizes().values())
        own = int(sum(map(bool, have)) < allocation.given)
        low = [*(min(size, 1) for size in have), own]
        sizes = level(allocation.given, self.weights(times), low, [*have, allocation.given])
        moved = {w: old - new for w, old, new in zip(allocation.workers, have, sizes, strict=False)}
        return allocation.with_joined(worker, moved, min(allocation.granted.values()))

    def settle(self, allocation: Allocation, worker: str, seconds_per_sample: Seconds) -> Allocation:
        """Correct the share of a worker that joined, once it is measured; samples move only to it or from it.

        Each worker keeps a sample. Raises ValueError for a worker that is not there.
        """
        has, given, place = allocation.size(worker), allocation.given, allocation.workers.index(worker)
        weights, have = (
            self.weights(self._times(seconds_per_sample, allocation.workers)),
            [*allocation.sizes().values()],
        )
        share = given * weights[place] / sum(weights)
        if abs(has - share) < 1:
            return allocation
        least, all_of_it = [min(size, 1) for size in have], [given * (size > 0) for size in have]
        low, high = (have, all_of_it) if has > share else (least, [*have])  # the others only get samples, or only give
        low[place], high[place] = (least[place], has) if has > share else (has, given)
        growth = _growth(allocation, level(given, weights, low, high))
        return allocation.with_moved(worker, {other: number for other, number in growth.items() if other != worker})

    @property
    def adapts(self) -> bool:
        """True if shares follow what is measured, all through a run."""
        return self.follows and not self.even

    def levelled(self, allocation: Allocation, seconds_per_sample: Seconds, steps: int = 1) -> Allocation:
        """Move samples so that all workers take equally long, where that makes a step shorter by more than WORTH.

        steps: that all make together in a round. In each every worker has a whole number of samples, one at least, so
        shares become multiples of it, but for what is left over. Returns the same allocation where nothing moves: it
        stays as it is at constant speeds, and never changes if the partitioner does not adapt.
        """
        have, whole = list(allocation.sizes().values()), allocation.given // steps
        least = [int(size > 0) for size in have]
        if not self.adapts or whole < sum(least):
            return allocation
        times = self._times(seconds_per_sample, allocation.workers)
        parts = level(whole, self.weights(times), least, [whole] * len(have))
        now = max(-(-size // steps) * each for size, each in zip(have, times, strict=True))
        if max(map(mul, parts, times)) >= (1 - WORTH) * now:
            return allocation
        sizes = level(allocation.given, parts, [steps * part for part in parts], [allocation.given] * len(have))
        return allocation.shifted(_growth(allocation, sizes))

    def with_a_sample_each(self, allocation: Allocation, steps: int) -> Allocation:
        """Let every worker with samples have one at least for each of these steps, at the cost of the others.

        Returns the same allocation where all have, there are too few samples, or the partitioner does not adapt.
        """
        have = list(allocation.sizes().values())
        least = [steps * (size > 0) for size in have]
        enough = all(size >= low for size, low in zip(have, least, strict=True))
        if enough or not self.adapts or sum(least) > allocation.given:
            return allocation
        return allocation.shifted(
            _growth(allocation, level(allocation.given, have, least, [allocation.given * (size > 0) for size in have]))
        )

    def _times(self, seconds_per_sample: Seconds, workers: Sequence[str]) -> list[float]:
        """Return the seconds that the workers' shares go by."""
        missing = [worker for worker in workers if worker not in seconds_per_sample]
        if missing:
            raise ValueError(
                f"seconds_per_sample: no time for {missing}; calibrate every worker before it gets samples"
            )
        times = [seconds_per_sample[worker] for worker in workers]
        speeds(times)  # refuses what is no time, whether the partitioner goes by it or not
        return as_counted(times, even=self.even)

    def _given_after(self, allocation: Allocation, increment: int) -> int:
        """Return the samples given after this many increments: all of them after the last.

        Rounding to the nearest (the paper has floor(N/A)) avoids a last round of one or two samples.
        """
        return (2 * allocation.total * increment + self.increments) // (2 * self.increments)

    def _sizes(self, allocation: Allocation, times: list[float], increment: int) -> list[int]:
        """Return what each worker has after a synchronous increment. No size falls (the excess is shared).

        No size is 0 while there are samples for all: a worker without samples would never be measured again, and never
        push. An increment with fewer samples than workers goes to those that have none, the fastest first.
        """
        given = self._given_after(allocation, increment)
        have = list(allocation.sizes().values())
        low = list(have)
        without = sorted((i for i, size in enumerate(have) if not size), key=times.__getitem__)
        for index in without[: given - sum(have)]:
            low[index] = 1
        return level(given, self.weights(times), low, [given] * len(have))

    def _shares(self, times: list[float]) -> list[float]:
        weights = self.weights(times)
        total = sum(weights)
        return [weight / total for weight in weights]

    def _wanted(
        self, allocation: Allocation, times: list[float], shares: list[float], index: int, increment: int
    ) -> int:
        """Return what one worker should have after its own increment, rounded down: the last one evens it out."""
        return int(self._given_after(allocation, increment) * shares[index])

    def _finish(self, allocation: Allocation, times: list[float]) -> Allocation:
        """Give out the samples that are still free after every worker had its last increment."""
        if min(allocation.granted.values()) < self.increments:
            return allocation
        return self._give_rest(allocation, times, allocation.workers)

    def _give_rest(self, allocation: Allocation, times: list[float], workers: Sequence[str]) -> Allocation:
        if not allocation.free:
            return allocation
        have = allocation.sizes()
        most = [allocation.total if worker in workers else size for worker, size in have.items()]
        growth = _growth(allocation, level(allocation.total, self.weights(times), list(have.values()), most))
        return allocation.give({worker: growth[worker] for worker in workers}, self.increments)


def _growth(allocation: Allocation, sizes: Sequence[int]) -> dict[str, int]:
    return {w: new - old for (w, old), new in zip(allocation.sizes().items(), sizes, strict=True)}


@dataclass(frozen=True)
class IDPA(Partitioner):
    """A worker's target is in proportion to its speed: given·(1/t̄_j) / Σ(1/t̄).

    BPT-CNN eq. 2-5 with two corrections. Eq. 3 uses the arithmetic mean of t̄, but only the harmonic mean makes the
    targets add up. floor(N/A) loses N mod A samples; here the last increment takes them. `idpa-paper` keeps eq. 3.
    The paper stops measuring after the last increment; here shares follow speeds all through a run behind a barrier.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"complete", "proportional", "served"})
    follows: ClassVar[bool] = True

    def weights(self, seconds: Sequence[float]) -> list[float]:
        return speeds(seconds)


@dataclass(frozen=True)
class IDPAPaper(IDPA):
    """BPT-CNN eq. 2-5 with bounds: n'_j = floor(N/A)·a·t̄ / (m·t̄_j); the last worker takes the rest.

    t̄ is the arithmetic mean of t̄_j, so the n'_j add up to more than there is, and the last worker starves. The bounds
    are ours: no worker loses samples or gets more than the increment still has, and every one gets a sample in the
    first increment, if there are enough. The last increment gives out the N mod A samples too, as in `idpa`. After it
    shares stay as they are.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"complete"})
    follows: ClassVar[bool] = False

    def _given_after(self, allocation: Allocation, increment: int) -> int:
        """Return floor(N/A)·a, and all samples after the last increment."""
        whole = increment == self.increments
        return allocation.total if whole else allocation.total // self.increments * increment

    def _sizes(self, allocation: Allocation, times: list[float], increment: int) -> list[int]:
        sizes, shares = list(allocation.sizes().values()), self._shares(times)
        left = self._given_after(allocation, increment) - allocation.given
        at_least = int(allocation.given == 0 and left >= len(sizes))
        for index in range(len(sizes) - 1):
            kept = at_least * (len(sizes) - 1 - index)
            more = self._wanted(allocation, times, shares, index, increment) - sizes[index]
            more = max(at_least, min(more, left - kept))
            sizes[index] += more
            left -= more
        sizes[-1] += left
        return sizes

    def _wanted(
        self, allocation: Allocation, times: list[float], shares: list[float], index: int, increment: int
    ) -> int:
        """Return n'_j of eq. 4, or the share by nominal speed (eq. 2) in the first increment."""
        if increment == 1:
            return super()._wanted(allocation, times, shares, index, increment)
        mean = sum(times) / len(times)
        seconds = allocation.total // self.increments * increment * mean / len(times)  # T_a, eq. 3
        return int(seconds / times[index])


@dataclass(frozen=True)
class UDPA(Partitioner):
    """Equal parts, all at once: there is one increment, whatever number is asked for."""

    laws: ClassVar[frozenset[str]] = frozenset({"complete", "equal", "served"})
    at_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "increments", 1)

    def weights(self, seconds: Sequence[float]) -> list[float]:
        return [1.0] * len(seconds)
