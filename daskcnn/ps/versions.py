"""Versions: which one each worker trains from, and how many pushes of each worker were merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


class Bases:
    """Base versions, counted: a sum over all workers has one term for each version that somebody trains from.

    The versions lie in one array and their counts in another, so that the sum costs microseconds for thousands.
    """

    def __init__(self) -> None:
        self._base: dict[str, int] = {}
        self._unnamed = 0  # workers that are counted, but not known by name
        self._slot: dict[int, int] = {}  # of each version
        self._versions, self._counts = np.zeros(8), np.zeros(8)

    def __len__(self) -> int:
        return len(self._base) + self._unnamed

    def set(self, worker: str, version: int) -> None:
        """The worker trains from this version from now on."""
        before = self._base.get(worker)
        if before == version:
            return
        self._base[worker] = version
        if version not in self._slot:
            self._add(version)
        self._counts[self._slot[version]] += 1
        if before is not None:
            self._one_less_at(before)

    def remove(self, worker: str) -> None:
        """Forget a worker."""
        self._one_less_at(self._base.pop(worker))

    def others(self, worker: str) -> tuple[Array, Array]:
        """The versions that workers train from, and how many do, this one not counted. Valid until the next change."""
        counts = self._counts[: len(self._slot)].copy()
        counts[self._slot[self._base[worker]]] -= 1
        return self._versions[: len(self._slot)], counts

    def known_to(self, workers: Iterable[str]) -> Bases:
        """A copy that answers for these workers only, and is as small as the versions are few."""
        copy, slots = Bases(), len(self._slot)
        copy._base = {worker: self._base[worker] for worker in workers}
        copy._unnamed, copy._slot = len(self) - len(copy._base), dict(self._slot)
        copy._versions, copy._counts = self._versions[:slots].copy(), self._counts[:slots].copy()
        return copy

    def as_dict(self) -> dict[str, int]:
        """Return the version of each worker."""
        return dict(self._base)

    def _add(self, version: int) -> None:
        slot = self._slot[version] = len(self._slot)
        if slot == len(self._versions):
            self._versions, self._counts = (np.concatenate([a, np.zeros(slot)]) for a in (self._versions, self._counts))
        self._versions[slot], self._counts[slot] = version, 0

    def _one_less_at(self, version: int) -> None:
        """Count one worker less at a version. The last slot's version takes the place of one without workers."""
        slot = self._slot[version]
        self._counts[slot] -= 1
        if self._counts[slot]:
            return
        del self._slot[version]
        last = len(self._slot)
        if slot != last:
            moved = int(self._versions[last])
            self._slot[moved] = slot
            self._versions[slot], self._counts[slot] = moved, self._counts[last]


class Clocks:
    """A count for each worker. One that comes later begins with the least of the others, so that none waits for it
    to catch up. Every operation but the rise of the least takes the same time for any number of workers.
    """

    def __init__(self) -> None:
        self.lowest = 0
        self._counts: dict[str, int] = {}
        self._workers_at: Counter[int] = Counter()

    def of(self, worker: str) -> int:
        """Return the pushes of a worker that were merged."""
        return self._counts[worker]

    def join(self, worker: str) -> None:
        """Count a worker from the least count of the others on."""
        self._counts[worker] = self.lowest
        self._workers_at[self.lowest] += 1

    def tick(self, worker: str) -> None:
        """A push of the worker was merged."""
        count = self._counts[worker]
        self._counts[worker] = count + 1
        self._workers_at[count + 1] += 1
        self._one_less_at(count)

    def remove(self, worker: str) -> None:
        """Forget a worker."""
        self._one_less_at(self._counts.pop(worker))

    def as_dict(self) -> dict[str, int]:
        """Return the count of each worker."""
        return dict(self._counts)

    def _one_less_at(self, count: int) -> None:
        self._workers_at[count] -= 1
        if not self._workers_at[count]:
            del self._workers_at[count]
            if count == self.lowest:
                self.lowest = min(self._workers_at, default=0)
