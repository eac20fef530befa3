"""The center split over ranges on several machines: orders that a sequencer gives, and ranges that carry them out.

A `SplitCenter` stands beside the sequencer in place of the vectors, and turns what it wants done into orders, numbered
without gaps. Every `OrderedRange` holds its part of the center and carries out all orders by their numbers. So all
ranges go through the very same versions, whenever the orders reach them.

Pushes. The pieces of a payload are first *staged* in the ranges, under a ticket that is new for every try, and checked.
Then the sequencer is told of the push, with a `StagedPayload` as its payload. An order to merge names the tickets, so a
piece takes part only if the push that it was staged for was accepted; those of all others are ordered away.

Merges. First every range works the merge out and votes, as its part may not be finite. If all votes are for it, every
range is ordered to adopt it; else every range drops it.

Answers. The weights of a reply are what the ranges hold for the worker after the order of one number, for which a
`StoredVector` stands: its pieces cannot be of two versions. A range keeps an answer until it was read and a later one
was given, and the answer to the last push, which may be repeated. Nothing that was given out is ever written to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from daskcnn.ps.gradient_noise import added_up
from daskcnn.ps.interfaces import Vectors
from daskcnn.ps.messages import Code, MergeFailed, Objection, Push, RuleState, Snapshot, Vector, failure
from daskcnn.ps.rule import Merge, UpdateRule, View
from daskcnn.ps.server import CenterRange, Steps
from daskcnn.ps.vectors import cut_state, whole_vector, wrong_shape
from daskcnn.ps.wire import CODED, Wire

Span: TypeAlias = tuple[int, int]
_NONE = (-math.inf, 0.0)  # before every session


def spans(size: int, parts: int, unit: int = 1) -> tuple[Span, ...]:
    """A vector's length cut into ranges, equal within one unit. Raises ValueError where one would be empty.

    unit: of these many numbers none is cut.
    """
    units = -(-size // unit)
    if not 1 <= parts <= units:
        raise ValueError(
            f"ps_shards={parts}: a vector of {size} numbers has 1 to {units} ranges; set cluster.ps_shards"
        )
    cuts = [min(size, units * i // parts * unit) for i in range(parts + 1)]
    return tuple(pairwise(cuts))


def split_snapshot(snapshot: Snapshot, cuts: Sequence[Span]) -> list[Snapshot]:
    """The snapshot of each range: copies, so that a piece does not keep the whole."""

    def part(lo: int, hi: int) -> RuleState:
        return {name: vector.copy() for name, vector in cut_state(snapshot.state or {}, lo, hi).items()}

    return [replace(snapshot, center=snapshot.center[lo:hi].copy(), state=part(lo, hi)) for lo, hi in cuts]


def joined_snapshot(snapshot: Snapshot, pieces: Sequence[Snapshot]) -> Snapshot:
    """The sequencer's snapshot with the vectors that the ranges kept for it."""
    states = [piece.state or {} for piece in pieces]
    state = {name: whole_vector(name, [own[name] for own in states]) for name in states[0]}
    return replace(snapshot, center=np.concatenate([piece.center for piece in pieces]), state=state)


# --- what stands for vectors that lie in the ranges ---


@dataclass(frozen=True, slots=True)
class StagedPayload:
    """Stands for a payload whose pieces were staged under this ticket, new for every try; and the first objection."""

    ticket: str
    shape: tuple[int, ...]
    objection: Objection | None = None


@dataclass(frozen=True, slots=True)
class StoredVector:
    """Stands for weights whose pieces lie in the ranges once these have carried out the order of this number."""

    number: int


# --- orders ---


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """Work out the merge of these pushes, whose payloads are staged, with this view of the server, and vote on it."""

    number: int
    pushes: tuple[Push, ...]
    view: View


@dataclass(frozen=True, slots=True)
class SettleOrder:
    """Adopt the merge that was worked out last, or drop it."""

    number: int
    adopt: bool


@dataclass(frozen=True, slots=True)
class HandOrder:
    """Keep the center as it is now, or its average, for this session of the worker to read."""

    number: int
    worker: str
    session: int
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """Keep center and state as they are now, for a snapshot."""

    number: int


