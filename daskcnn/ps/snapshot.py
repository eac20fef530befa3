"""What is left when a server goes, and what the next one begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from daskcnn.ps.requests import Vector
from daskcnn.ps.rule import RuleState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a new server needs to go on. The arrays are never written again.

    state: the rule's (None: as before the first merge). merged, repeated: pushes so far, repeats answered.
    refused: how many for each reason.
    """

    center: Vector = field(compare=False, repr=False)
    version: int = 0
    epoch: int = 0
    state: RuleState | None = field(default=None, compare=False, repr=False)
    merged: int = 0
    repeated: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
