"""The server split over ranges does what the whole one does, bit for bit, whenever its orders reach the ranges."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from daskcnn.ps import RULES, Event, Join, Leave, ParameterServer, Pull, Push, Refuse, Reply, Snapshot, UpdateRule
from daskcnn.ps.instructions import Code
from daskcnn.ps.split import (
    Kept,
    Merged,
    Objection,
    Order,
    Range,
    Sequencer,
    joined_snapshot,
    spans,
    split_snapshot,
)

SIZE, PARTS = 7, 3
WORKERS = ("a", "b", "c")


def ranges_of(rule: UpdateRule, snapshot: Snapshot, parts: int = PARTS) -> list[Range]:
    cuts = spans(snapshot.center.size, parts)
    return [Range(rule, part.center, part.state) for part in split_snapshot(snapshot, cuts)]


def stage(ranges: list[Range], push: Push) -> Objection | None:
    """Each range its piece; the first objection, as a worker reports it."""
    cuts = spans(SIZE, len(ranges))
    pieces = [push.payload[lo:hi] if hi < SIZE else push.payload[lo:] for lo, hi in cuts]
    found = [r.stage(push.worker, push.session, push.seq, piece) for r, piece in zip(ranges, pieces, strict=True)]
    return next((objection for objection in found if objection), None)


@dataclass
class Client:
    """A worker: its session, the seq it pushed last, whether it has had a center, and what it waits for."""

    session: int
    seq: int = 0
    base: int | None = None
    waits: Push | None = None
    last: Push | None = None
    to_read: tuple[Reply, int] | None = None  # of the whole server, and the order's number


class Lockstep(RuleBasedStateMachine):
    """The whole server and the split one are told the same; orders are under way to the ranges for any time."""

    name = ""
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        update = RULES[self.name](**self.options)
        center = np.linspace(-1, 1, SIZE)
        self.whole = ParameterServer(update, center, epoch=1)
        self.sequencer = Sequencer(update, self.whole.snapshot(), epoch=1)
        self.ranges = ranges_of(update, self.whole.snapshot())
        self.under_way: list[list[Order]] = [[] for _ in self.ranges]
        self.clients: dict[str, Client] = {}
        self.sessions: Counter[str] = Counter()
        self.now = 0.0

    def tell(self, event: Event, objection: Objection | None = None) -> list[Any]:
        self.now += 1
        event = replace(event, at=self.now)
        expected, decision = self.whole.handle(event), self.sequencer.handle(event, objection)
        for waiting in self.under_way:
            waiting += decision.orders
        assert [answer.instruction for answer in decision.answers] == expected
        for instruction, answer in zip(expected, decision.answers, strict=True):
            if isinstance(instruction, Reply):
                self.replied(instruction, answer.number)
        return expected

    def replied(self, reply: Reply, number: int) -> None:
        client = self.clients[reply.worker]
        client.to_read = (reply, number)
        if client.waits and client.waits.seq == reply.seq:
            client.seq, client.last, client.waits = reply.seq, client.waits, None
        if reply.weights.size:
            client.base = reply.version

    def read(self, worker: str) -> None:
        """Before a worker goes on it has taken its answer: the very weights of the whole server's reply."""
        client = self.clients[worker]
        if client.to_read is None:
            return
        (reply, number), client.to_read = client.to_read, None
        assert number >= 0
        pieces = []
        for i, each in enumerate(self.ranges):
            if each.done <= number:
                self.deliver(i)
            assert each.done > number
            pieces.append(each.answer(worker, number))
        np.testing.assert_array_equal(np.concatenate(pieces), reply.weights, strict=True)

    def deliver(self, i: int) -> None:
        self.ranges[i].take(self.under_way[i])
        self.under_way[i].clear()

    @rule(i=st.integers(0, PARTS - 1), random=st.randoms(use_true_random=False))
    def orders_arrive(self, i: int, random: Any) -> None:
        """Some of them, in any order, some of them twice."""
        orders = self.under_way[i]
        some = random.sample(orders, random.randint(0, len(orders)))
        self.ranges[i].take(some)
        self.under_way[i] = [order for order in orders if order not in some or random.random() < 0.2]

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: str) -> None:
        self.sessions[worker] += 1
        self.clients[worker] = Client(self.sessions[worker])
        self.tell(Join(1, worker, self.sessions[worker]))

    def able(self) -> list[str]:
        return sorted(w for w, c in self.clients.items() if c.base is not None and not c.waits)

    @precondition(able)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.able()))
        self.read(worker)
        self.tell(Pull(1, worker, self.clients[worker].session))

    @precondition(able)
    @rule(data=st.data(), seed=st.integers(0, 9), accuracy=st.floats(0, 1))
    def push(self, data: st.DataObject, seed: int, accuracy: float) -> None:
        worker = data.draw(st.sampled_from(self.able()))
        self.read(worker)
        client = self.clients[worker]
        assert client.base is not None
        payload = np.random.default_rng(seed).normal(size=SIZE)
        push = Push(1, worker, client.session, client.seq + 1, client.base, payload, 1 + seed, accuracy)
        client.waits = push
        assert stage(self.ranges, push) is None
        assert not any(isinstance(each, Refuse) for each in self.tell(push))

    @precondition(lambda self: any(c.last or c.waits for c in self.clients.values()))
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        """As after a broken connection: the answer of the first time."""
        worker = data.draw(st.sampled_from(sorted(w for w, c in self.clients.items() if c.last or c.waits)))
        client = self.clients[worker]
        push = client.waits or client.last
        assert push is not None
        stage(self.ranges, push)
        base = client.base
        self.tell(push)
        client.base = base

    @precondition(able)
    @rule(data=st.data(), wrong=st.sampled_from([np.nan, np.inf, "long", "float32"]), at=st.integers(0, SIZE - 1))
    def push_wrong(self, data: st.DataObject, wrong: Any, at: int) -> None:
        """One range objects: all of the push is refused, for the same reason as by the whole server."""
        worker = data.draw(st.sampled_from(self.able()))
        self.read(worker)
        client, payload = self.clients[worker], np.ones(SIZE)
        if wrong == "long":
            payload = np.ones(SIZE + 1)
        elif wrong == "float32":
            payload = payload.astype(wrong)
        else:
            payload[at] = wrong
        assert client.base is not None
        push = Push(1, worker, client.session, client.seq + 1, client.base, payload, 1, 0.5)
        objection = stage(self.ranges, push)
        assert objection is not None
        (refused,) = self.tell(push, objection)
        assert isinstance(refused, Refuse)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.clients)))
        self.tell(Leave(worker, self.clients.pop(worker).session))

    @rule()
    def snapshot(self) -> None:
        expected, (found, kept) = self.whole.snapshot(), self.sequencer.snapshot()
        for i, waiting in enumerate(self.under_way):
            waiting.append(kept)
            self.deliver(i)
        whole = joined_snapshot(found, [each.kept(kept.number) for each in self.ranges])
        assert replace(whole, state=expected.state) == expected
        np.testing.assert_array_equal(whole.center, expected.center, strict=True)
        for name, vector in (expected.state or {}).items():
            np.testing.assert_array_equal((whole.state or {})[name], vector, strict=True)

    @invariant()
    def valid(self) -> None:
        self.sequencer.validate()
        for each in self.ranges:
            each.validate()

    def teardown(self) -> None:
        for worker in self.clients:
            self.read(worker)
        self.snapshot()


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RULES),
    ("downpour", {"server": "adagrad"}),
    ("agwu", {"max_staleness": 0}),
    ("bsp", {"combine": "sum"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_split_server_does_what_the_whole_one_does(name: str, options: dict[str, Any]) -> None:
    machine = type(f"Lockstep_{name}", (Lockstep,), {"name": name, "options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None))


@given(size=st.integers(1, 1000), data=st.data())
def test_ranges_cover_the_vector_and_are_equal_within_one(size: int, data: st.DataObject) -> None:
    cuts = spans(size, data.draw(st.integers(1, size)))
    assert [i for lo, hi in cuts for i in range(lo, hi)] == list(range(size))
    lengths = {hi - lo for lo, hi in cuts}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("parts", [0, 6])
def test_no_range_is_empty(parts: int) -> None:
    with pytest.raises(ValueError, match=rf"ps_shards={parts}: .* 1 to 5 ranges; set cluster\.ps_shards"):
        spans(5, parts)


def test_restored_split_server_goes_on_from_state_and_center() -> None:
    update = RULES["downpour"](server="adagrad")
    whole = ParameterServer(update, np.zeros(SIZE))
    whole.handle(Join(0, "a", 1))
    whole.handle(Push(0, "a", 1, 1, 0, np.ones(SIZE), 1, 1.0))
    ranges = ranges_of(update, whole.snapshot())
    sequencer = Sequencer(update, whole.snapshot(), epoch=1)
    _, kept = sequencer.snapshot()
    for each in ranges:
        each.take([kept])
    again = joined_snapshot(whole.snapshot(), [each.kept(kept.number) for each in ranges])
    np.testing.assert_array_equal(again.center, whole.snapshot().center)
    assert again.state is not None
    np.testing.assert_array_equal(again.state["squares"], np.ones(SIZE))


def test_answer_that_was_followed_by_another_is_not_given_any_more() -> None:
    update = RULES["agwu"]()
    (only,) = ranges_of(update, Snapshot(np.zeros(2)), parts=1)
    sequencer = Sequencer(update, Snapshot(np.zeros(2)), epoch=1)
    (first,) = sequencer.handle(Join(1, "a", 1)).orders
    (second,) = sequencer.handle(Pull(1, "a", 1)).orders
    only.take([second])
    assert only.done == 0, "carried out before its turn"
    only.take([first])
    assert only.done == 2
    only.answer("a", second.number)
    with pytest.raises(LookupError, match="has had a later one"):
        only.answer("a", first.number)


def test_refusals_are_counted_by_the_range_s_reason() -> None:
    sequencer = Sequencer(RULES["agwu"](), Snapshot(np.zeros(2)), epoch=1)
    sequencer.handle(Join(1, "a", 1))
    push = Push(1, "a", 1, 1, 0, np.empty(0), 1, 0.5)
    for code in (Code.FINITE, Code.LENGTH, Code.DTYPE, Code.LENGTH):
        (answer,) = sequencer.handle(push, Objection(code, "because")).answers
        assert isinstance(answer.instruction, Refuse)
        assert (answer.instruction.code, answer.instruction.reason) == (code, "because")
    assert sequencer.snapshot()[0].refused == {"finite": 1, "length": 2, "dtype": 1}
    assert [type(order) for order in sequencer.handle(push).orders] == [Merged]


@dataclass
class Served:
    """A range on a thread of its own, to which orders come by a queue of its own: nothing is in step."""

    store: Range
    inbox: queue.SimpleQueue[Order | None] = field(default_factory=queue.SimpleQueue)
    lock: threading.Condition = field(default_factory=threading.Condition)

    def serve(self) -> None:
        while (order := self.inbox.get()) is not None:
            with self.lock:
                self.store.take([order])
                self.lock.notify_all()

    def read(self, worker: str, number: int) -> Any:
        with self.lock:
            assert self.lock.wait_for(lambda: self.store.done > number, timeout=60)
            return self.store.answer(worker, number)


@pytest.mark.parametrize("rule_name", ["downpour", "easgd"])
def test_no_reader_ever_has_parts_of_two_versions(rule_name: str) -> None:
    """Every merge leaves a center whose numbers are all the same, so a torn one would show."""
    update, size, parts, rounds = RULES[rule_name](), 4000, 4, 150
    begin = Snapshot(np.zeros(size))
    sequencer, guard = Sequencer(update, begin, epoch=1), threading.Lock()
    served = [Served(each) for each in ranges_of(update, begin, parts)]
    torn: list[tuple[str, Any]] = []

    def tell(event: Event, objection: Objection | None = None) -> int:
        with guard:
            decision = sequencer.handle(event, objection)
            orders = [*decision.orders]
        for each in served:
            for order in orders:
                each.inbox.put(order)
        return decision.answers[0].number

    def work(worker: str, value: float) -> int:
        read, cuts = 0, spans(size, parts)
        tell(Join(1, worker, 1))
        for seq in range(1, rounds + 1):
            for each, (lo, hi) in zip(served, cuts, strict=True):
                with each.lock:
                    assert each.store.stage(worker, 1, seq, np.full(hi - lo, value)) is None
            tell(Push(1, worker, 1, seq, 0, np.empty(0), 1, 0.5))
            number = tell(Pull(1, worker, 1))
            center = np.concatenate([each.read(worker, number) for each in served])
            if np.ptp(center):
                torn.append((worker, center))
            read += 1
        return read

    with ThreadPoolExecutor(parts + 3) as pool:
        threads = [pool.submit(each.serve) for each in served]
        workers = [pool.submit(work, name, value) for name, value in (("a", 1.0), ("b", -3.0), ("c", 0.25))]
        assert [w.result(timeout=120) for w in workers] == [rounds] * 3
        for each in served:
            each.inbox.put(None)
        for thread in threads:
            thread.result(timeout=60)
    assert not torn
    assert len({each.store.done for each in served}) == 1


def test_torn_read_would_be_seen() -> None:
    """Without numbered answers, two ranges read between two merges have different versions."""
    update = RULES["downpour"]()
    one, other = ranges_of(update, Snapshot(np.zeros(2)), parts=2)
    sequencer = Sequencer(update, Snapshot(np.zeros(2)), epoch=1)
    for each in (one, other):
        each.stage("a", 1, 1, np.ones(1))
    orders = sequencer.handle(Join(1, "a", 1)).orders
    orders += sequencer.handle(Push(1, "a", 1, 1, 0, np.empty(0), 1, 1.0)).orders
    one.take([*orders, Kept(2)])
    other.take([orders[0], Kept(2)])
    assert one.kept(2).center == 1
    with pytest.raises(LookupError):
        other.kept(2)  # it waits for the merge
