"""One range of the center with the rule's state, and the whole parameter server: a sequencer with one such range.

A merge makes a new array, which is marked read-only and never written again. So replies and snapshots share it without
copies, and no reader can see a half-merged one. Memory: the center, and the arrays that readers still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np

from daskcnn.ps.average import AVERAGE, following
from daskcnn.ps.gradient_noise import added_up, takes_norms
from daskcnn.ps.interfaces import StepSharing, Vectors
from daskcnn.ps.messages import PAST, Objection, Pace, Push, RuleState, Snapshot, Vector
from daskcnn.ps.rule import Merge, UpdateRule, View
from daskcnn.ps.sequencer import Sequencer
from daskcnn.ps.vectors import all_finite, cut_state, misfit, whole_vector, within
from daskcnn.ps.wire import Wire, decode, encode, misfit_of_coded


class Steps(Protocol):
    """The optimizer's steps of the center, or of a range of it. All arrays that it returns are new ones."""

    @property
    def parameters(self) -> int:
        """The numbers that are stepped by gradients. They come first."""

    @property
    def splits(self) -> bool:
        """True if a part of the center can step without the others."""

    def part(self, lo: int, hi: int) -> Steps:
        """The steps of the numbers lo…hi."""

    def begin(self, center: Vector) -> RuleState:
        """The optimizer's vectors before the first step from this center."""

    def step(self, center: Vector, kept: RuleState, gradients: Vector, pace: Pace) -> tuple[Vector, RuleState]:
        """The new center, and the optimizer's vectors behind the step. The gradients may be written to."""


