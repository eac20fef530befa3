"""Elastic averaging SGD (Theano-MPI §4; Zhang, Choromanska, LeCun 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from daskcnn.ps.messages import Push, RuleState, Vector
from daskcnn.ps.rule import Asynchronous, Local, Merge, View, parameter
from daskcnn.ps.vectors import elastic

_GENTLE = 0.5  # the published α: the bound of `overlaps` is 4/3 there, and falls to 0 at α = 1


class EASGD(Asynchronous):
    """Every τ steps an elastic force d = α·(x - c) pulls replica and center together: x -= d, c += d.

    x + c stays what it was. alpha: the published best is 0.5. tau: steps between two exchanges, best at 1.
    """

    answers: ClassVar[Literal["center", "difference", "nothing"]] = "difference"
    usual_rate: ClassVar[float] = 2.0
    alpha: float = parameter(
        0.5,
        "Part of their distance by which replica and center approach each other at an exchange.",
        "at 0 replica and center never meet, beyond 1 they overshoot",
        gt=0.0,
        le=1.0,
    )
    tau: int = parameter(
        1, "Steps from one exchange to the next.", "it counts the steps from one exchange to the next", ge=1
    )

    @property
    def period(self) -> int | None:
        return self.tau

    @property
    def overlaps(self) -> bool:
        """With a large α replica and center nearly change places: what is gained at one's then harms the other.

        With a step for each exchange that shrinks the distance by η, it diverges at η > 4·(1 - α) / (2 - α).
        """
        return super().overlaps and self.alpha <= _GENTLE

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """x -= d; the replica keeps its own way."""
        local.weights -= answer
        local.base_version = version

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The center moved towards the push by α. The reply is that difference."""
        (push,) = pushes
        difference, merged, finite = elastic(center, push.payload, self.alpha)
        return Merge(merged, state, replies={push.worker: difference}, finite=finite)