@dataclass(frozen=True, slots=True)
class ForgetOrder:
    """Drop the piece that was staged under this ticket."""

    number: int
    worker: str
    ticket: str


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Drop everything that is kept for this session of the worker and for earlier ones."""

    number: int
    worker: str
    session: int


RangeOrder: TypeAlias = MergeOrder | SettleOrder | HandOrder | KeepOrder | ForgetOrder | DropOrder


@dataclass(frozen=True, slots=True)
class Vote:
    """A range's opinion of a merge. finite: whether its part would be. gamma, squares: the merge's.

    failed: why the range could not work it out; None: it could.
    """

    finite: bool
    gamma: Mapping[str, float] = field(default_factory=dict)
    squares: tuple[float, ...] = ()
    failed: Objection | None = None


# --- beside the sequencer ---


class SplitCenter(Vectors):
    """The vectors of a sequencer whose ranges lie elsewhere. like: an array of the center's dtype. size: of a push.

    send: sends an order to every range, and does not wait. Orders may arrive in any order, and more than once.
    ask: sends an order to merge to every range, and returns all their votes.
    """

    def __init__(
        self,
        rule: UpdateRule,
        like: Vector,
        size: int,
        *,
        send: Callable[[RangeOrder], None],
        ask: Callable[[MergeOrder], Sequence[Vote]],
    ) -> None:
        self.dtype = like.dtype.name
        self._rule, self._nothing, self._shape = rule, like[:0].copy(), (size,)
        self._send, self._ask = send, ask
        self._numbers = 0

    def objection(self, push: Push) -> Objection | None:
        staged = _staged(push)
        if staged.shape != self._shape and not (staged.objection and staged.objection.code == Code.DTYPE):
            return Objection(Code.LENGTH, wrong_shape(staged.shape, self._shape))
        return staged.objection

    def merge(self, pushes: Sequence[Push], view: View) -> Merge | None:
        """Merge the pushes in all ranges, or in none if the result would not be finite in one of them.

        Raises MergeFailed where one cannot work it out.
        """
        bases = view.bases.known_to(push.worker for push in pushes)  # clocks only say which pushes are ready
        votes = self._ask(MergeOrder(self._number(), tuple(pushes), View(view.version, view.expected, bases)))
        settled = SettleOrder(self._number(), adopt=all(vote.finite for vote in votes))
        self._send(settled)
        if failed := next((vote.failed for vote in votes if vote.failed), None):
            raise MergeFailed(failed)
        if not settled.adopt:
            return None
        if self._rule.answers == "nothing":
            replies = dict.fromkeys((push.worker for push in pushes), self._nothing)
            return Merge(self._nothing, replies=replies, gamma=votes[0].gamma)
        weights: Any = StoredVector(settled.number)
        return Merge(weights, gamma=votes[0].gamma, squares=added_up([vote.squares for vote in votes]))

    def ahead(self, lo: int, hi: int, pushes: Sequence[Push], view: View) -> Vector | None:
        """None: pushes are staged whole."""
        return None

    def given(self, worker: str, session: int, *, averaged: bool) -> Vector:
        weights: Any = StoredVector(self._number())
        self._send(HandOrder(weights.number, worker, session, averaged))
        return weights

    def forget(self, push: Push) -> None:
        """The push will not be merged: its pieces are dropped."""
        self._send(ForgetOrder(self._number(), push.worker, _staged(push).ticket))

    def drop(self, worker: str, session: int) -> None:
        self._send(DropOrder(self._number(), worker, session))

    def kept(self) -> tuple[Vector, RuleState]:
        """A stand-in for the center; each range keeps its snapshot under that number."""
        center: Any = StoredVector(self._number())
        self._send(KeepOrder(center.number))
        return center, {}

    def validate(self) -> None:
        """Nothing here changes but the number of the next order."""

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers - 1


def _staged(push: Push) -> StagedPayload:
    payload: Any = push.payload
    assert isinstance(payload, StagedPayload), "a push to a split server has its payload in the ranges"
    return payload


# --- where the vectors are ---


@dataclass(frozen=True, slots=True)
class _Piece:
    """A push's piece that was staged."""

    session: int
    seq: int
    values: Vector


@dataclass(slots=True)
class _Answers:
    """The answers that a worker's session may read, by the orders' numbers. pushed: the answer to its last push."""

    session: int
    vectors: dict[int, Vector] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    pushed: int = -1

    def add(self, number: int, vector: Vector, *, pushed: bool) -> None:
        if pushed:
            self.pushed = number
        for old in self.read - {self.pushed}:
            del self.vectors[old]
        self.read &= {self.pushed}
        self.vectors[number] = vector


