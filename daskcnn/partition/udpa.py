"""Uniform data partitioning and allocation: the comparison in BPT-CNN §5.3.3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from daskcnn.partition.partitioner import Partitioner


@dataclass(frozen=True)
class UDPA(Partitioner):
    """Equal parts, all at once: there is one increment, whatever number is asked for."""

    laws: ClassVar[frozenset[str]] = frozenset({"complete", "equal", "served"})
    at_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "increments", 1)

    def weights(self, seconds: Sequence[float]) -> list[float]:
        """Return equal weights, whatever the speeds."""
        return [1.0] * len(seconds)
