"""The two values that a sequencer is given: what holds the vectors, and what decides on the workers' minibatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from daskcnn.ps.messages import Objection, Push, RuleState, Vector
from daskcnn.ps.rule import Merge, View


class Vectors(Protocol):
    """Center and rule state, whole or in ranges. The methods take effect in the order of their calls."""

    dtype: str

    def objection(self, push: Push) -> Objection | None:
        """Why the payload cannot be merged into the center: dtype, length, or a number that is not finite."""

    def merge(self, pushes: Sequence[Push], view: View) -> Merge | None:
        """Merge the pushes by the rule. None: the result would not be finite, and nothing has changed."""

    def ahead(self, lo: int, hi: int, pushes: Sequence[Push], view: View) -> Vector | None:
        """The numbers lo…hi of what `merge` of these pushes would make, whose payloads are these numbers; or None."""

    def given(self, worker: str, session: int, *, averaged: bool) -> Vector:
        """The center as it is now, or its average, for this session of the worker."""

    def forget(self, push: Push) -> None:
        """The push will not be merged: what was kept of its payload may go."""

    def drop(self, worker: str, session: int) -> None:
        """The session is over: nothing is kept for it any longer."""

    def kept(self) -> tuple[Vector, RuleState]:
        """Center and rule state as they are now. They are never written again."""

    def validate(self) -> None:
        """Assert every invariant that holds between two calls."""


class SharesChanged(Protocol):
    """Other minibatches of the workers, from step `since` of the round on."""

    @property
    def since(self) -> int:
        """The first step that it counts for."""

    @property
    def more(self) -> Mapping[str, int]:
        """Samples that each worker adds; below 0 it takes away."""


class StepSharing(Protocol):
    """Decides on the minibatches of workers that make each step together (`partition.step_shares`)."""

    def met(self, step: int, samples: Mapping[str, int], seconds: Mapping[str, float]) -> SharesChanged | None:
        """Take in a merge after this step, with each worker's samples and seconds since the one before."""
