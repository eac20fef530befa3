"""Any order of joins, pulls, pushes, repeats, stale pushes and leaves keeps the server's promises."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from daskcnn.ps import (
    Asynchronous,
    Code,
    Instruction,
    Join,
    Leave,
    ParameterServer,
    Pull,
    Push,
    Refuse,
    Reply,
    Request,
    UpdateRule,
)
from tests.ps.driving import every_variant

WORKERS = ("a", "b", "c", "d")
workers = st.sampled_from(WORKERS)


@dataclass
class Client:
    """What a worker knows of itself."""

    session: int = 0
    seq: int = 0
    base: int | None = None  # None: waits for its first center
    merged: int = 0  # one that came late begins with the least of the others
    waits: Push | None = None
    sent: list[Push] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    of: UpdateRule

    def __init__(self) -> None:
        super().__init__()
        self.server = ParameterServer(self.of, np.zeros(3))
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.sessions: Counter[str] = Counter()
        self.replies: dict[tuple[str, int, int], Reply] = {}
        self.merges = 0
        self.left: dict[str, Push] = {}  # last pushes that wait without their workers
        self.told: list[Request] = []
        self.centers: list[bytes] = []

    def tell(self, event: Request) -> list[Instruction]:
        self.now += 1.0
        self.told.append(replace(event, at=self.now))
        instructions = self.server.handle(self.told[-1])
        self.centers.append(self.server.snapshot().center.tobytes())
        for each in instructions:
            match each:
                case Reply():
                    self.replied(each)
                case Refuse(worker=worker, session=session):
                    client = self.clients.get(worker)
                    assert client is None or session <= self.sessions[worker]
                    if each.code == Code.FINITE and worker in self.left:
                        del self.left[worker]
                    elif client and client.waits and each.code == Code.FINITE:
                        client.waits = None  # its merge would overflow; the seq may be used again
                        client.sent.pop()
        for worker in [worker for worker, push in self.left.items() if self.server._pending.get(worker) is not push]:
            del self.left[worker]
            self.merges += 1
        return instructions

    def replied(self, reply: Reply) -> None:
        key = (reply.worker, reply.session, reply.seq)
        client = self.clients[reply.worker]
        assert reply.session == client.session
        if client.waits is None or reply.seq != client.waits.seq:
            client.base = reply.version
            return
        assert key not in self.replies, "merged twice"
        assert reply.staleness >= 0
        assert 0 <= reply.gamma <= self.most_gamma
        assert client.merged - self.least() <= self.most_ahead
        self.replies[key], self.merges = reply, self.merges + 1
        client.waits, client.seq, client.merged = None, reply.seq, client.merged + 1
        if self.of.answers == "nothing":
            assert not reply.weights.size
        else:
            client.base = reply.version

    @property
    def most_gamma(self) -> float:
        """Eq. 9 without its bound gives the only other worker's push up to e."""
        return math.e if getattr(self.of, "attenuation", "") == "paper-uncapped" else 1.0

    @property
    def most_ahead(self) -> float:
        """Pushes that a worker may be ahead of the slowest."""
        bound = self.of.max_staleness if isinstance(self.of, Asynchronous) else None
        return np.inf if bound is None else bound

    def least(self) -> int:
        return min((client.merged for client in self.clients.values()), default=0)

    @rule(worker=workers)
    def join(self, worker: str) -> None:
        self.sessions[worker] += 1
        self.clients.pop(worker, None)
        self.clients[worker] = Client(self.sessions[worker], merged=self.least())
        self.tell(Join(0, worker, self.sessions[worker]))

    @precondition(lambda self: self.clients.keys() - self.left.keys())
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.clients.keys() - self.left.keys())))
        client = self.clients[worker]
        answered = self.tell(Pull(0, worker, client.session, seq=0))
        assert bool(answered) == (client.base is not None)

    @precondition(lambda self: any(c.base is not None and not c.waits for c in self.clients.values()))
    @rule(
        data=st.data(),
        value=st.floats(-1, 1) | st.sampled_from((1.0, -1.0)).map(lambda sign: sign * np.finfo(float).max),
        accuracy=st.floats(0, 1),
    )
    def push(self, data: st.DataObject, value: float, accuracy: float) -> None:
        able = sorted(w for w, c in self.clients.items() if c.base is not None and not c.waits)
        worker = data.draw(st.sampled_from(able))
        client = self.clients[worker]
        assert client.base is not None
        event = Push(0, worker, client.session, client.seq + 1, client.base, np.full(3, value), 1, accuracy)
        client.waits = event
        client.sent.append(event)
        before = self.server.snapshot()
        instructions = self.tell(event)
        refused = [each for each in instructions if isinstance(each, Refuse)]
        assert all(each.code == Code.FINITE for each in refused)
        if len(refused) == len(instructions):
            assert self.server.snapshot().center is before.center

    @precondition(lambda self: any(c.sent for c in self.clients.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """The last push again: the same reply if it was merged, no second one while it waits."""
        worker = data.draw(st.sampled_from(sorted(w for w, c in self.clients.items() if c.sent)))
        client, before = self.clients[worker], self.server.snapshot()
        base = client.base
        instructions = self.tell(client.sent[-1])
        if client.waits:
            assert instructions == []
        else:
            assert instructions[0] is self.replies[worker, client.session, client.seq]
        client.base = base
        assert self.server.snapshot().center is before.center

    @precondition(lambda self: any(c.base is not None for c in self.clients.values()))
    @rule(
        data=st.data(),
        wrong=st.sampled_from(
            [
                {"life": 3},
                {"session": 0},
                {"seq": 1000},
                {"seq": -1},
                {"base_version": 10**6},
                {"payload": np.zeros(2)},
                {"payload": np.zeros(3, "float32")},
                {"payload": np.array([0.0, np.nan, 0.0])},
                {"accuracy": np.nan},
                {"n_samples": 0},
            ]
        ),
    )
    def push_wrong(self, data: st.DataObject, wrong: dict[str, Any]) -> None:
        worker = data.draw(st.sampled_from(sorted(w for w, c in self.clients.items() if c.base is not None)))
        client, before = self.clients[worker], self.server.snapshot()
        assert client.base is not None
        good = Push(0, worker, client.session, client.seq + 1 + bool(client.waits), client.base, np.zeros(3), 1, 0.5)
        self.refused(replace(good, **wrong))
        assert self.server.snapshot().center is before.center

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), seq=st.integers(1, 3))
    def push_from_an_earlier_life(self, data: st.DataObject, seq: int) -> None:
        """Also of one that has left and whose last push, maybe this one, waits without it."""
        worker = data.draw(st.sampled_from(sorted(self.sessions)))
        session = self.sessions[worker] - (worker in self.clients)
        self.refused(Push(0, worker, session, seq, 0, np.zeros(3), 1, 0.5))

    def refused(self, event: Push) -> None:
        before = self.server.snapshot()
        (refuse,) = self.tell(event)
        assert isinstance(refuse, Refuse)
        after = self.server.snapshot()
        assert (after.center is before.center, after.version, after.merged) == (True, before.version, before.merged)
        assert sum(after.refused.values()) == sum(before.refused.values()) + 1

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.clients)))
        self.tell(Leave(worker, self.clients.pop(worker).session))

    @precondition(lambda self: any(client.waits for client in self.clients.values()))
    @rule(data=st.data())
    def leave_in_good_order(self, data: st.DataObject) -> None:
        """The push that waits counts, unless its merge overflows; one that is behind it would not come."""
        worker = data.draw(st.sampled_from(sorted(w for w, c in self.clients.items() if c.waits)))
        client = self.clients[worker]
        assert client.waits is not None
        assert self.tell(Leave(worker, client.session, last=client.waits.seq + 1)) == []
        assert not self.server.counts(worker, client.session, client.waits.seq)
        del self.clients[worker]
        self.left[worker] = self.server._pending[worker]
        found = self.tell(Leave(worker, client.session, last=client.waits.seq))
        overflows = any(isinstance(each, Refuse) and each.code == Code.FINITE for each in found)
        assert self.server.counts(worker, client.session, client.waits.seq) != overflows

    @invariant()
    def valid(self) -> None:
        self.server.validate()
        snapshot = self.server.snapshot()
        assert snapshot.merged == self.merges

    @invariant()
    def somebody_can_go_on(self) -> None:
        """Where all wait for each other nobody would ever push: a barrier was not freed."""
        assert not self.clients or any(c.base is not None and not c.waits for c in self.clients.values())

    @invariant()
    def nobody_waits_who_need_not(self) -> None:
        if not self.of.barrier:
            for client in self.clients.values():
                assert client.waits is None or client.merged - self.least() > self.most_ahead

    @invariant()
    def a_restored_server_is_valid(self) -> None:
        ParameterServer.restore(self.of, self.server.snapshot()).validate()

    def teardown(self) -> None:
        """A fresh server that is told the same comes to the same centers."""
        fresh = ParameterServer(self.of, np.zeros(3))
        for event, center in zip(self.told, self.centers, strict=True):
            fresh.handle(event)
            assert fresh.snapshot().center.tobytes() == center


@every_variant
@pytest.mark.parametrize("examples", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_any_order_of_events(rule: UpdateRule, examples: int) -> None:
    machine = type("MachineOfRule", (Machine,), {"of": rule})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
