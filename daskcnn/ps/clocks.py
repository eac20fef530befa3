"""How many pushes of each worker were merged, and which is the least."""

from __future__ import annotations

from collections import Counter


class Clocks:
    """A count for each worker. One that comes later begins with the least of the others, so that none waits for it
    to catch up. Every operation but the rise of the least takes the same time for any number of workers.
    """

    def __init__(self) -> None:
        self.lowest = 0
        self._counts: dict[str, int] = {}
        self._workers_at: Counter[int] = Counter()

    def of(self, worker: str) -> int:
        """The worker's count."""
        return self._counts[worker]

    def join(self, worker: str) -> None:
        """A worker is new."""
        self._counts[worker] = self.lowest
        self._workers_at[self.lowest] += 1

    def tick(self, worker: str) -> None:
        """A push of the worker was merged."""
        count = self._counts[worker]
        self._counts[worker] = count + 1
        self._workers_at[count + 1] += 1
        self._one_less_at(count)

    def remove(self, worker: str) -> None:
        """The worker is gone."""
        self._one_less_at(self._counts.pop(worker))

    def as_dict(self) -> dict[str, int]:
        """The count of each worker."""
        return dict(self._counts)

    def _one_less_at(self, count: int) -> None:
        self._workers_at[count] -= 1
        if not self._workers_at[count]:
            del self._workers_at[count]
            if count == self.lowest:
                self.lowest = min(self._workers_at, default=0)
