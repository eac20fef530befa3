"""One range of the center with the rule's state, and the whole parameter server: a sequencer with one such range.

A merge makes a new array, which is marked read-only and never written again. So replies and snapshots share it without
copies, and no reader can see a half-merged one. Memory: the center, and the arrays that readers still hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from daskcnn.ps.average import AVERAGE, following
from daskcnn.ps.messages import Objection, Pace, Push, RuleState, Snapshot, Vector
from daskcnn.ps.rule import Merge, UpdateRule, View
from daskcnn.ps.sequencer import Sequencer, StepSharing, Vectors
from daskcnn.ps.vectors import all_finite, misfit


class Steps(Protocol):
    """The optimizer's steps of the center, or of a range of it. All arrays that it returns are new ones."""

    def begin(self, center: Vector) -> RuleState:
        """The optimizer's vectors before the first step from this center."""

    def step(self, center: Vector, kept: RuleState, gradients: Vector, pace: Pace) -> tuple[Vector, RuleState]:
        """The new center, and the optimizer's vectors behind the step. The gradients may be written to."""


class CenterRange(Vectors):
    """Holds one range of the center; the whole center is one range too.

    center: taken over, and never written again; ValueError if it is not a finite 1-D float vector. state: the rule's,
    of this range; taken over. None or empty: as before the first merge. kept: places in it that no merge changes.
    ema: the most that an average of the center keeps of itself at a merge; None: no average is kept. steps: the
    optimizer's, by what a rule merges that merges gradients; its vectors are of the state too.
    """

    def __init__(
        self,
        rule: UpdateRule,
        center: Vector,
        state: RuleState | None = None,
        kept: Sequence[slice] = (),
        ema: float | None = None,
        steps: Steps | None = None,
    ) -> None:
        if center.ndim != 1 or center.dtype.kind != "f" or not all_finite(center):
            raise ValueError(
                f"center={center.dtype}{center.shape}: must be a finite 1-D float vector; flatten the weights"
            )
        self.dtype = center.dtype.name
        self._rule, self._center, self._unchanged, self._ema = rule, _sealed(center), tuple(kept), ema
        self._steps = steps
        self._state = {name: _sealed(vector) for name, vector in state.items()} if state else rule.init(center)
        if steps is not None:
            self._state = _all_sealed(steps.begin(center)) | self._state
        if ema is not None:
            self._state.setdefault(AVERAGE, self._center)

    def objection(self, push: Push) -> Objection | None:
        return misfit(push.payload, self._center)

    def proposed(self, pushes: Sequence[Push], view: View) -> Merge | None:
        """The merge of the pushes, which is not made yet. None: center or state would not be finite."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            merge = self._rule.merge(self._center, self._state, pushes, view)
            merge = merge if self._steps is None else self._stepped(merge, self._steps)
        for place in self._unchanged:  # a mean of equal numbers may differ from them in the last bit
            merge.center[place] = self._center[place]
        if self._ema is not None:
            merge = self._averaged(merge, self._ema, view.version + 1)
        return merge if merge.finite or all(map(all_finite, (merge.center, *merge.state.values()))) else None

    def adopt(self, merge: Merge) -> None:
        """Take over a merge."""
        self._center, self._state = _sealed(merge.center), merge.state
        for reply in (merge.replies or {}).values():
            _sealed(reply)

    def merge(self, pushes: Sequence[Push], view: View) -> Merge | None:
        merge = self.proposed(pushes, view)
        if merge is not None:
            self.adopt(merge)
        return merge

    def _stepped(self, merge: Merge, steps: Steps) -> Merge:
        """The merge after a step by the gradient that it has found. Weights that others trained begin anew."""
        if merge.pace is None:
            return replace(merge, state={**merge.state, **_all_sealed(steps.begin(merge.center))})
        center, own = steps.step(self._center, self._state, merge.center, merge.pace)
        return replace(merge, center=center, state={**merge.state, **_all_sealed(own)})

    def _averaged(self, merge: Merge, ema: float, merges: int) -> Merge:
        """The merge, with the average that follows its center."""
        average = following(self._state[AVERAGE], merge.center, ema, merges)
        for place in self._unchanged:
            average[place] = self._center[place]
        state = {**merge.state, AVERAGE: _sealed(average)}
        return replace(merge, state=state, finite=merge.finite and all_finite(average))

    def given(self, worker: str, session: int, *, averaged: bool) -> Vector:
        return self._state.get(AVERAGE, self._center) if averaged else self._center

    def forget(self, push: Push) -> None:
        """Nothing is kept of a push that was not merged."""

    def drop(self, worker: str, session: int) -> None:
        """Nothing is kept for a session."""

    def kept(self) -> tuple[Vector, RuleState]:
        return self._center, self._state

    def validate(self) -> None:
        assert all_finite(self._center)
        assert not self._center.flags.writeable
        assert all(all_finite(vector) for vector in self._state.values())


def _all_sealed(vectors: Mapping[str, Vector]) -> RuleState:
    return {name: _sealed(vector) for name, vector in vectors.items()}


def _sealed(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector


class ParameterServer(Sequencer):
    """Holds the center and merges what is pushed, by the rule. `sequencer` says how it decides.

    center, state, kept, ema, steps: as for `CenterRange`, but copied. life: the number of this server in its run.
    version: the merges that the center has behind it. sharing: as for `Sequencer`.
    """

    def __init__(
        self,
        rule: UpdateRule,
        center: Vector,
        *,
        life: int = 0,
        version: int = 0,
        state: RuleState | None = None,
        kept: Sequence[slice] = (),
        ema: float | None = None,
        steps: Steps | None = None,
        sharing: StepSharing | None = None,
    ) -> None:
        copied = {name: vector.copy() for name, vector in (state or {}).items()}
        held = CenterRange(rule, center.copy(), copied, kept, ema, steps)
        super().__init__(rule, held, life=life, version=version, sharing=sharing)

    @classmethod
    def restore(
        cls,
        rule: UpdateRule,
        snapshot: Snapshot,
        *,
        life: int | None = None,
        kept: Sequence[slice] = (),
        ema: float | None = None,
        steps: Steps | None = None,
        sharing: StepSharing | None = None,
    ) -> ParameterServer:
        """A server that goes on from the snapshot, by default as the next life.

        Workers join it anew. It has no pushes that waited at the snapshot, and refuses what its predecessor was sent.
        """
        life = snapshot.life + 1 if life is None else life
        version, state = snapshot.version, snapshot.state
        own: dict[str, Any] = {"state": state, "kept": kept, "ema": ema, "steps": steps, "sharing": sharing}
        server = cls(rule, snapshot.center, life=life, version=version, **own)
        return server.resume(snapshot)
