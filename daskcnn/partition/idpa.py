"""Incremental data partitioning and allocation (BPT-CNN, §3.3.1), with its two flaws corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from daskcnn.partition.partitioner import Partitioner
from daskcnn.partition.proportional import speeds


@dataclass(frozen=True)
class IDPA(Partitioner):
    """A worker's target is in proportion to its speed: given·(1/t̄_j) / Σ(1/t̄).

    BPT-CNN eq. 2-5 with two corrections. Eq. 3 uses the arithmetic mean of t̄, but only the harmonic mean makes the
    targets add up. floor(N/A) loses N mod A samples; here the last increment takes them. `idpa-paper` keeps eq. 3.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"complete", "proportional", "served"})

    def weights(self, seconds: Sequence[float]) -> list[float]:
        """Return speeds: samples per second, relative to the fastest."""
        return speeds(seconds)
