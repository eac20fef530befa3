"""Incremental and uniform data partitioning and allocation (BPT-CNN, §3.3.1 and §5.3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from daskcnn.partition.allocation import Allocation
from daskcnn.partition.partitioner import Partitioner
from daskcnn.partition.proportions import speeds


@dataclass(frozen=True)
class IDPA(Partitioner):
    """A worker's target is in proportion to its speed: given·(1/t̄_j) / Σ(1/t̄).

    BPT-CNN eq. 2-5 with two corrections. Eq. 3 uses the arithmetic mean of t̄, but only the harmonic mean makes the
    targets add up. floor(N/A) loses N mod A samples; here the last increment takes them. `idpa-paper` keeps eq. 3.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"complete", "proportional", "served"})

    def weights(self, seconds: Sequence[float]) -> list[float]:
        return speeds(seconds)


@dataclass(frozen=True)
class IDPAPaper(IDPA):
    """BPT-CNN eq. 2-5 with bounds: n'_j = floor(N/A)·a·t̄ / (m·t̄_j); the last worker takes the rest.

    t̄ is the arithmetic mean of t̄_j, so the n'_j add up to more than there is, and the last worker starves. The bounds
    are ours: no worker loses samples or gets more than the increment still has, and every one gets a sample in the
    first increment, if there are enough. The last increment gives out the N mod A samples too, as in `idpa`.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"complete"})

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
