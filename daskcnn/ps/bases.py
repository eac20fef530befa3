"""Which version each worker trains from now."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Bases:
    """Base versions as one array, so that a sum over all workers costs microseconds for thousands of them."""

    def __init__(self) -> None:
        self._workers: list[str] = []
        self._slot: dict[str, int] = {}
        self._versions = np.zeros(8)

    def __len__(self) -> int:
        return len(self._workers)

    def set(self, worker: str, version: int) -> None:
        """The worker trains from this version from now on."""
        slot = self._slot.get(worker)
        if slot is None:
            slot = self._slot[worker] = len(self._workers)
            self._workers.append(worker)
            if slot == len(self._versions):
                self._versions = np.concatenate([self._versions, np.zeros(slot)])
        self._versions[slot] = version

    def remove(self, worker: str) -> None:
        """The worker is gone."""
        self._to_end(worker)
        self._workers.pop()
        del self._slot[worker]

    def others(self, worker: str) -> npt.NDArray[np.float64]:
        """Base versions of all workers but this one, in no order. Valid until the next change."""
        self._to_end(worker)
        return self._versions[: len(self._workers) - 1]

    def as_dict(self) -> dict[str, int]:
        return {worker: int(self._versions[slot]) for worker, slot in self._slot.items()}

    def _to_end(self, worker: str) -> None:
        slot, last = self._slot[worker], len(self._workers) - 1
        if slot == last:
            return
        other = self._workers[last]
        self._workers[slot], self._workers[last] = other, worker
        self._slot[other], self._slot[worker] = slot, last
        versions = self._versions
        versions[slot], versions[last] = float(versions[last]), float(versions[slot])