class CenterRange(Vectors):
    """Holds one range of the center; the whole center is one range too.

    center: taken over, and never written again; ValueError if it is not a finite 1-D float vector. state: the rule's,
    of this range; taken over. None or empty: as before the first merge. kept: places in it that no merge changes.
    ema: the most that an average of the center keeps of itself at a merge; None: no average is kept. steps: the
    optimizer's, by what a rule merges that merges gradients; its vectors are of the state too. besides: places of what
    layers keep besides parameters, which follow the mean of the replicas where a rule goes beyond that. wire: as in
    `[cluster]`; what is pushed and answered goes by it (`Wire`).
    """

    def __init__(
        self,
        rule: UpdateRule,
        center: Vector,
        state: RuleState | None = None,
        kept: Sequence[slice] = (),
        ema: float | None = None,
        steps: Steps | None = None,
        besides: Sequence[slice] = (),
        *,
        wire: str = "float32",
    ) -> None:
        if center.ndim != 1 or center.dtype.kind != "f" or not all_finite(center):
            raise ValueError(
                f"center={center.dtype}{center.shape}: must be a finite 1-D float vector; flatten the weights"
            )
        self.dtype = center.dtype.name
        self._rule, self._center, self._unchanged, self._ema = rule, _sealed(center), tuple(kept), ema
        self._steps, self._besides = steps, tuple(besides)
        self._steps_of = cache(steps.part) if steps is not None and steps.splits else None
        self._ahead = _Ahead()
        self._state = {name: _sealed(vector) for name, vector in state.items()} if state else rule.init(center)
        if steps is not None:
            self._state = _all_sealed(steps.begin(center)) | self._state
        if ema is not None:
            self._state.setdefault(AVERAGE, self._center)
        self._way = Wire.of(wire, rule)
        self._told = self._center if self._way.changes else None  # of the center, by changes

    def objection(self, push: Push) -> Objection | None:
        if self._way.coded:
            return misfit_of_coded(push.payload, len(self._center))
        return misfit(push.payload, self._center)

    def ahead(self, lo: int, hi: int, pushes: Sequence[Push], view: View) -> Vector | None:
        """The center's numbers lo…hi after the merge of these pushes, of whose payloads there are these numbers alone.

        They are the result if the same pushes are merged next. None: they have to wait for the rest.
        """
        if self._steps_of is None:
            return None
        if self._ahead.of != (key := _key(pushes, view)):
            self._ahead = _Ahead(key, len(self._center))
        if hi != self._ahead.lo or not 0 < lo < hi or (merge := self._part(lo, hi, pushes, view)) is None:
            return None
        self._ahead.lo = lo
        self._ahead.merges.insert(0, merge)
        return merge.center

    def proposed(self, pushes: Sequence[Push], view: View) -> Merge | None:
        """The merge of the pushes, which is not made yet. None: center or state would not be finite."""
        ahead, self._ahead = self._ahead, _Ahead()
        pushes = [self._way.received(push, self._center, self._rule) for push in pushes]
        if ahead.of != _key(pushes, view) or not ahead.merges:
            return self._part(0, len(self._center), pushes, view)
        front = [replace(push, payload=push.payload[: ahead.lo]) for push in pushes]
        merge = self._part(0, ahead.lo, front, view)
        return None if merge is None else _joined([merge, *ahead.merges], ahead.lo)

    def _part(self, lo: int, hi: int, pushes: Sequence[Push], view: View) -> Merge | None:
        """The merge of the numbers lo…hi, which the payloads are of. None: it would not be finite."""
        whole = hi - lo == len(self._center)
        center, state = (self._center, self._state) if whole else (self._center[lo:hi], cut_state(self._state, lo, hi))
        steps = self._steps if whole or self._steps_of is None else self._steps_of(lo, hi)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            merge = self._rule.merge(center, state, pushes, view)
            if steps is not None:
                merge = _stepped(center, state, _normed(merge, pushes, view, steps.parameters), steps)
        if self._rule.overshoots:
            for place in self._besides if whole else within(self._besides, lo, hi):
                there = [replace(push, payload=push.payload[place]) for push in pushes]
                merge.center[place] = self._rule.mean(center[place], there, view, coded=self._way.coded)
        unchanged = self._unchanged if whole else within(self._unchanged, lo, hi)
        for place in unchanged:  # a mean of equal numbers may differ from them in the last bit
            merge.center[place] = center[place]
        if self._ema is not None:
            average = following(state[AVERAGE], merge.center, self._ema, view.version + 1)
            for place in unchanged:
                average[place] = center[place]
            finite = merge.finite and all_finite(average)
            merge = replace(merge, state={**merge.state, AVERAGE: _sealed(average)}, finite=finite)
        return merge if merge.finite or all(map(all_finite, (merge.center, *merge.state.values()))) else None

    def adopt(self, merge: Merge, workers: Iterable[str]) -> Merge:
        """Take over a merge of these workers' pushes. Returns it with what they are told."""
        self._center, self._state = _sealed(merge.center), merge.state
        if self._told is not None:
            change = encode(self._center - self._told)
            self._told = _sealed(self._told + decode(change, len(self._told), self._told.dtype))
            merge = replace(merge, replies=dict.fromkeys(workers, change))
        for reply in (merge.replies or {}).values():
            _sealed(reply)
        return merge

    def merge(self, pushes: Sequence[Push], view: View) -> Merge | None:
        merge = self.proposed(pushes, view)
        return None if merge is None else self.adopt(merge, [push.worker for push in pushes])

    def given(self, worker: str, session: int, *, averaged: bool) -> Vector:
        known = self._center if self._told is None else self._told
        return self._state.get(AVERAGE, self._center) if averaged else known

    def forget(self, push: Push) -> None:
        """Nothing is kept of a push that was not merged."""

    def drop(self, worker: str, session: int) -> None:
        """Nothing is kept for a session."""

    def kept(self) -> tuple[Vector, RuleState]:
        return self._center, {name: vector for name, vector in self._state.items() if not name.startswith(PAST)}

    def go_on_with(self, state: RuleState) -> None:
        """Take over these vectors of the state, which a worker that was alone has brought forward. They are copied."""
        self._state = self._state | _all_sealed({name: vector.copy() for name, vector in state.items()})

    def validate(self) -> None:
        assert all_finite(self._center)
        assert not self._center.flags.writeable
        assert all(all_finite(vector) for vector in self._state.values())


