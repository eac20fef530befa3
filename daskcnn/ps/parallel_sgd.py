"""Parallel SGD (Hegde & Usmani §5.1.1, alg. 1; Zinkevich et al. 2010)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from daskcnn.ps.messages import Push, RuleState, Vector
from daskcnn.ps.rule import Merge, UpdateRule, View, parameter
from daskcnn.ps.vectors import sample_weights, weighted_sum


class ParallelSGD(UpdateRule):
    """Replicas train on samples of their own and do not meet but for the mean of their weights at the end.

    rounds: how many such means the run has at most; each round is a whole number of passes, the last may be shorter.
    Between two of them pairs of workers swap half of their samples (§5.1.1), so that each sees more of the data. weigh:
    a replica counts by the samples it trained on, or, as in the paper, all count alike.
    """

    barrier: ClassVar[bool] = True
    fewest: ClassVar[int] = 2
    swaps: ClassVar[bool] = True
    rounds: int = parameter(
        1, "Means of the replicas' weights in a run, at most.", "it counts the means, and the run ends with one", ge=1
    )

    weigh: Literal["samples", "equal"] = Field(
        "samples", description="What a replica counts by: the samples it trained on, or 1/k each, as in the paper."
    )

    def passes(self, epochs: int) -> int:
        """As many passes as cut the run's epochs into `rounds` rounds."""
        return -(-epochs // self.rounds)

    def problems(self, epochs: int) -> Iterator[str]:
        """More rounds than there are passes."""
        if self.rounds > epochs:
            yield (
                f"rule.rounds = {self.rounds}: a round is at least one pass, and the run has {epochs}; "
                "lower it, or raise train.epochs"
            )

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        weights = sample_weights(pushes) if self.weigh == "samples" else [1 / len(pushes)] * len(pushes)
        merged, finite = weighted_sum([push.payload for push in pushes], weights)
        return Merge(merged, state, finite=finite)
