"""Incremental data partitioning and allocation (BPT-CNN, §3.3.1), with its two flaws mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from daskcnn.partition.partitioner import Partitioner
from daskcnn.partition.proportional import speeds


@dataclass(frozen=True)
class IDPA(Partitioner):
    """A worker's target is in proportion to its speed: given·(1/t̄_j) / Σ(1/t̄).

    BPT-CNN eq. 2-5, but eq. 3 takes the arithmetic mean of t̄ where the harmonic one makes the targets add up, and
    floor(N/A) loses N mod A samples, which the last increment takes here. `idpa-paper` keeps eq. 3.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"complete", "proportional", "served"})

    def weights(self, seconds: Sequence[float]) -> list[float]:
        """Speeds: samples a second, relative to the fastest."""
        return speeds(seconds)
