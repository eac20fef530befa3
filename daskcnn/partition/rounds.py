"""Who trains on which samples next, until every sample was presented `epochs` times on average.

Theory of operation: a *round* is one pass of a worker over all the samples it has. `Rounds` is told that a round ended
(`finished`), that its worker is `lost` or that one has come (`join`); `due` then says which rounds start now. Under a
barrier rule all workers start together; otherwise each starts again as soon as its own round ends. Increments of the
allocation are handed out at those moments. The budget is `total · epochs` presentations: the last rounds are cut so
that they add up to it (instead of rounding the number of rounds as BPT-CNN eq. 6 does). No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from daskcnn.partition.allocation import Allocation, Ranges
from daskcnn.partition.budget import Budget
from daskcnn.partition.partitioner import Partitioner


@dataclass(frozen=True, slots=True)
class Round:
    """One worker's next round: `samples` of its `ranges`; `progress` runs from start to end of the whole run's 0…1."""

    worker: str
    number: int
    ranges: Ranges
    samples: int
    progress: tuple[float, float]


class Rounds:
    """The rounds of one run. `seconds` per sample are the calibrated ones at first, then the latest measured."""

    def __init__(
        self, partitioner: Partitioner, total: int, seconds: Mapping[str, float], *, epochs: int, barrier: bool
    ) -> None:
        self.partitioner = partitioner
        self.allocation = partitioner.start(total, tuple(seconds))
        self.seconds = dict(seconds)
        self.presentations = total * epochs
        self.budget = Budget.of(total, epochs)
        self.barrier = barrier
        self.numbers = dict.fromkeys(seconds, 0)
        self.running: dict[str, Round] = {}
        self._before = self.allocation  # the one that the rounds under way began from

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self.seconds)

    @property
    def done(self) -> int:
        """Presentations made: neither left nor under way."""
        return self.presentations - self.budget.left - sum(r.samples for r in self.running.values())

    @property
    def ended(self) -> bool:
        return self.budget.spent and not self.running

    def due(self) -> list[Round]:
        """The rounds that start now; they are under way until `finished` or `lost`."""
        if self.budget.spent or (self.barrier and self.running):
            return []
        return self._together() if self.barrier else self._alone()

    def finished(self, worker: str, seconds_per_sample: float) -> None:
        """The worker's round ended, and took so long."""
        del self.running[worker]
        self.seconds[worker] = seconds_per_sample

    def lost(self, worker: str) -> None:
        """A worker is gone: its samples go to the others, and what it was presenting is presented by them.

        Raises ValueError where nobody is left.
        """
        self._before = self.allocation = self.partitioner.leave(self.allocation, worker, self.seconds)
        del self.numbers[worker], self.seconds[worker]
        if worker in self.running:
            self.budget = self.budget.returned(self.running.pop(worker).samples)

    def join(self, worker: str, seconds_per_sample: float) -> None:
        """A worker is new: it takes its share from the others. Raises ValueError for one that is there already."""
        seconds = {**self.seconds, worker: seconds_per_sample}
        self._before = self.allocation = self.partitioner.join(self.allocation, worker, seconds)
        self.seconds = seconds
        self.numbers[worker] = max(self.numbers.values())

    def _together(self) -> list[Round]:
        self._before = self.allocation
        increment = 1 + max(self.allocation.granted.values())
        if increment <= self.partitioner.increments:
            self.allocation = self.partitioner.allocate(self.allocation, self.seconds, increment=increment)
        done = self.done
        sizes, self.budget = self.budget.round(self.allocation.sizes())
        end = (done + sum(sizes.values())) / self.presentations
        return [self._begin(w, n, (done / self.presentations, end)) for w, n in sizes.items() if n]

    def _alone(self) -> list[Round]:
        idle = [worker for worker in self.workers if worker not in self.running]
        for worker in idle:
            self.allocation = self.partitioner.grant(self.allocation, self.seconds, worker)
        done = self.done
        # while a worker makes its round, the others make about one of theirs
        end = min(1.0, (done + self.allocation.given) / self.presentations)
        begun = []
        for worker in idle:
            samples, self.budget = self.budget.one(self.allocation.size(worker))
            if samples:
                begun.append(self._begin(worker, samples, (done / self.presentations, end)))
        return begun

    def _begin(self, worker: str, samples: int, progress: tuple[float, float]) -> Round:
        begun = Round(worker, self.numbers[worker], self.allocation.ranges[worker], samples, progress)
        self.numbers[worker] += 1
        self.running[worker] = begun
        return begun

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, a copy. Rounds under way are not in it: a resume begins them again."""
        whole = self._before if self.running and self.barrier else self.allocation
        return {
            "allocation": whole.to_dict(),
            "seconds": dict(self.seconds),
            "left": self.presentations - self.done,
            "numbers": {w: n - (w in self.running) for w, n in self.numbers.items()},
        }

    def restore(self, state: Mapping[str, Any], workers: Iterable[str]) -> None:
        """Go on from a checkpoint with these workers: those it knows keep their samples, others leave or join."""
        now = {w: self.seconds[w] for w in workers}
        self.allocation = Allocation.from_dict(state["allocation"])
        self.seconds = {w: float(s) for w, s in state["seconds"].items()}
        self.numbers = {w: int(n) for w, n in state["numbers"].items()}
        self.budget, self.running = Budget(int(state["left"])), {}
        for worker, seconds in now.items():
            if worker in self.seconds:
                self.seconds[worker] = seconds
            else:
                self.join(worker, seconds)
        for worker in [w for w in self.workers if w not in now]:
            self.lost(worker)