class OrderedRange:
    """One range of the center, which carries out numbered orders. The arguments are as for `CenterRange`."""

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
        self._range = CenterRange(rule, center, state, kept, ema, steps, besides, wire=wire)
        self._like = np.empty(0, CODED) if Wire.of(wire, rule).coded else center[:0]
        self._orders: dict[int, RangeOrder] = {}  # that came before their turn
        self._staged: dict[str, dict[str, _Piece]] = {}  # by worker and ticket
        self._answers: dict[str, _Answers] = {}
        self._over: dict[str, float] = {}  # each worker's last session that was dropped
        self._proposed: tuple[MergeOrder, Merge | None] | None = None
        self._voted: tuple[int, Vote] | None = None
        self._kept: tuple[int, Snapshot] | None = None
        self.done = 0
        """The number of the next order."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The center's, or that of coded vectors. Pieces that are staged have to have it."""
        return self._like.dtype

    def stage(self, push: Push, ticket: str) -> Objection | None:
        """Keep this range's piece of a push, its payload, until an order says what becomes of it.

        The piece must not be written to any more. Returns why the range cannot take it.
        """
        if objection := self._range.objection(push):
            return objection
        if push.session <= self._over.get(push.worker, -math.inf):  # the sequencer will refuse the push
            return None
        self._staged.setdefault(push.worker, {})[ticket] = _Piece(push.session, push.seq, push.payload)
        return None

    def take(self, orders: Iterable[RangeOrder]) -> None:
        """Carry out these orders, each in its turn. They may come in any order, and more than once."""
        self._orders |= {order.number: order for order in orders if order.number >= self.done}
        while (order := self._orders.pop(self.done, None)) is not None:
            self._carry_out(order)
            self.done += 1

    def vote(self, number: int) -> Vote:
        """The vote on the merge of this number, which was worked out last."""
        assert self._voted is not None
        assert self._voted[0] == number, f"merge {number}: the last that was voted on is {self._voted[0]}"
        return self._voted[1]

    def answer(self, worker: str, number: int) -> Vector:
        """The piece of the answer that the order of this number gave to the worker; the order was carried out.

        Read-only. Raises LookupError if the worker has read it and had a later one since, or has left.
        """
        answers = self._answers.get(worker)
        if answers is None or number not in answers.vectors:
            raise LookupError(f"answer {number}: {worker} has had a later one, or left; join again as a new session")
        answers.read.add(number)
        return answers.vectors[number]

    def kept(self, number: int) -> Snapshot:
        """This range's part of a snapshot. Raises LookupError if a later one took its place."""
        if self._kept is None or self._kept[0] != number:
            raise LookupError(f"snapshot {number}: a later one took its place; ask for another")
        return self._kept[1]

    def go_on_with(self, state: RuleState) -> None:
        """Take over these vectors of this range's state, once all orders so far were carried out. They are copied."""
        self._range.go_on_with(state)

    def validate(self) -> None:
        """Assert that orders are carried out in turn."""
        self._range.validate()
        assert all(number > self.done for number in self._orders), "an order was not carried out in its turn"
        for answers in self._answers.values():
            assert answers.read <= answers.vectors.keys()

    @property
    def kept_for(self) -> dict[str, tuple[int, int]]:
        """The pieces and the answers that are kept for each worker."""
        workers = self._staged.keys() | self._answers.keys()
        return {
            w: (len(self._staged.get(w, ())), len(a.vectors) if (a := self._answers.get(w)) else 0) for w in workers
        }

    def _carry_out(self, order: RangeOrder) -> None:
        match order:
            case MergeOrder():
                self._propose(order)
            case SettleOrder():
                self._settle(order)
            case HandOrder(number=number, worker=worker, session=session, averaged=averaged):
                given = self._range.given(worker, session, averaged=averaged)
                self._give(worker, session, number, given, pushed=False)
            case KeepOrder(number=number):
                center, state = self._range.kept()
                self._kept = number, Snapshot(center, state=dict(state))
            case ForgetOrder(worker=worker, ticket=ticket):
                self._unstage(worker, ticket=ticket)
            case DropOrder(worker=worker, session=session):
                self._drop(worker, session)

    def _propose(self, order: MergeOrder) -> None:
        pieces = [self._staged[push.worker][_staged(push).ticket].values for push in order.pushes]
        pushes = [replace(push, payload=piece) for push, piece in zip(order.pushes, pieces, strict=True)]
        merge, failed = None, None
        try:
            merge = self._range.proposed(pushes, order.view)
        except Exception as error:  # a user's rule may raise any
            failed = failure(error)
        self._proposed = order, merge
        self._voted = order.number, Vote(True, merge.gamma, merge.squares) if merge else Vote(False, failed=failed)

    def _settle(self, order: SettleOrder) -> None:
        assert self._proposed is not None, "no merge was worked out"
        (proposed, merge), self._proposed = self._proposed, None
        if order.adopt:
            assert merge is not None, "a merge that is not finite"
            merge = self._range.adopt(merge, [push.worker for push in proposed.pushes])
            for push in proposed.pushes:
                answer = merge.center if merge.replies is None else merge.replies[push.worker]
                if answer.size:
                    self._give(push.worker, push.session, order.number, answer, pushed=True)
        for push in proposed.pushes:
            # once it is merged, no earlier push of the worker can be accepted
            until: tuple[float, float] = (push.session, push.seq) if order.adopt else _NONE
            self._unstage(push.worker, ticket=_staged(push).ticket, until=until)

    def _give(self, worker: str, session: int, number: int, vector: Vector, *, pushed: bool) -> None:
        answers = self._answers.get(worker)
        if answers is None or answers.session < session:
            answers = self._answers[worker] = _Answers(session)
        answers.add(number, vector, pushed=pushed)

    def _drop(self, worker: str, session: int) -> None:
        if (answers := self._answers.get(worker)) and answers.session <= session:
            del self._answers[worker]
        self._over[worker] = max(session, self._over.get(worker, session))
        self._unstage(worker, until=(session, math.inf))

    def _unstage(self, worker: str, *, ticket: str = "", until: tuple[float, float] = _NONE) -> None:
        """Drop the worker's piece of this ticket, and those up to this session and seq."""
        pieces = self._staged.pop(worker, {})
        left = {t: piece for t, piece in pieces.items() if t != ticket and (piece.session, piece.seq) > until}
        if left:
            self._staged[worker] = left
