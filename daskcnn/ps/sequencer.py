"""The sequencer decides for a parameter server; it touches no vector. A state machine without I/O.

`handle` takes one request and returns the instructions that follow from it, to any worker. The host of the server (an
actor, the simulator, a test) calls it from one thread, one request after the other, carries out the instructions, and
puts the time into the requests. The vectors lie behind the interface `Vectors`: in one range beside the sequencer
(`server`), or in ranges on other machines (`split`).

Workers. A Join begins a session of a worker and brings the center. A newer session supersedes the older one,
whose waiting push is dropped and whose later ones are refused. Every request but Leave ends in one Reply or Refuse.

Pushes. (life, worker, session, seq) is applied once. The key last merged is answered again with the same reply; a key
that still waits has one reply. A refused push changes nothing but the counters, and its seq may be used again.

Barriers. A rule with a barrier merges when every worker that joined before the round's first push has pushed. A later
one takes part from the next round: its join is answered, with the merged center, when this round ends. Leave and a
newer session take a worker's slot (and its push, if it waits) out of the barrier, which may open it.

A worker that leaves in good order names its last push (`Leave.last`). Where that waits it is merged with the others',
and the worker counts until then; it is told no answer, and all else of that session is refused. A newer session of the
worker is let in behind that merge.

Bounded staleness. A rule without a barrier may hold a push back until the slowest worker has caught up, by the pushes
merged of each. After every request the sequencer looks for a push that may go on; the slowest worker's own always may.
A worker that leaves frees the pushes that wait for it, and its own last one. One that comes late begins with the count
of the slowest.

Shares. Where all workers make each step together, `StepSharing` is told after each merge how long the workers took from
the answers before it to their pushes. What it changes of their minibatches comes with the answers.

Noise. Where gradients are merged, their squared norms tell how noisy they are (`gradient_noise`). The answers say so.

Overflow. A merge of finite pushes that is not finite is not made: center, rule state, version and clocks stay as they
are, and every push of it is refused with Code.FINITE, as a sum has no culprit. A round ends with the refusals: workers
that joined late are given the center, and every refused worker may push its seq again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from daskcnn.ps.gradient_noise import GradientNoise, NoiseScale
from daskcnn.ps.interfaces import SharesChanged, StepSharing, Vectors
from daskcnn.ps.messages import (
    CenterPart,
    Code,
    Instruction,
    Join,
    Leave,
    Pull,
    Push,
    PushPart,
    Refuse,
    Reply,
    Request,
    Snapshot,
)
from daskcnn.ps.rule import Merge, UpdateRule, View
from daskcnn.ps.versions import Bases, Clocks

_Refusal: TypeAlias = tuple[Code, str] | None


@dataclass(slots=True)
class _Joined:
    """A worker in its present session. late: whether it joined into a round that is under way. leaves: whether it
    has left, and counts until its last push is merged.

    seq, reply: of its push last merged; 0 and None before the first. base: the version that it was given last.
    asked: the seqs of its joins and pulls that wait for the round's end.
    """

    session: int
    late: bool
    seq: int = 0
    base: int | None = None
    asked: tuple[int, ...] = ()
    reply: Reply | None = None
    leaves: bool = False


class Sequencer:
    """Decides on order, versions, staleness and refusals. See the module's text for how it works."""

    def __init__(
        self, rule: UpdateRule, vectors: Vectors, *, life: int = 0, version: int = 0, sharing: StepSharing | None = None
    ) -> None:
        self._rule, self._vectors, self._life, self._version = rule, vectors, life, version
        self._sharing, self._answered = sharing, 0.0
        self._noise = GradientNoise()
        self._noise_scale: NoiseScale | None = None
        self._members: dict[str, _Joined] = {}
        self._late: dict[str, None] = {}  # an ordered set
        self._sessions: dict[str, int] = {}  # the highest ever seen, also of those that left
        self._pending: dict[str, Push] = {}
        self._put_off: dict[str, Join] = {}  # of workers whose session before that leaves
        self._left: dict[str, tuple[int, int]] = {}  # session and seq of the last push, of those that named it
        self._parts: dict[tuple[int, int, int], dict[str, Push]] = {}  # by version and range, then by worker
        self._bases, self._clocks = Bases(), Clocks()
        self._seen = View(version, 0, self._bases, self._clocks)
        self._merged = self._repeated = 0
        self._refused: Counter[str] = Counter()

    def resume(self, snapshot: Snapshot) -> Self:
        """Go on counting from the snapshot. Returns this sequencer."""
        self._merged, self._repeated = snapshot.merged, snapshot.repeated
        self._noise = GradientNoise.of(snapshot.noise)
        self._noise_scale = self._noise.scale
        self._refused.update(snapshot.refused)
        return self

    def snapshot(self) -> Snapshot:
        """Everything that a new server needs. The vectors are shared, not copied."""
        center, state = self._vectors.kept()
        counted = self._merged, self._repeated, dict(self._refused)
        return Snapshot(center, self._version, self._life, state, *counted, self._noise.kept())

    def handle(self, request: Request) -> list[Instruction]:
        """Take the request in. Returns the instructions that follow from it, in order."""
        match request:
            case Push():
                instructions = self._on_push(request)
            case Pull():
                refusal = self._stranger(request)
                instructions = [self._refuse(request, *refusal)] if refusal else self._hand_out(request)
            case Join():
                instructions = self._on_join(request)
            case Leave():
                instructions = self._on_leave(request)
        if self._pending:
            instructions += self._merges(request.at)
        if self._late and not self._pending:
            instructions += self._let_in()
        return instructions

    def handle_part(self, part: PushPart) -> list[CenterPart]:
        """Take in a part of a push. Once all workers' are there, returns what each of them is given ahead of its reply.

        It changes nothing that is decided: a part that cannot be used is not refused, as its push may well be.
        """
        push, view = part.push, self._view()
        if not self._rule.barrier or self._stranger(push) or self._out_of_turn(push, self._members[push.worker]):
            return []
        at, there = part.lo, self._parts.setdefault((view.version, part.lo, part.hi), {})
        there[push.worker] = push
        for old in [key for key in self._parts if key[0] != view.version]:
            del self._parts[old]
        pushes = self._rule.ready({w: each for w, each in there.items() if self._in_turn(each)}, view)
        values = self._vectors.ahead(at, part.hi, pushes, view) if pushes else None
        if values is None:
            return []
        return [CenterPart(each.worker, each.session, each.seq, at, values) for each in pushes]

    def counts(self, worker: str, session: int, seq: int) -> bool:
        """Tell whether the push of this key was merged, or waits and will be although its worker leaves."""
        member = self._members.get(worker)
        if member is not None and member.session == session:
            return member.leaves or seq <= member.seq
        return self._left.get(worker) == (session, seq)

    def _in_turn(self, push: Push) -> bool:
        """Tell whether a part is of the push that its worker's session makes next, or that waits."""
        member = self._members.get(push.worker)
        return member is not None and (push.session, push.seq) == (member.session, member.seq + 1)

    # --- requests ---

    def _on_join(self, join: Join) -> list[Instruction]:
        if refusal := self._wrong_epoch(join) or self._old_life(join):
            return [self._refuse(join, *refusal)]
        dropped: list[Instruction] = []
        worker, member = join.worker, self._members.get(join.worker)
        if member is not None and member.leaves:
            older, newer = sorted((self._put_off.get(worker, join), join), key=lambda each: each.session)
            self._put_off[worker] = newer
            if (older.session, older.seq) == (newer.session, newer.seq):  # the first, or a repeat of it
                return []
            return [self._refuse(older, Code.SESSION, f"session {newer.session} came")]
        if member is None or member.session < join.session:
            dropped = self._remove(worker, Code.SESSION, f"session {join.session} took its place")
            late = self._rule.barrier and bool(self._pending)
            self._members[worker] = _Joined(join.session, late)
            self._sessions[worker] = join.session
            self._clocks.join(worker)
            if late:
                self._late[worker] = None
        return dropped + self._hand_out(join)

    def _on_push(self, push: Push) -> list[Instruction]:
        if refusal := self._stranger(push):
            return [self._refuse_push(push, *refusal)]
        worker, seq = push.worker, push.seq
        member, waiting = self._members[worker], self._pending.get(worker)
        if seq == member.seq and member.reply is not None:
            self._repeat(push)
            return [member.reply]
        if waiting is not None and seq == waiting.seq:
            self._repeat(push)
            return []
        if refusal := self._out_of_turn(push, member) or self._unfit(push):
            return [self._refuse_push(push, *refusal)]
        self._pending[worker] = push
        return []

    def _on_leave(self, leave: Leave) -> list[Instruction]:
        member = self._members.get(leave.worker)
        if member is None or leave.session < member.session:
            # a join of that session may still be on its way: it would come from the dead
            self._sessions[leave.worker] = max(self._sessions.get(leave.worker, leave.session), leave.session)
            self._vectors.drop(leave.worker, leave.session)
            return []
        if leave.last and leave.session == member.session and (found := self._last_push(leave, member)) is not None:
            return found
        if member.leaves and leave.session > member.session:
            self._sessions[leave.worker], join = leave.session, self._put_off.get(leave.worker)
            over = join is not None and join.session <= leave.session and self._put_off.pop(leave.worker)
            return [self._refuse(over, Code.LEFT, "the worker left; join again")] if over else []
        instructions = self._remove(leave.worker, Code.LEFT, "the worker left") + self._let_back_in(leave.worker)
        if leave.session > member.session:  # what was sent for it may have come before its join
            self._sessions[leave.worker] = leave.session
            self._vectors.drop(leave.worker, leave.session)
        return instructions

    def _last_push(self, leave: Leave, member: _Joined) -> list[Instruction] | None:
        """Let the last push of a worker that leaves wait without it. None: it was merged, and the worker may go."""
        worker, waiting = leave.worker, self._pending.get(leave.worker)
        if waiting is not None and waiting.seq == leave.last:
            member.leaves = True
            return [Refuse(worker, leave.session, leave.last, Code.LEFT, "the worker left; its push counts")]
        if leave.last > member.seq:  # it is still on its way
            return []
        self._left[worker] = leave.session, leave.last
        return None

    # --- changes of state ---

    def _hand_out(self, request: Join | Pull) -> list[Instruction]:
        """The center, now or when the round that the worker is late for has ended. Its average, now."""
        member = self._members[request.worker]
        if isinstance(request, Pull) and request.averaged:
            return [self._given(request.worker, member, request.seq, averaged=True)]
        if member.late:
            member.asked = tuple(dict.fromkeys((*member.asked, request.seq)))
            return []
        return [self._center_for(request.worker, member, request.seq)]

    def _center_for(self, worker: str, member: _Joined, seq: int) -> Reply:
        self._set_base(worker, member)
        return self._given(worker, member, seq, averaged=False)

    def _given(self, worker: str, member: _Joined, seq: int, *, averaged: bool) -> Reply:
        weights = self._vectors.given(worker, member.session, averaged=averaged)
        return Reply(self._life, worker, member.session, seq, weights, self._version, self._version)

    def _set_base(self, worker: str, member: _Joined) -> None:
        member.base = self._version
        self._bases.set(worker, self._version)

    def _remove(self, worker: str, code: Code, reason: str) -> list[Instruction]:
        """Take the worker out. What it waits for is refused, so that no caller waits for ever."""
        member, push = self._members.pop(worker, None), self._pending.pop(worker, None)
        if member is None:
            return []
        self._late.pop(worker, None)
        self._clocks.remove(worker)
        if member.base is not None:
            self._bases.remove(worker)
        self._vectors.drop(worker, member.session)
        seqs = (*member.asked, push.seq) if push else member.asked
        remedy = "join again as a new session"
        return [self._refused_as(worker, member.session, seq, code, f"{reason}; {remedy}") for seq in seqs]

    def _merges(self, at: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._pending and (batch := self._ready(view := self._view())):
            merge = self._vectors.merge(batch, view)
            for push in batch:
                del self._pending[push.worker]
            if merge is None:
                where = f"would hold NaN or infinity in {self._vectors.dtype}"
                reason = f"merge of finite pushes: {where}; lower the learning rate"
                instructions += [self._refuse(push, Code.FINITE, reason) for push in batch]
                instructions += self._let_go(batch)
                continue
            before, self._version = self._version, self._version + 1
            self._merged += len(batch)
            if merge.squares:
                self._noise.met([push.n_samples for push in batch], merge.squares)
                self._noise_scale = self._noise.scale
            changed = self._shared(batch, at)
            staying = [push for push in batch if not self._members[push.worker].leaves]
            self._left |= {each.worker: (each.session, each.seq) for each in batch if self._members[each.worker].leaves}
            instructions += [self._answer(push, merge, before, at, changed) for push in staying]
            instructions += self._let_go(batch)
        return instructions

    def _ready(self, view: View) -> tuple[Push, ...]:
        """The pushes to merge now. Without a barrier none of a worker that leaves waits for others to catch up."""
        if not self._rule.barrier:
            for worker, push in self._pending.items():
                if self._members[worker].leaves:
                    return (push,)
        return self._rule.ready(self._pending, view)

    def _let_go(self, batch: Sequence[Push]) -> list[Instruction]:
        """Remove the workers that leave behind their last push, and let in those that are back."""
        instructions: list[Instruction] = []
        for push in batch:
            if self._members[push.worker].leaves:
                instructions += self._remove(push.worker, Code.LEFT, "the worker left")
                instructions += self._let_back_in(push.worker)
        return instructions

    def _let_back_in(self, worker: str) -> list[Instruction]:
        join = self._put_off.pop(worker, None)
        return [] if join is None else self._on_join(join)

    def _shared(self, batch: Sequence[Push], at: float) -> SharesChanged | None:
        """Return what changes of the workers' minibatches after this merge."""
        since, self._answered = self._answered, at
        if self._sharing is None or not batch[0].step or any(push.step != batch[0].step for push in batch):
            return None
        samples = {push.worker: push.n_samples for push in batch}
        return self._sharing.met(batch[0].step, samples, {push.worker: push.at - since for push in batch})

    def _let_in(self) -> list[Instruction]:
        """The round has ended: those who came late to it are given the center."""
        instructions: list[Instruction] = []
        for worker in self._late:
            member = self._members[worker]
            instructions += [self._center_for(worker, member, seq) for seq in member.asked]
            member.late, member.asked = False, ()
        self._late.clear()
        return instructions

    def _answer(self, push: Push, merge: Merge, before: int, at: float, changed: SharesChanged | None) -> Reply:
        worker, member = push.worker, self._members[push.worker]
        member.seq = push.seq
        self._clocks.tick(worker)
        if self._rule.answers != "nothing":
            self._set_base(worker, member)
        reply = member.reply = Reply(
            self._life,
            worker,
            push.session,
            push.seq,
            merge.center if merge.replies is None else merge.replies[worker],
            self._version,
            push.base_version,
            before - push.base_version,
            merge.gamma.get(worker, 1.0),
            push.accuracy,
            push.n_samples,
            max(0.0, at - push.at),
            *((0, 0) if changed is None else (changed.more[worker], changed.since)),
            merge.ahead,
            self._noise_scale,
        )
        return reply

    def _repeat(self, push: Push) -> None:
        self._repeated += 1
        self._vectors.forget(push)

    def _refuse_push(self, push: Push, code: Code, reason: str) -> Refuse:
        self._vectors.forget(push)
        return self._refuse(push, code, reason)

    def _refuse(self, request: Join | Pull | Push, code: Code, reason: str) -> Refuse:
        return self._refused_as(request.worker, request.session, request.seq, code, reason)

    def _refused_as(self, worker: str, session: int, seq: int, code: Code, reason: str) -> Refuse:
        self._refused[code.value] += 1
        return Refuse(worker, session, seq, code, reason)

    # --- checks; none changes what follows ---

    def _view(self) -> View:
        expected = len(self._members) - len(self._late)
        if self._seen.expected != expected or self._seen.version != self._version:
            self._seen = View(self._version, expected, self._bases, self._clocks)
        return self._seen

    def _wrong_epoch(self, request: Join | Pull | Push) -> _Refusal:
        if request.life == self._life:
            return None
        return Code.LIFE, f"life={request.life}: this server's is {self._life}; join it anew"

    def _old_life(self, join: Join) -> _Refusal:
        newest, member = self._sessions.get(join.worker, -math.inf), self._members.get(join.worker)
        if join.session > newest or (member is not None and join.session == member.session):
            return None
        return Code.SESSION, f"session={join.session}: {join.worker} has had {newest}; join with a higher one"

    def _stranger(self, request: Pull | Push) -> _Refusal:
        worker, session = request.worker, request.session
        if request.life != self._life:
            return self._wrong_epoch(request)
        if (member := self._members.get(worker)) is None:
            return Code.WORKER, f"worker={worker!r}: has not joined, or has left; join first, as a new session"
        if session != member.session:
            return Code.SESSION, f"session={session}: {worker} is in {member.session}; join as a new one"
        if member.leaves:  # it is told no merge: a repeat of its last push would wait for ever
            return Code.LEFT, f"session={session}: {worker} has left, its last push counts; join as a new one"
        return None

    def _out_of_turn(self, push: Push, member: _Joined) -> _Refusal:
        waits = push.worker in self._pending
        if waits or push.seq != member.seq + 1:
            following = member.seq + 1 + waits
            return Code.SEQ, f"seq={push.seq}: {push.worker}'s next is {following}; push in turn, each seq once"
        if member.base is None or not 0 <= push.base_version <= member.base:
            return Code.BASE, f"base_version={push.base_version}: {push.worker} was given {member.base}; pull first"
        return None

    def _unfit(self, push: Push) -> _Refusal:
        if objection := self._vectors.objection(push):
            return objection.code, objection.reason
        if push.n_samples < 1:
            return Code.SAMPLES, f"n_samples={push.n_samples}: a push stands for at least one; train before pushing"
        if not 0.0 <= push.accuracy <= 1.0:  # so is NaN
            return Code.ACCURACY, f"accuracy={push.accuracy}: must lie in [0, 1]; evaluate the local weights again"
        return None

    def validate(self) -> None:
        """Assert every invariant that holds between two requests."""
        self._vectors.validate()
        assert self._pending.keys() <= self._members.keys() - self._late.keys()
        assert not (self._pending and self._ready(self._view())), "a merge was not made"
        assert all(self._members[worker].leaves for worker in self._put_off)
        assert not self._late or self._pending, f"late for no round: {list(self._late)}"
        for worker, member in self._members.items():
            assert member.late == (worker in self._late) == (member.base is None), f"{worker}: {member}"
            assert member.late or not member.asked, f"{worker} waits for nothing"
            assert not member.leaves or worker in self._pending, f"{worker} has left, and counts"
            assert member.base is None or 0 <= member.base <= self._version
            assert self._sessions[worker] == member.session or member.leaves
            assert (member.seq == 0) == (member.reply is None)
            assert member.reply is None or (member.reply.session, member.reply.seq) == (member.session, member.seq)
        for worker, push in self._pending.items():
            member = self._members[worker]
            assert (push.life, push.session, push.seq) == (self._life, member.session, member.seq + 1)
        known = {w: m.base for w, m in self._members.items() if m.base is not None}
        assert self._bases.as_dict() == known
        clocks = self._clocks.as_dict()
        assert clocks.keys() == self._members.keys()
        assert self._clocks.lowest == min(clocks.values(), default=0)
