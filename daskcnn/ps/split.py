"""The parameter server split over ranges of the vector, without I/O: one sequencer, and a store for each range.

Theory of operation. The `Sequencer` runs the state machine of `server` on pushes whose payloads it does not see, so
that order, version and γ are decided once. What it decides that concerns the vectors it writes down as *orders*,
numbered without gaps. Every `Range` holds its part of the center and carries out all orders by their numbers, with the
rule's own `merge`; so all ranges go through the very same versions, whenever the orders reach them.

Pushes. A payload is cut into pieces, which are *staged* in the ranges first and checked there; then the sequencer is
told of the push, and of the objection of any range. It refuses such a push as a whole; a staged piece changes nothing.

Answers. Each is what the ranges hold for a worker after the order of one number, which the sequencer gives. Who takes
the pieces of the same number from all ranges cannot have parts of two versions, and takes them when it likes: a range
keeps each worker's last answer of a push and of a pull. Nothing that was given out is ever written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from daskcnn.ps.events import Event, Leave, Push, Vector
from daskcnn.ps.instructions import Code, Evict, Instruction, Refuse, Reply
from daskcnn.ps.rule import Merge, RuleState, UpdateRule, View
from daskcnn.ps.server import ParameterServer
from daskcnn.ps.snapshot import Snapshot
from daskcnn.ps.vectors import all_finite, misfit

Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a range cannot take its piece of a push."""

    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Merged:
    """These pushes (without payloads) are merged, with this view of the server: each answer is the rule's."""

    number: int
    pushes: tuple[Push, ...]
    view: View


@dataclass(frozen=True, slots=True)
class Handed:
    """The worker is given the center."""

    number: int
    worker: str
    session: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Center and state are to be kept as they are now, for a snapshot."""

    number: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The worker's session is over: nothing of it need be held any longer."""

    number: int
    worker: str
    session: int


