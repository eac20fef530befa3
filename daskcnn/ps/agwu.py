"""Asynchronous global weight updating (BPT-CNN §3.3.2, alg. 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from daskcnn.ps.messages import Pace, Push, RuleState, Vector
from daskcnn.ps.rule import AccuracyWeighted, Asynchronous, Local, Merge, View, parameter
from daskcnn.ps.vectors import add_scaled

_LARGEST = 500.0  # exponent at which γ is 0 for every purpose, and a sum over many workers still finite


class AGWU(AccuracyWeighted, Asynchronous):
    """Each push at once, attenuated by age and accuracy: W_new = W + γ·Q·(W_j - W_base) (eq. 10).

    attenuation: "paper" is eq. 9, γ_j = e^(k/v) / Σ_{j'≠j} e^(k'/v), v the version, k the base version; "staleness"
    has the exponents -(v - k)/m for m workers instead, which attenuates alike at any time of the run (at a fixed age
    e^(k/v) nears the others' as v grows). Both capped at 1: beside a stale peer the formulas give up to e and more.
    "paper-uncapped" is eq. 9 to the letter: beyond 1 with two or three workers, and never with more.
    every: steps between two pushes, 0 for the round's end. More pushes make more versions, which γ counts in.
    accuracy_floor: Q counts as at least this. The paper has 0, where ten classes start near Q = 0.1.
    """

    attenuation: Literal["paper", "paper-uncapped", "staleness"] = Field(
        "paper",
        description="Formula of γ: BPT-CNN eq. 9, at most 1; the same without that bound, which matters to two or "
        "three workers; or by the push's staleness alone, at most 1.",
    )
    accuracy_floor: float = parameter(
        0.0, "Least Q that a push counts with.", "it stands for an accuracy", ge=0.0, le=1.0
    )

    @property
    def overshoots(self) -> bool:
        """True: what two workers gain may be added up, and what is stale goes on from an earlier center."""
        return True

    def pushes_weights(self, pace: Pace | None) -> bool:
        return False

    def payload(self, local: Local) -> Vector:
        """The increment W_j - W_base, so that the server need not keep old centers."""
        return local.weights - local.base

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        (push,) = pushes
        gamma = self._gamma(push, view)
        merged, finite = add_scaled(center, gamma * max(push.accuracy, self.accuracy_floor), push.payload)
        return Merge(merged, state, gamma={push.worker: gamma}, finite=finite)

    def _gamma(self, push: Push, view: View) -> float:
        """Eq. 9 as 1 / Σ e^((k' - k)/scale), which no large k overflows; 1 for a worker alone."""
        workers = len(view.bases)
        if workers == 1:
            return 1.0
        versions, counts = view.bases.others(push.worker)
        scale = max(1, workers if self.attenuation == "staleness" else view.version)  # at v = 0 all ages are 0
        ages = versions - push.base_version
        ages *= 1.0 / scale
        if view.version - push.base_version > _LARGEST * scale:
            np.minimum(ages, _LARGEST, out=ages)
        least = 0.0 if self.attenuation == "paper-uncapped" else 1.0
        return 1.0 / max(least, float(counts @ np.exp(ages, out=ages)))
