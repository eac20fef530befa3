"""The parameter server as a state machine without I/O.

Theory of operation. `handle` takes one event and returns the instructions that follow from it, to any worker. Whoever
hosts the server (an Actor, the simulator, a test) calls it from one thread, one event after the other, carries out the
instructions, and puts the time into the events. Nothing else changes the state.

Workers. A Join begins a life of a worker, its session; a newer session supersedes the older one, whose waiting push is
dropped and whose later ones are refused. A join is a first pull as well: its reply brings the center. Everything a
worker waits for ends in exactly one Reply or Refuse.

Pushes. (epoch, worker, session, seq) is applied once. The key last merged is answered again with the same reply; one
that still waits is not answered twice, its one reply is addressed to the key. A refused push changes nothing but
the counters, and its seq may be used again.

Barriers. A rule with a barrier merges when every expected worker has pushed. Expected is who joined before the first
push of the round; who joins later takes part from the next round: its join is answered, with the merged center, when
this round ends. So all members have to join before the first of them pushes. Leave, eviction and a newer session take
a worker's slot (and its push, if it waits) out of the barrier, which may open it.

Bounded staleness. A rule without a barrier may hold a push back until the slowest worker has caught up; the server
counts the merged pushes of each for that. Every event looks again whether one may go on: the slowest's own push always
may, who leaves frees those that wait for it, and who comes late begins with the count of the slowest.

Centers. A merge makes a new array, which is marked read-only and never written again, so replies and snapshots share
it without copies and no reader can see a half-merged one. Memory: the center and each worker's last reply, which is
the center of its own last merge.

Epochs. A server made from a snapshot has a new epoch, and refuses what was meant for its predecessor. Workers join
it anew; pushes that waited at the snapshot are not part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from daskcnn.ps.bases import Bases
from daskcnn.ps.clocks import Clocks
from daskcnn.ps.events import Event, Join, Leave, Pull, Push, Tick, Vector
from daskcnn.ps.instructions import Code, Evict, Instruction, Refuse, Reply
from daskcnn.ps.rule import Merge, UpdateRule, View
from daskcnn.ps.snapshot import Snapshot
from daskcnn.ps.vectors import all_finite, misfit

_Objection: TypeAlias = tuple[Code, str] | None


@dataclass(slots=True)
class _Member:
    """A worker in its present life. seq: last merged. base: None until it has had a center. heard: last event's time.

    late: it joined into a round under way. asked: seqs of its joins and pulls that wait for the round's end.
    """

    session: int
    heard: float
    late: bool
    seq: int = 0
    base: int | None = None
    asked: tuple[int, ...] = ()
    reply: Reply | None = None


class ParameterServer:
    """Holds the center and merges what is pushed, by the rule. See the module's text for how it works.

    center: 1-D float vector, copied. stall_timeout: seconds of silence after which a Tick evicts a worker that is not
    itself waiting for others. Raises ValueError for a center that is not a finite float vector.
    """

    def __init__(
        self, rule: UpdateRule, center: Vector, *, epoch: int = 0, version: int = 0, stall_timeout: float = math.inf
    ) -> None:
        if center.ndim != 1 or center.dtype.kind != "f" or not all_finite(center):
            raise ValueError(
                f"center={center.dtype}{center.shape}: must be a finite 1-D float vector; flatten the weights"
            )
        self._rule, self._epoch, self._version, self._stall_timeout = rule, epoch, version, stall_timeout
        self._center = _sealed(center.copy())
        self._state = rule.init(self._center)
        self._members: dict[str, _Member] = {}
        self._late: dict[str, None] = {}  # an ordered set
        self._sessions: dict[str, int] = {}  # the highest ever seen, also of those that left
        self._pending: dict[str, Push] = {}
        self._bases, self._clocks = Bases(), Clocks()
        self._merged = self._repeated = 0
        self._refused: Counter[str] = Counter()

    @classmethod
    def restore(
        cls, rule: UpdateRule, snapshot: Snapshot, *, epoch: int | None = None, stall_timeout: float = math.inf
    ) -> ParameterServer:
        """A server that goes on from the snapshot, as the next epoch unless told otherwise."""
        epoch = snapshot.epoch + 1 if epoch is None else epoch
        server = cls(rule, snapshot.center, epoch=epoch, version=snapshot.version, stall_timeout=stall_timeout)
        if snapshot.state:
            server._state = {name: _sealed(vector.copy()) for name, vector in snapshot.state.items()}
        server._merged, server._repeated = snapshot.merged, snapshot.repeated
        server._refused.update(snapshot.refused)
        return server

    def snapshot(self) -> Snapshot:
        """What `restore` needs. Cheap: centers are shared, not copied."""
        return Snapshot(
            self._center, self._version, self._epoch, self._state, self._merged, self._repeated, dict(self._refused)
        )

    def handle(self, event: Event) -> list[Instruction]:
        """Take the event in; returns what is to be done now, in order."""
        match event:
            case Join():
                instructions = self._on_join(event)
            case Pull():
                instructions = self._on_pull(event)
            case Push():
                instructions = self._on_push(event)
            case Leave():
                instructions = self._on_leave(event)
            case Tick():
                instructions = self._on_tick(event)
        return instructions + self._settle(event.at)

    # --- events ---

    def _on_join(self, join: Join) -> list[Instruction]:
        if objection := self._wrong_epoch(join) or self._old_life(join):
            return [self._refuse(join, *objection)]
        dropped: list[Instruction] = []
        member = self._members.get(join.worker)
        if member is None or member.session < join.session:
            dropped = self._remove(join.worker, Code.SESSION, f"session {join.session} took its place")
            self._admit(join)
        return dropped + self._hand_out(join)

    def _on_pull(self, pull: Pull) -> list[Instruction]:
        if objection := self._stranger(pull):
            return [self._refuse(pull, *objection)]
        return self._hand_out(pull)

    def _on_push(self, push: Push) -> list[Instruction]:
        if objection := self._stranger(push):
            return [self._refuse(push, *objection)]
        member, waiting = self._members[push.worker], self._pending.get(push.worker)
        member.heard = push.at
        if member.reply is not None and push.seq == member.seq:
            self._repeated += 1
            return [member.reply]
        if waiting is not None and push.seq == waiting.seq:
            self._repeated += 1
            return []
        if objection := self._out_of_turn(push, member) or self._unfit(push):
            return [self._refuse(push, *objection)]
        self._pending[push.worker] = push
        return []

    def _on_leave(self, leave: Leave) -> list[Instruction]:
        member = self._members.get(leave.worker)
        if member is None or leave.session < member.session:
            # a join of that session may still be on its way: it would come from the dead
            self._sessions[leave.worker] = max(self._sessions.get(leave.worker, leave.session), leave.session)
            return []
        return self._remove(leave.worker, Code.LEFT, "the worker left")

    def _on_tick(self, tick: Tick) -> list[Instruction]:
        silent = [
            worker
            for worker, member in self._members.items()
            if member.heard < tick.at - self._stall_timeout and worker not in self._pending and not member.asked
        ]
        instructions: list[Instruction] = []
        for worker in silent:
            instructions.append(Evict(worker, self._members[worker].session))
            instructions += self._remove(worker, Code.LEFT, "the worker was evicted")
        return instructions

    # --- changes of state ---

    def _admit(self, join: Join) -> None:
        late = self._rule.barrier and bool(self._pending)
        self._members[join.worker] = _Member(join.session, join.at, late)
        self._sessions[join.worker] = join.session
        self._clocks.join(join.worker)
        if late:
            self._late[join.worker] = None

    def _hand_out(self, event: Join | Pull) -> list[Instruction]:
        """The center, now or when the round that the worker is late for has ended."""
        member = self._members[event.worker]
        member.heard = event.at
        if member.late:
            member.asked = tuple(dict.fromkeys((*member.asked, event.seq)))
            return []
        return [self._center_for(event.worker, member, event.seq)]

    def _center_for(self, worker: str, member: _Member, seq: int) -> Reply:
        self._set_base(worker, member)
        return Reply(self._epoch, worker, member.session, seq, self._center, self._version, self._version)

    def _set_base(self, worker: str, member: _Member) -> None:
        member.base = self._version
        self._bases.set(worker, self._version)

    def _remove(self, worker: str, code: Code, reason: str) -> list[Instruction]:
        """Take the worker out; what it waits for is refused, so that no caller waits for ever."""
        member, push = self._members.pop(worker, None), self._pending.pop(worker, None)
        if member is None:
            return []
        self._late.pop(worker, None)
        self._clocks.remove(worker)
        if member.base is not None:
            self._bases.remove(worker)
        seqs = (*member.asked, push.seq) if push else member.asked
        remedy = "join again as a new session"
        return [self._refused_as(worker, member.session, seq, code, f"{reason}; {remedy}") for seq in seqs]

    def _settle(self, at: float) -> list[Instruction]:
        """Merge all that may be merged; let those in who wait for the round's end."""
        instructions: list[Instruction] = []
        while self._pending and (batch := self._rule.ready(self._pending, view := self._view())):
            merge = self._rule.merge(self._center, self._state, batch, view)
            instructions += self._apply(merge, batch, at)
        if self._late and not self._pending:
            for worker in self._late:
                member = self._members[worker]
                instructions += [self._center_for(worker, member, seq) for seq in member.asked]
                member.late, member.asked, member.heard = False, (), at
            self._late.clear()
        return instructions

    def _apply(self, merge: Merge, batch: tuple[Push, ...], at: float) -> list[Instruction]:
        before, self._version = self._version, self._version + 1
        self._center, self._state = _sealed(merge.center), merge.state
        self._merged += len(batch)
        return [self._answer(push, merge, before, at) for push in batch]

    def _answer(self, push: Push, merge: Merge, before: int, at: float) -> Reply:
        del self._pending[push.worker]
        member = self._members[push.worker]
        member.seq, member.heard = push.seq, at
        self._clocks.tick(push.worker)
        if self._rule.answers != "nothing":
            self._set_base(push.worker, member)
        member.reply = Reply(
            self._epoch,
            push.worker,
            push.session,
            push.seq,
            self._center if merge.replies is None else _sealed(merge.replies[push.worker]),
            self._version,
            push.base_version,
            staleness=before - push.base_version,
            gamma=merge.gamma.get(push.worker, 1.0),
            accuracy=push.accuracy,
            n_samples=push.n_samples,
            waited=max(0.0, at - push.at),
        )
        return member.reply

    def _refuse(self, event: Join | Pull | Push, code: Code, reason: str) -> Refuse:
        return self._refused_as(event.worker, event.session, event.seq, code, reason)

    def _refused_as(self, worker: str, session: int, seq: int, code: Code, reason: str) -> Refuse:
        self._refused[code.value] += 1
        return Refuse(worker, session, seq, code, reason)

    # --- checks; none changes anything ---

    def _view(self) -> View:
        return View(self._version, len(self._members) - len(self._late), self._bases, self._clocks)

    def _wrong_epoch(self, event: Join | Pull | Push) -> _Objection:
        if event.epoch == self._epoch:
            return None
        return Code.EPOCH, f"epoch={event.epoch}: this server's is {self._epoch}; join it anew"

    def _old_life(self, join: Join) -> _Objection:
        newest, member = self._sessions.get(join.worker, -math.inf), self._members.get(join.worker)
        if join.session > newest or (member is not None and join.session == member.session):
            return None
        return Code.SESSION, f"session={join.session}: {join.worker} has had {newest}; join with a higher one"

    def _stranger(self, event: Pull | Push) -> _Objection:
        if objection := self._wrong_epoch(event):
            return objection
        member = self._members.get(event.worker)
        if member is None:
            return Code.WORKER, f"worker={event.worker!r}: has not joined, or has left; join first, as a new session"
        if event.session != member.session:
            return Code.SESSION, f"session={event.session}: {event.worker} is in {member.session}; join as a new one"
        return None

    def _out_of_turn(self, push: Push, member: _Member) -> _Objection:
        if push.seq != member.seq + 1 or push.worker in self._pending:
            following = member.seq + 1 + (push.worker in self._pending)
            return Code.SEQ, f"seq={push.seq}: {push.worker}'s next is {following}; push in turn, each seq once"
        if member.base is None or not 0 <= push.base_version <= member.base:
            return Code.BASE, f"base_version={push.base_version}: {push.worker} was given {member.base}; pull first"
        return None

    def _unfit(self, push: Push) -> _Objection:
        if objection := misfit(push.payload, self._center):
            return objection
        if push.n_samples < 1:
            return Code.SAMPLES, f"n_samples={push.n_samples}: a push stands for at least one; train before pushing"
        if not 0.0 <= push.accuracy <= 1.0:  # so is NaN
            return Code.ACCURACY, f"accuracy={push.accuracy}: must lie in [0, 1]; evaluate the local weights again"
        return None

    def validate(self) -> None:
        """Assert every invariant that holds between two events."""
        assert all_finite(self._center)
        assert not self._center.flags.writeable
        assert self._pending.keys() <= self._members.keys() - self._late.keys()
        assert not (self._pending and self._rule.ready(self._pending, self._view())), "a merge was not made"
        assert not self._late or self._pending, f"late for no round: {list(self._late)}"
        for worker, member in self._members.items():
            assert member.late == (worker in self._late) == (member.base is None), f"{worker}: {member}"
            assert member.late or not member.asked, f"{worker} waits for nothing"
            assert member.base is None or 0 <= member.base <= self._version
            assert self._sessions[worker] == member.session
            assert (member.seq == 0) == (member.reply is None)
            assert member.reply is None or (member.reply.session, member.reply.seq) == (member.session, member.seq)
        for worker, push in self._pending.items():
            member = self._members[worker]
            assert (push.epoch, push.session, push.seq) == (self._epoch, member.session, member.seq + 1)
        known = {w: m.base for w, m in self._members.items() if m.base is not None}
        assert self._bases.as_dict() == known
        clocks = self._clocks.as_dict()
        assert clocks.keys() == self._members.keys()
        assert self._clocks.lowest == min(clocks.values(), default=0)


def _sealed(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector
