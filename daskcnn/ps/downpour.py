"""Downpour SGD (Hegde & Usmani §5.2.1, alg. 4; Dean et al. 2012)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from daskcnn.ps.messages import Push, RuleState, Vector
from daskcnn.ps.rule import Action, AddsGains, Local, Merge, View, parameter
from daskcnn.ps.vectors import adagrad, add_scaled

_MARK, _ACCRUED, _SQUARES = "mark", "accrued", "squares"
_LEAST = 1e-8  # added to the root of the squares, which begin at 0


class Downpour(AddsGains):
    """A replica pushes the gain of its steps every n_push steps, and pulls the center every n_fetch.

    Both also at a round's end. server: "plain" adds what is pushed to the center; "adagrad" divides each number of it
    by the root of the sum of its squares so far, and adds that times server_lr. Then a factor on the replicas' learning
    rate changes nothing.
    """

    answers: ClassVar[Literal["center", "difference", "nothing"]] = "nothing"
    n_push: int = parameter(
        1, "Steps from one push to the next.", "it counts the steps from one push to the next", ge=1
    )
    n_fetch: int = parameter(
        1, "Steps from one pull to the next.", "it counts the steps from one pull to the next", ge=1
    )
    server: Literal["plain", "adagrad"] = Field(
        "plain", description="What the server does with a push: add it, or scale it by Adagrad first."
    )
    server_lr: float = parameter(
        0.001, "Learning rate of the server (`adagrad`).", "at 0 the center would stay where it is", gt=0.0
    )

    def at_usual_rate(self) -> Self:
        """Adagrad divides by what a factor of all pushes multiplies."""
        return super().at_usual_rate() if self.server == "plain" else self

    @property
    def period(self) -> int | None:
        return self.n_push

    def due(self, step: int, *, round_end: bool) -> frozenset[Action]:
        pull = {Action.PULL} if round_end or step % self.n_fetch == 0 else set()
        return super().due(step, round_end=round_end) | pull

    def payload(self, local: Local) -> Vector:
        """The gain since the last push; the next begins here."""
        accrued = self._accrued(local)
        local.memory[_MARK] = local.weights.copy()
        local.memory.pop(_ACCRUED, None)
        return accrued

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """A push brings nothing back."""

    def pulled(self, local: Local, center: Vector, version: int) -> None:
        """Go on from the center. What was not pushed yet is in the next push."""
        left = {} if self.n_fetch % self.n_push == 0 else {_ACCRUED: self._accrued(local)}  # else just pushed
        self.begin(local, center, version)
        local.memory.update(left)

    def _accrued(self, local: Local) -> Vector:
        accrued = local.weights - local.memory.get(_MARK, local.base)
        if _ACCRUED in local.memory:
            accrued += local.memory[_ACCRUED]
        return accrued

    def init(self, center: Vector) -> RuleState:
        """Sums of squared gradients for the Adagrad server; nothing for the plain one."""
        return {} if self.server == "plain" else {_SQUARES: np.zeros_like(center)}

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The center plus the push, which the Adagrad server scales by its sums of squares. The reply is empty."""
        (push,) = pushes
        nothing = {push.worker: np.empty(0, center.dtype)}
        if self.server == "plain":
            merged, finite = add_scaled(center, 1.0, push.payload)
            return Merge(merged, state, replies=nothing, finite=finite)
        merged, squares, finite = adagrad(center, state[_SQUARES], push.payload, self.server_lr, least=_LEAST)
        return Merge(merged, {_SQUARES: squares}, replies=nothing, finite=finite)
