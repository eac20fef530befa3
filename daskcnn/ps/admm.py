"""The alternating direction method of multipliers for consensus (Hegde & Usmani §5.1.2; Boyd et al. 2011, §7.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import Field

from daskcnn.ps.messages import Push, RuleState, Vector
from daskcnn.ps.rule import Local, Merge, UpdateRule, View, parameter
from daskcnn.ps.vectors import weighted_sum

_DUAL = "dual"


class ADMM(UpdateRule):
    """Replicas minimise their own loss + ρ/2·‖w - z + u‖², then z ← mean(w + u) and u += w - z.

    rho: how strongly they are held together; with 0 there are no dual variables u. every: steps between two meetings,
    0 for the round's end. from_center: whether a replica goes on from z rather than from its own w. The paper's
    pseudo-code is rho = 0, every = 1, from_center = true; without from_center replicas with ρ = 0 never meet.
    """

    barrier: ClassVar[bool] = True
    fewest: ClassVar[int] = 2
    rho: float = parameter(
        0.01,
        "Strength of the term that holds replicas and center together.",
        "below 0 it would drive the replicas apart",
        ge=0.0,
    )
    every: int = parameter(
        0,
        "Steps between two meetings; 0 is the round's end.",
        "it counts the steps between two meetings; 0 is the round's end",
        ge=0,
    )
    from_center: bool = Field(
        False, description="Whether a replica goes on from the center, instead of its own weights."
    )

    @property
    def period(self) -> int | None:
        return self.every or None

    def problems_with_groups(self, size: int) -> Iterator[str]:
        if self.rho > 0:
            yield (
                f"rule.rho = {self.rho:g}: its term in every step is not built for groups of workers "
                f"(train.replica_size = {size}); use 0, another strategy, or a replica_size of 1"
            )

    def local_step(self, grads: Vector, local: Local) -> Vector:
        """The gradients of the loss and of the proximal term: + ρ·(w - z + u)."""
        if self.rho:
            n = len(grads)
            if _DUAL not in local.memory:  # zeros, where the replica computes; none for what no gradient moves
                local.memory[_DUAL] = local.base[:n] - local.base[:n]
            apart = local.weights[:n] - local.base[:n]
            apart += local.memory[_DUAL]
            apart *= self.rho
            grads += apart
        return grads

    def payload(self, local: Local) -> Vector:
        if (dual := local.memory.get(_DUAL)) is None:
            return local.weights
        pushed = local.weights.copy()
        pushed[: len(dual)] += dual
        return pushed

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """u += w - z, and z is the new anchor."""
        if (dual := local.memory.get(_DUAL)) is not None:
            dual += (local.weights - answer)[: len(dual)]
        if self.from_center:
            local.weights[...] = answer
        local.base, local.base_version = answer, version

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        merged, finite = weighted_sum([push.payload for push in pushes], [1 / len(pushes)] * len(pushes))
        return Merge(merged, state, finite=finite)
