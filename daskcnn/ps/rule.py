"""What an update rule is: how replicas and center meet. Both sides of it, as pure functions over explicit state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from daskcnn.ps.bases import Bases
from daskcnn.ps.events import Push, Vector

RuleState: TypeAlias = dict[str, Vector]
"""What a rule keeps on the server between merges, by name (an Adagrad server's sums of squares); most keep nothing."""


class Action(StrEnum):
    """What a replica does after a step."""

    PUSH = "push"
    PULL = "pull"


@dataclass(slots=True)
class Local:
    """A replica's side. All vectors lie on the host and have the center's length and dtype.

    weights: trained in place. base: the center they started from, never written. memory: what the rule keeps besides,
    by name (ADMM's dual variables, Downpour's accrued gradients).
    """

    weights: Vector
    base: Vector
    base_version: int = 0
    memory: dict[str, Vector] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    """What a rule may know of the server. version: merges so far. expected: pushes that a barrier waits for."""

    version: int
    expected: int
    bases: Bases

    def others(self, worker: str) -> npt.NDArray[np.float64]:
        """The versions that all other workers train from now."""
        return self.bases.others(worker)


@dataclass(frozen=True, slots=True)
class Merge:
    """A new center (a new array), the rule's new state, what each pusher is told (None: the center) and its γ."""

    center: Vector
    state: RuleState = field(default_factory=dict)
    replies: Mapping[str, Vector] | None = None
    gamma: Mapping[str, float] = field(default_factory=dict)


class UpdateRule(BaseModel, ABC):
    """One rule; its fields are the parameters of the job's `[rule]` table, unknown ones are refused.

    barrier: whether the pushes of all workers are merged together, or each as it comes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    barrier: ClassVar[bool]

    # --- the replica's side ---

    def local_step(self, grads: Vector, local: Local) -> Vector:
        """The gradients to descend by, given the loss's own; ADMM adds its proximal term here."""
        return grads

    def due(self, step: int, *, round_end: bool) -> frozenset[Action]:
        """What to do after this step, counted from 1 since the last join: here a push at the round's end.

        A push's reply brings the center; PULL is for rules that pull at other times than they push.
        """
        return frozenset({Action.PUSH}) if round_end else frozenset()

    @abstractmethod
    def payload(self, local: Local) -> Vector:
        """What is pushed. May be `local.weights` itself: the receiver copies what it keeps."""

    def adopt(self, local: Local, weights: Vector, version: int) -> None:
        """Go on from a reply: here, from the center."""
        np.copyto(local.weights, weights)
        local.base, local.base_version = weights, version

    # --- the server's side ---

    def init(self, center: Vector) -> RuleState:
        """The state before the first merge."""
        return {}

    def ready(self, pending: Mapping[str, Push], view: View) -> tuple[Push, ...]:
        """Those of the waiting pushes (by worker, in order of arrival) to merge now, all in one; none: wait.

        A barrier's come in the order of their workers' names, so that the sum does not depend on who came first.
        """
        if not self.barrier:
            return tuple(pending.values())[:1]
        return tuple(pending[worker] for worker in sorted(pending)) if len(pending) >= view.expected else ()

    @abstractmethod
    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The new center. `center`, `state` and the pushes are not changed; `view` is from before the merge."""


class AccuracyWeighted(UpdateRule):
    """A rule that goes by Q, the accuracy of the local weights.

    accuracy_on: Q is measured on the validation slice, the same for every replica, or is the round's training accuracy.
    """

    accuracy_on: Literal["validation", "train"] = "validation"
