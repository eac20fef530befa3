"""Synchronous global weight updating (BPT-CNN §3.3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from daskcnn.ps.messages import Push, RuleState, Vector
from daskcnn.ps.rule import AccuracyWeighted, Merge, View
from daskcnn.ps.vectors import weighted_sum


class SGWU(AccuracyWeighted):
    """All replicas' weights, averaged by accuracy once all have pushed: W = Σ_j W_j·Q_j / Σ_k Q_k (eq. 7).

    The plain mean where every Q is 0. One worker alone is plain SGD. The paper's replicas push once a round; with
    `every` they meet within rounds, after as many steps as their speeds allow.
    """

    barrier: ClassVar[bool] = True

    @property
    def steps_by_speed(self) -> bool:
        return self.every > 0

    def of_part(self, quality: float, part: float) -> float:
        return quality * part

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        qualities = [push.accuracy for push in pushes]
        if not (total := sum(qualities)):
            qualities, total = [1.0] * len(pushes), len(pushes)
        merged, finite = weighted_sum([push.payload for push in pushes], [q / total for q in qualities])
        return Merge(merged, state, finite=finite)
