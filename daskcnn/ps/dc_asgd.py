"""Asynchronous SGD with delay compensation (Zheng et al. 2017, arXiv 1609.08326, alg. 2 with the adaptive λ)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daskcnn.ps.messages import PAST, Push, RuleState, Vector
from daskcnn.ps.rule import AddsGains, Local, Merge, View, parameter
from daskcnn.ps.vectors import all_finite

_SQUARES = "squares"
_LEAST = 1e-30  # added to the root of the squares, which begin at 0
_BESIDES = 2  # vectors that are no earlier center: the squares, and an average of the center
_BLOCK = 1 << 15  # elements


class DCASGD(AddsGains):
    """Each push at once, made up for the delay: W_new = W + u - min(λ·u²/√s, 1)·(W - W_base).

    u = W_j - W_base is what the replica has gained, and s = m·s + (1 - m)·u² the mean square of what was pushed. u²
    stands for the curvature, as in the paper, whose η cancels: with u = -η·g this is W - η·(g + λ_t·g²·(W - W_base)),
    λ_t = λ/√(mean square of g). Ours is the bound, beyond which it would take back more than the center has moved. With
    λ = 0 it is Downpour. The server keeps the centers that workers train from.
    """

    every: int = parameter(
        1,
        "Steps between two pushes; 1 is the paper's, 0 the round's end.",
        "it counts the steps between two pushes; 0 is the round's end",
        ge=0,
    )
    compensation: float = parameter(
        2.0, "How much of the delay is made up for: λ.", "0 makes up for nothing, less would add to it", ge=0.0
    )
    memory: float = parameter(
        0.95, "Part of the mean square that is left after a push: m.", "it is a part below 1", ge=0.0, lt=1.0
    )

    @property
    def period(self) -> int | None:
        return self.every or None

    def payload(self, local: Local) -> Vector:
        """The gain W_j - W_base."""
        return local.weights - local.base

    def init(self, center: Vector) -> RuleState:
        """Mean squares of the gains."""
        return {_SQUARES: np.zeros_like(center)}

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The center plus the gain, made up for the way that the center has gone since."""
        (push,) = pushes
        base = state.get(_of(push.base_version), center)
        merged, squares = np.empty_like(center), np.empty_like(center)
        for lo in range(0, len(center), _BLOCK):
            part = slice(lo, lo + _BLOCK)
            gain, moved = push.payload[part], center[part] - base[part]
            square = gain * gain
            squares[part] = self.memory * state[_SQUARES][part] + (1 - self.memory) * square
            square *= self.compensation / (np.sqrt(squares[part]) + center.dtype.type(_LEAST))
            merged[part] = center[part] + gain - np.minimum(square, 1.0) * moved
        kept = _kept(center, state, push, view)
        return Merge(merged, {**kept, _SQUARES: squares}, finite=all_finite(merged) and all_finite(squares))


def _kept(center: Vector, state: RuleState, push: Push, view: View) -> RuleState:
    """The state with the centers that the others train from, by version. The pusher goes on from the new one."""
    versions, counts = view.bases.others(push.worker)
    needed, kept = versions[counts > 0], dict(state)
    if view.version in needed:
        kept[_of(view.version)] = center
    if push.base_version not in needed:
        kept.pop(_of(push.base_version), None)
    if len(kept) > 1.25 * len(needed) + _BESIDES:  # workers have left, or joined anew; rarely, as it looks at all names
        names = {_of(int(version)) for version in needed}
        kept = {name: vector for name, vector in kept.items() if name in names or not name.startswith(PAST)}
    return kept


def _of(version: int) -> str:
    return f"{PAST}{version}"