Order: TypeAlias = Merged | Handed | Kept | Dropped


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be done now; after which order's number the weights of a reply lie in the ranges (-1: none do)."""

    instruction: Instruction
    number: int = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from an event: orders for every range, and answers, whose weights are only a witness."""

    orders: tuple[Order, ...]
    answers: tuple[Answer, ...]


def spans(size: int, parts: int) -> tuple[Span, ...]:
    """A vector's length cut into so many ranges, equal within one. Raises ValueError where one would be empty."""
    if not 1 <= parts <= size:
        raise ValueError(f"ps_shards={parts}: a vector of {size} numbers has 1 to {size} ranges; set cluster.ps_shards")
    return tuple((size * i // parts, size * (i + 1) // parts) for i in range(parts))


class _Witnessed(ParameterServer):
    """The state machine, which remembers what it merged and what it knew then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.merges: list[tuple[tuple[Push, ...], View]] = []

    def _apply(self, merge: Merge, batch: tuple[Push, ...], at: float) -> list[Instruction]:
        view = self._view()
        bases = view.bases.known_to(push.worker for push in batch)
        self.merges.append((batch, View(view.version, view.expected, bases)))  # the clocks have said who is ready
        return super()._apply(merge, batch, at)


class Sequencer:
    """Decides for all ranges. snapshot: of the last server; its vectors are not looked at but for the dtype."""

    def __init__(self, rule: UpdateRule, snapshot: Snapshot, *, epoch: int) -> None:
        self._dtype = snapshot.center.dtype
        witness = replace(snapshot, center=np.zeros(1, self._dtype), state=None)
        self._server = _Witnessed.restore(rule, witness, epoch=epoch)
        self._numbers = 0
        self._pushed: dict[str, tuple[int, int, int]] = {}  # each worker's session, seq and order, last merged

    def handle(self, event: Event, objection: Objection | None = None) -> Decision:
        """Take an event in; a push once all of its pieces are staged, with the objection of a range, if one has any."""
        if isinstance(event, Push):
            event = replace(event, payload=self._witness(objection))
        instructions = self._server.handle(event)
        assert isinstance(self._server, _Witnessed)
        merges, self._server.merges = self._server.merges, []
        orders: list[Order] = []
        answers = [self._answer(i, event, merges, orders, objection) for i in instructions]
        if isinstance(event, Leave):
            orders.append(Dropped(self._number(), event.worker, event.session))
        return Decision(tuple(orders), tuple(answers))

    def snapshot(self) -> tuple[Snapshot, Kept]:
        """All of a snapshot but its vectors, and the order after which the ranges hold those."""
        return self._server.snapshot(), Kept(self._number())

    def validate(self) -> None:
        """Assert every invariant that holds between two events."""
        self._server.validate()
        assert isinstance(self._server, _Witnessed)
        assert not self._server.merges, "merges that no range was told of"

    def _answer(
        self,
        instruction: Instruction,
        event: Event,
        merges: list[tuple[tuple[Push, ...], View]],
        orders: list[Order],
        objection: Objection | None,
    ) -> Answer:
        """The answer, with the orders that come before it put at the end of those."""
        match instruction:
            case Refuse(code=code) if objection is not None and code == objection.code:
                return Answer(replace(instruction, reason=objection.reason))
            case Evict(worker=worker, session=session):
                orders.append(Dropped(self._number(), worker, session))
            case Reply():
                while merges and merges[0][1].version < instruction.version:
                    orders.append(self._merged(*merges.pop(0)))
                return Answer(instruction, self._place(instruction, event, orders))
        return Answer(instruction)

    def _merged(self, batch: tuple[Push, ...], view: View) -> Merged:
        order = Merged(self._number(), batch, view)
        for push in batch:
            self._pushed[push.worker] = (push.session, push.seq, order.number)
        return order

    def _place(self, reply: Reply, event: Event, orders: list[Order]) -> int:
        """The order after which the ranges hold the reply's weights; one of its own where it answers no push."""
        session, seq, number = self._pushed.get(reply.worker, (0, 0, -1))
        now = any(order.number == number for order in orders)
        if (session, seq) == (reply.session, reply.seq) and (now or isinstance(event, Push)):
            return number
        orders.append(Handed(self._number(), reply.worker, reply.session))
        return orders[-1].number

    def _witness(self, objection: Objection | None) -> Vector:
        """Stands for a payload, and is wrong in the way that the payload was."""
        match objection and objection.code:
            case None:
                return np.zeros(1, self._dtype)
            case Code.LENGTH:
                return np.zeros(2, self._dtype)
            case Code.DTYPE:
                return np.zeros(1, bool)
        return np.full(1, np.nan, self._dtype)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers - 1


@dataclass(slots=True)
class _Piece:
    """Of a push that waits: its piece."""

    session: int
    seq: int
    values: Vector


@dataclass(slots=True)
class _Held:
    """What a worker's session may still ask for, each with its order's number."""

    session: int
    pushed: tuple[int, Vector] | None = None
    handed: tuple[int, Vector] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A range's part of a snapshot."""

    center: Vector = field(repr=False)
    state: Mapping[str, Vector] = field(repr=False)


class Range:
    """One range of the center: 1-D and finite, taken over and never written again. state: the rule's, of this range."""

    def __init__(self, rule: UpdateRule, center: Vector, state: Mapping[str, Vector] | None = None) -> None:
        self._rule, self._center = rule, _sealed(center)
        self._state: RuleState = dict(state) if state else rule.init(self._center)
        self._orders: dict[int, Order] = {}  # that came before their turn
        self._staged: dict[str, _Piece] = {}
        self._held: dict[str, _Held] = {}
        self._kept: tuple[int, Part] | None = None
        self.done = 0  # the number of the next order

    @property
    def dtype(self) -> np.dtype[Any]:
        """The center's; what is staged has to have it."""
        return self._center.dtype

    def stage(self, worker: str, session: int, seq: int, values: Vector) -> Objection | None:
        """Keep the piece of a push until it is ordered to be merged. It must not be written to any more."""
        if objection := misfit(values, self._center):
            return Objection(*objection)
        known = self._staged.get(worker)
        if known is None or (known.session, known.seq) <= (session, seq):
            self._staged[worker] = _Piece(session, seq, values)
        return None

    def take(self, orders: Iterable[Order]) -> None:
        """Carry out these orders, each in its turn. They may come in any order, and more than once."""
        self._orders |= {order.number: order for order in orders if order.number >= self.done}
        while (order := self._orders.get(self.done)) is not None:
            self._carry_out(order)
            del self._orders[self.done]
            self.done += 1

    def answer(self, worker: str, number: int) -> Vector:
        """The piece of the answer that was given to the worker by the order of this number, which was carried out.

        Read-only. Raises LookupError where the worker has had a later one since.
        """
        held = self._held.get(worker)
        for known in (held.pushed, held.handed) if held else ():
            if known is not None and known[0] == number:
                return known[1]
        raise LookupError(f"answer {number}: {worker} has had a later one, or has left; join again as a new session")

    def kept(self, number: int) -> Part:
        """What the order of this number kept. Raises LookupError where a later one took its place."""
        if self._kept is None or self._kept[0] != number:
            raise LookupError(f"snapshot {number}: a later one took its place; ask for another")
        return self._kept[1]

    def validate(self) -> None:
        """Assert every invariant that holds between two calls."""
        assert all_finite(self._center)
        assert not self._center.flags.writeable
        assert all(number > self.done for number in self._orders), "an order was not carried out in its turn"

    def _carry_out(self, order: Order) -> None:
        match order:
            case Merged():
                self._merge(order)
            case Handed(number=number, worker=worker, session=session):
                self._holds(worker, session).handed = (number, self._center)
            case Kept(number=number):
                self._kept = (number, Part(self._center, dict(self._state)))
            case Dropped(worker=worker, session=session):
                self._drop(worker, session)

    def _merge(self, order: Merged) -> None:
        pushes = [replace(push, payload=self._piece_of(push)) for push in order.pushes]
        merge = self._rule.merge(self._center, self._state, pushes, order.view)
        self._center, self._state = _sealed(merge.center), merge.state
        for push in pushes:
            answer = self._center if merge.replies is None else _sealed(merge.replies[push.worker])
            self._holds(push.worker, push.session).pushed = (order.number, answer)
            del self._staged[push.worker]

    def _piece_of(self, push: Push) -> Vector:
        piece = self._staged.get(push.worker)
        assert piece is not None, f"no piece of {push}"
        assert (piece.session, piece.seq) == (push.session, push.seq), f"the piece of {push} is another's"
        return piece.values

    def _holds(self, worker: str, session: int) -> _Held:
        held = self._held.get(worker)
        if held is None or held.session < session:
            held = self._held[worker] = _Held(session)
        return held

    def _drop(self, worker: str, session: int) -> None:
        if (held := self._held.get(worker)) and held.session <= session:
            del self._held[worker]
        if (piece := self._staged.get(worker)) and piece.session <= session:
            del self._staged[worker]


def split_snapshot(snapshot: Snapshot, cuts: Sequence[Span]) -> list[Part]:
    """The part of each range: copies, so that a part does not keep the whole."""
    state = snapshot.state or {}
    return [
        Part(snapshot.center[lo:hi].copy(), {name: vector[lo:hi].copy() for name, vector in state.items()})
        for lo, hi in cuts
    ]


def joined_snapshot(snapshot: Snapshot, parts: Sequence[Part]) -> Snapshot:
    """The snapshot with the vectors that the ranges kept for it."""
    state = {name: np.concatenate([part.state[name] for part in parts]) for name in parts[0].state}
    return replace(snapshot, center=np.concatenate([part.center for part in parts]), state=state)


def _sealed(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector
