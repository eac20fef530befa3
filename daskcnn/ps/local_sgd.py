"""Local SGD with an outer step (Douillard et al. 2023, arXiv 2311.08105, alg. 1; Stich 2019; Chen, Huo 2016)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import field_validator

from daskcnn.ps.messages import Pace, Push, RuleState, Vector
from daskcnn.ps.rule import Local, Merge, UpdateRule, View, parameter
from daskcnn.ps.vectors import sample_weights, weighted_sum

_VELOCITY = "velocity"
_UNMEASURED = 16
"""Steps between two meetings with "auto", before a meeting was timed."""
PART = 0.15
"""The most of a run's time that meetings take with "auto"."""
GROWS = 15
"""Meetings at the beginning of a run within which the usual momentum grows from 0 to what the parts of the samples ask
for. The first gains point in ever other directions: full momentum from the start costs two workers 2 points of accuracy
at the end of a short run of `quick` on CIFAR-10, and four workers 3.5 (benchmarks/README.md)."""


def steps_between(step: float, exchange: float, part: float = PART) -> int:
    """The fewest steps of `step` seconds beside which a meeting of `exchange` seconds takes `part` of the time."""
    return max(1, math.ceil(exchange * (1 - part) / (part * step)))


class LocalSGD(UpdateRule):
    """Replicas make steps of their own, as many as their speed allows in the same time, and then meet.

    The mean of what they gained, by samples n_j, is the gradient of a step of Nesterov momentum (η, μ) on the center:

        Δ = Σ_j n_j·(W_j - c) / Σ n;   v = μ·v + Δ;   c = c + η·(Δ + μ·v)

    DiLoCo has η = 0.7 and μ = 0.9. With μ = 0 and η = 1 the center is the mean of the weights (local SGD). By default
    μ = 1 - Σ_j (n_j / Σ n)², 1 - 1/k for k equal replicas: a mean of k advances k times less for the same samples, and
    momentum makes up for that (BMUF). A replica alone is plain SGD, whatever η and μ.
    """

    barrier: ClassVar[bool] = True
    every: int | Literal["auto"] = parameter(
        "auto",
        "Steps of the fastest replica between two meetings, at least 1; `auto`: as many as keep meetings to 15 % of "
        "the time. The others make as many as they can meanwhile; one that could make none has smaller minibatches.",
        "it counts the fastest replica's steps between two meetings; auto goes by the time that a meeting takes",
    )
    outer_lr: float = parameter(
        1.0, "Learning rate η of the outer step.", "at 0 the center would stay where it is", gt=0.0
    )
    outer_momentum: float | None = parameter(
        None,
        "Nesterov momentum μ of the outer step. Default: 1 minus the sum of the squares of the replicas' parts of the "
        "samples, 0.5 for two equal ones, reached within the first 15 meetings.",
        "it is the part of the velocity that is left after a meeting; 0 for none",
        ge=0.0,
        lt=1.0,
    )

    @field_validator("every", mode="plain")
    @classmethod
    def _checked(cls, value: Any) -> int | Literal["auto"]:
        if value == "auto" or (type(value) is int and value >= 1):
            return value
        raise ValueError("input should be 'auto' or a whole number from 1")

    @property
    def period(self) -> int | None:
        """The steps between two meetings where nothing is known of others' speeds."""
        return _UNMEASURED if self.every == "auto" else self.every

    @property
    def steps_by_speed(self) -> bool:
        return True

    @property
    def overlaps(self) -> bool:
        """Always: what is gained while a meeting is under way is added to its center, and pushed at the next one."""
        return True

    @property
    def overshoots(self) -> bool:
        return not self.takes_means

    @property
    def takes_means(self) -> bool:
        return self.outer_lr == 1.0 and self.outer_momentum == 0.0

    def meetings(self, steps: int, step: float, exchange: float | None) -> int:
        """The meetings in a round in which the fastest replica makes this many steps of `step` seconds each.

        exchange: seconds of a meeting; None: not known yet. At most `every` steps lie between two, and with "auto"
        at least as many as keep meetings to their part of the time, as far as the round has them.
        """
        if self.every == "auto" and exchange is not None:
            return max(1, steps // steps_between(step, exchange))
        return super().meetings(steps, step, exchange)

    def pushes_weights(self, pace: Pace | None) -> bool:
        return False

    def payload(self, local: Local) -> Vector:
        """The gain since the last meeting. In float16 it loses less than the weights would."""
        return local.weights - local.base

    def init(self, center: Vector) -> RuleState:
        """The velocity, where there may be momentum."""
        return {} if self.outer_momentum == 0.0 else {_VELOCITY: np.zeros_like(center)}

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The outer step."""
        parts, lr, momentum = sample_weights(pushes), self.outer_lr, self.outer_momentum
        if momentum is None:
            momentum = (1.0 - sum(part**2 for part in parts)) * min(1.0, view.version / GROWS)
        if len(pushes) == 1:
            lr, momentum = 1.0, 0.0
        gained, _ = weighted_sum([push.payload for push in pushes], parts)
        velocity, sane = gained, True
        if _VELOCITY in state:
            velocity, sane = weighted_sum([state[_VELOCITY], gained], [momentum, 1.0])
        merged, finite = weighted_sum([center, gained, velocity], [1.0, lr, lr * momentum])
        kept = {} if self.outer_momentum == 0.0 else {_VELOCITY: velocity}
        return Merge(merged, kept, finite=sane and finite)