@dataclass(slots=True)
class _Ahead:
    """Parts of the next merge: of which pushes, from which number on, and the merges of the parts in order."""

    of: object = None
    lo: int = 0
    merges: list[Merge] = field(default_factory=list)


def _key(pushes: Sequence[Push], view: View) -> object:
    """All that a merge of gradients depends on, payloads included: each has another ticket."""
    return view.version, [(push.worker, push.session, push.ticket, push.n_samples, push.pace) for push in pushes]


def _joined(parts: Sequence[Merge], ahead: int) -> Merge:
    """The merge of the whole center that these are the parts of."""
    state = _all_sealed({name: whole_vector(name, [part.state[name] for part in parts]) for name in parts[0].state})
    whole: dict[str, Any] = {"center": np.concatenate([part.center for part in parts]), "state": state}
    return replace(parts[0], **whole, ahead=ahead, squares=added_up([part.squares for part in parts]))


def _normed(merge: Merge, pushes: Sequence[Push], view: View, parameters: int) -> Merge:
    """The merge of gradients, at some meetings with their squared norms."""
    if merge.pace is None or len(pushes) < 2 or not takes_norms(view.version):
        return merge
    gradients = [vector[:parameters] for vector in (*(push.payload for push in pushes), merge.center)]
    return replace(merge, squares=tuple(float(np.vdot(each, each)) for each in gradients))


def _stepped(center: Vector, state: RuleState, merge: Merge, steps: Steps) -> Merge:
    """The merge after a step by the gradient that it has found. Weights that others trained begin anew.

    The optimizer's state that belongs to those is brought before the next step (`CenterRange.go_on_with`).
    """
    if merge.pace is None:
        return replace(merge, state={**merge.state, **_all_sealed(steps.begin(merge.center))})
    new, own = steps.step(center, state, merge.center, merge.pace)
    return replace(merge, center=new, state={**merge.state, **_all_sealed(own)})


def _all_sealed(vectors: Mapping[str, Vector]) -> RuleState:
    return {name: _sealed(vector) for name, vector in vectors.items()}


def _sealed(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector


class ParameterServer(Sequencer):
    """Holds the center and merges what is pushed, by the rule. `sequencer` says how it decides.

    center, state, kept, ema, steps, besides: as for `CenterRange`, but copied. life: the number of this server in its
    run. version: the merges that the center has behind it. sharing: as for `Sequencer`. wire: as for `CenterRange`.
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
        besides: Sequence[slice] = (),
        sharing: StepSharing | None = None,
        wire: str = "float32",
    ) -> None:
        copied = {name: vector.copy() for name, vector in (state or {}).items()}
        held = CenterRange(rule, center.copy(), copied, kept, ema, steps, besides, wire=wire)
        super().__init__(rule, held, life=life, version=version, sharing=sharing)
        self._held = held

    def go_on_with(self, state: RuleState) -> None:
        """Take over these vectors of the state, between two merges. They are copied."""
        self._held.go_on_with(state)

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
        besides: Sequence[slice] = (),
        sharing: StepSharing | None = None,
        wire: str = "float32",
    ) -> ParameterServer:
        """A server that goes on from the snapshot, by default as the next life.

        Workers join it anew. It has no pushes that waited at the snapshot, and refuses what its predecessor was sent.
        """
        life = snapshot.life + 1 if life is None else life
        version, state = snapshot.version, snapshot.state
        own: dict[str, Any] = {"state": state, "kept": kept, "ema": ema, "steps": steps, "besides": besides}
        server = cls(rule, snapshot.center, life=life, version=version, sharing=sharing, wire=wire, **own)
        return server.resume(snapshot)
