"""The split server answers as the whole one does, bit for bit, whoever asks what, whenever its orders arrive."""

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

from daskcnn.ps import (
    RULES,
    Instruction,
    Join,
    Leave,
    ParameterServer,
    Pull,
    Push,
    Refuse,
    Reply,
    Request,
    Sequencer,
    Snapshot,
    UpdateRule,
    View,
)
from daskcnn.ps.messages import Code, MergeFailed, Objection
from daskcnn.ps.rule import Merge
from daskcnn.ps.sgwu import SGWU
from daskcnn.ps.split import (
    HandOrder,
    KeepOrder,
    MergeOrder,
    OrderedRange,
    RangeOrder,
    SettleOrder,
    SplitCenter,
    StagedPayload,
    Vote,
    spans,
)
from daskcnn.ps.versions import Bases
from tests.ps.driving import rule_of
from tests.ps.split_here import SplitServer, ranges_of

SIZE, PARTS = 7, 3
WORKERS = st.sampled_from(("a", "b", "c"))
ODD = st.sampled_from((0, 0, 0, 0, 0, 0, -2, -1, 1, 2))  # what is added to a number that would be right
LARGEST = float(np.finfo(float).max)


class Lockstep(RuleBasedStateMachine):
    """The whole server and the split one are told the same, in turn and out of turn; all replies are read at last."""

    name = ""
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        update = RULES[self.name](**self.options)
        self.whole = ParameterServer(update, np.linspace(-1, 1, SIZE), life=1)
        self.split = SplitServer(update, self.whole.snapshot(), life=1, parts=PARTS)
        self.sessions: Counter[str] = Counter()  # the last that each worker began, from 0
        self.seqs: Counter[str] = Counter()  # of each worker's last merged push
        self.bases: dict[str, int] = {}
        self.sent: dict[str, Push] = {}
        self.to_read: list[tuple[Reply, Reply]] = []
        self.were_read: list[Any] = []  # the weights of replies that a worker has read
        self.now = 0.0

    def tell(self, request: Request) -> list[Instruction]:
        """Both servers say the same, with the same words."""
        self.now += 1
        request = replace(request, at=self.now)
        expected, found = self.whole.handle(request), self.split.handle(request)
        assert found == expected
        if isinstance(request, Join):  # what an earlier session has not read is not kept
            self.to_read = [r for r in self.to_read if r[0].worker != request.worker or r[0].session >= request.session]
        for one, other in zip(expected, found, strict=True):
            if isinstance(one, Reply):
                assert isinstance(other, Reply)
                if any(other.weights is each for each in self.were_read):  # repeated: a worker reads that at once
                    np.testing.assert_array_equal(self.split.read(other), one.weights, strict=True)
                else:
                    self.to_read.append((one, other))
                self.bases[one.worker] = one.version
                self.seqs[one.worker] = max(self.seqs[one.worker], one.seq if one.accuracy else 0)
            else:
                assert isinstance(other, Refuse)
                assert other.reason == one.reason
        return expected

    def over(self, worker: str) -> None:
        """A session is over: what it has not read is not kept."""
        self.to_read = [(one, other) for one, other in self.to_read if one.worker != worker]
        self.seqs[worker] = 0
        self.bases.pop(worker, None)
        self.sent.pop(worker, None)

    @rule(i=st.integers(0, PARTS - 1), share=st.floats(0, 1))
    def orders_arrive(self, i: int, share: float) -> None:
        self.split.deliver(i, share)

    @rule(worker=WORKERS)
    def join(self, worker: str) -> None:
        """As a new session; the first is 0."""
        session = self.sessions[worker] + 1 if worker in self.sessions else 0
        self.over(worker)
        self.sessions[worker] = session
        self.tell(Join(1, worker, session))

    @rule(worker=WORKERS, odd=ODD, life=st.sampled_from((1, 1, 1, 2)), seq=st.integers(0, 3))
    def join_again(self, worker: str, odd: int, life: int, seq: int) -> None:
        session = self.sessions[worker] + min(odd, 0)
        self.tell(Join(life, worker, session, seq))

    @rule(worker=WORKERS, odd=ODD, life=st.sampled_from((1, 1, 1, 2)), seq=st.integers(0, 3))
    def pull(self, worker: str, odd: int, life: int, seq: int) -> None:
        self.tell(Pull(life, worker, self.sessions[worker] + odd, seq))

    @rule(worker=WORKERS, seed=st.integers(0, 9), accuracy=st.floats(0.1, 1))
    def push(self, worker: str, seed: int, accuracy: float) -> None:
        """The very push that is next."""
        self.pushed(worker, np.random.default_rng(seed).normal(size=SIZE), accuracy=accuracy, samples=1 + seed)

    @rule(
        worker=WORKERS,
        session=ODD,
        seq=ODD,
        base=ODD,
        accuracy=st.sampled_from((0.5, 0.5, 0.5, np.nan)),
        samples=st.sampled_from((1, 1, 1, 0)),
        wrong=st.sampled_from((None, np.nan, np.inf, "long", "short", "float32")),
        at=st.integers(0, SIZE - 1),
    )
    def push_odd(self, worker: str, wrong: Any, at: int, **odd: Any) -> None:
        """Anything about it may be wrong, and one number of the payload."""
        payload = np.ones(SIZE)
        if isinstance(wrong, str):
            payload = {"long": np.ones(SIZE + 1), "short": np.ones(2), "float32": payload.astype("float32")}[wrong]
        elif wrong is not None:
            payload[at] = wrong
        self.pushed(worker, payload, **odd)

    @rule(worker=WORKERS, at=st.integers(0, SIZE - 1), value=st.sampled_from((LARGEST, -LARGEST, 1e200)))
    def push_huge(self, worker: str, at: int, value: float) -> None:
        """The merge of one number, in one range, may overflow."""
        payload = np.zeros(SIZE)
        payload[at] = value
        self.pushed(worker, payload, accuracy=1.0)

    def pushed(
        self,
        worker: str,
        payload: Any,
        *,
        session: int = 0,
        seq: int = 0,
        base: int = 0,
        accuracy: float,
        samples: int = 1,
    ) -> None:
        key = self.sessions[worker] + session, self.seqs[worker] + 1 + seq
        made = Push(1, worker, *key, self.bases.get(worker, 0) + base, payload, samples, accuracy)
        self.sent[worker] = made
        self.tell(made)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), seed=st.integers(0, 9))
    def push_again(self, data: st.DataObject, seed: int) -> None:
        """The key of the last push, with the same payload or another."""
        last = self.sent[data.draw(st.sampled_from(sorted(self.sent)))]
        self.tell(replace(last, payload=np.full(SIZE, float(seed)) if seed else last.payload))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), seq=st.integers(1, 3))
    def stage_and_not_tell(self, data: st.DataObject, seq: int) -> None:
        """As a worker does that is stopped in between."""
        worker = data.draw(st.sampled_from(sorted(self.sessions)))
        self.split.stage(Push(1, worker, self.sessions[worker], self.seqs[worker] + seq, 0, np.full(SIZE, 9.0), 1, 0.5))

    @precondition(lambda self: self.to_read)
    @rule(data=st.data(), twice=st.booleans())
    def read(self, data: st.DataObject, twice: bool) -> None:
        """Replies may be read in any order; one may be read again, as after a broken connection."""
        one, other = self.to_read[data.draw(st.integers(0, len(self.to_read) - 1))]
        self.to_read = [
            each for each in self.to_read if each[1].weights is not other.weights
        ]  # nor the reply's repeats
        self.were_read.append(other.weights)
        for _ in range(1 + twice):
            np.testing.assert_array_equal(self.split.read(other), one.weights, strict=True)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), odd=ODD, last=st.sampled_from((None, None, 0, 1, 2)))
    def leave(self, data: st.DataObject, odd: int, last: int | None) -> None:
        worker = data.draw(st.sampled_from(sorted(self.sessions)))
        session = self.sessions[worker] + odd
        if odd >= 0:
            self.over(worker)
            self.sessions[worker] = session
        self.tell(Leave(worker, session, last=0 if last is None else self.seqs[worker] + last))

    @rule()
    def snapshot(self) -> None:
        expected, found = self.whole.snapshot(), self.split.snapshot()
        assert replace(found, state=expected.state) == expected
        np.testing.assert_array_equal(found.center, expected.center, strict=True)
        for name, vector in (expected.state or {}).items():
            np.testing.assert_array_equal((found.state or {})[name], vector, strict=True)

    @invariant()
    def valid(self) -> None:
        self.whole.validate()
        self.split.validate()

    def teardown(self) -> None:
        for one, other in self.to_read:
            np.testing.assert_array_equal(self.split.read(other), one.weights, strict=True)
        self.snapshot()
        for worker in self.sessions:  # whoever has left leaves nothing behind
            self.to_read.clear()
            for session in range(self.sessions[worker] + 9):  # of the last push of one that had left, too
                self.tell(Leave(worker, session))
            assert self.split.kept_for(worker) == {(0, 0)}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RULES),
    ("downpour", {"server": "adagrad"}),
    ("agwu", {"max_staleness": 0}),
    ("bsp", {"combine": "sum"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("examples", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_split_server_does_what_the_whole_one_does(name: str, options: dict[str, Any], examples: int) -> None:
    machine = type(f"Lockstep_{name}", (Lockstep,), {"name": name, "options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))


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


def split(name: str, *workers: str, size: int = 4, **options: Any) -> SplitServer:
    """A server of two ranges, center 0, with these workers in it; their answers are read."""
    made = SplitServer(RULES[name](**options), Snapshot(np.zeros(size)))
    for worker in workers:
        (reply,) = made.handle(Join(0, worker, 1))
        assert isinstance(reply, Reply)
        made.read(reply)
    return made


def push(worker: str, value: float, seq: int = 1, *, base: int = 0, **other: Any) -> Push:
    return replace(Push(0, worker, 1, seq, base, np.full(4, value), 1, 1.0), **other)


def weights(made: SplitServer, instructions: list[Instruction]) -> dict[str, float]:
    """What each worker reads, whose numbers are all the same."""
    found = {}
    for reply in instructions:
        assert isinstance(reply, Reply)
        read = made.read(reply)
        assert not np.ptp(read)
        found[reply.worker] = float(read[0])
    return found


def test_a_refused_push_of_a_later_seq_is_not_in_the_way_of_the_right_one() -> None:
    s = split("agwu", "a")
    (refused,) = s.handle(push("a", 9.0, seq=5))
    assert isinstance(refused, Refuse)
    assert refused.code == Code.SEQ
    assert s.kept_for("a") == {(0, 1)}
    assert weights(s, s.handle(push("a", 1.0))) == {"a": 1.0}


def test_a_push_that_was_staged_and_not_told_of_takes_no_part() -> None:
    s = split("agwu", "a")
    s.stage(push("a", 9.0))
    s.stage(push("a", 8.0, seq=2))
    assert weights(s, s.handle(push("a", 1.0))) == {"a": 1.0}
    assert s.kept_for("a") == {(1, 1)}  # the later one may still be told of
    assert weights(s, s.handle(push("a", 1.0, seq=2, base=1))) == {"a": 2.0}
    assert s.kept_for("a") == {(0, 1)}


def test_the_first_payload_of_a_key_counts() -> None:
    s = split("bsp", "a", "b")
    assert s.handle(push("a", 1.0)) == []
    assert s.handle(push("a", 9.0)) == []
    assert s.kept_for("a") == {(1, 1)}
    assert weights(s, s.handle(push("b", 1.0))) == {"a": 1.0, "b": 1.0}
    assert weights(s, s.handle(push("b", 7.0))) == {"b": 1.0}
    assert s.kept_for("b") == {(0, 1)}


@pytest.mark.parametrize("session", [0, 1])
def test_a_late_worker_that_asks_twice_reads_both_answers(session: int) -> None:
    s = split("bsp", "a", "b")
    assert s.handle(push("a", 1.0)) == []
    assert s.handle(Join(0, "c", session)) == []
    assert s.handle(Pull(0, "c", session, seq=9)) == []
    *merged, first, second = s.handle(push("b", 3.0))
    assert weights(s, merged) == {"a": 2.0, "b": 2.0}
    assert weights(s, [second]) == weights(s, [first]) == {"c": 2.0}


def test_answers_are_kept_until_they_were_read_and_followed_by_another() -> None:
    s = split("agwu")
    replies = [s.handle(event)[0] for event in (Join(0, "a", 1), Pull(0, "a", 1), push("a", 1.0), Pull(0, "a", 1))]
    for reply, value in zip(reversed(replies), (1.0, 1.0, 0.0, 0.0), strict=True):
        assert weights(s, [reply]) == weights(s, [reply]) == {"a": value}
    s.handle(Pull(0, "a", 1))
    assert s.kept_for("a") == {(0, 2)}
    assert weights(s, s.handle(push("a", 9.0))) == {"a": 1.0}, "the answer of the last push may be asked for again"
    with pytest.raises(LookupError, match="has had a later one"):
        weights(s, replies[:1])


def test_a_session_that_is_over_leaves_nothing_behind() -> None:
    s = split("agwu", "a")
    s.handle(push("a", 1.0))
    s.handle(Leave("a", 1))
    s.stage(push("a", 1.0, seq=2))  # still under way when it left
    assert s.kept_for("a") == {(0, 0)}


def test_restored_split_server_goes_on_from_state_and_center() -> None:
    update = rule_of("downpour", server="adagrad")
    whole = ParameterServer(update, np.zeros(SIZE))
    whole.handle(Join(0, "a", 1))
    whole.handle(Push(0, "a", 1, 1, 0, np.ones(SIZE), 1, 1.0))
    again = SplitServer(update, whole.snapshot(), life=1).snapshot()
    assert replace(again, life=0, state=None) == replace(whole.snapshot(), state=None)
    np.testing.assert_array_equal(again.center, whole.snapshot().center)
    assert again.state is not None
    np.testing.assert_array_equal(again.state["squares"], np.ones(SIZE))


def test_orders_are_carried_out_in_their_turn() -> None:
    (only,) = ranges_of(RULES["agwu"](), Snapshot(np.zeros(2)), parts=1)
    only.take([HandOrder(1, "a", 1)])
    assert only.done == 0
    only.take([HandOrder(0, "a", 1)])
    assert only.done == 2
    assert not only.answer("a", 1).any()


def test_refusals_are_counted_by_the_range_s_reason() -> None:
    s = split("agwu", "a")
    for code in (Code.FINITE, Code.DTYPE, Code.FINITE):
        staged: Any = StagedPayload("t", (4,), Objection(code, "because"))
        (refused,) = s.sequencer.handle(push("a", 0.0, payload=staged))
        assert isinstance(refused, Refuse)
        assert (refused.code, refused.reason) == (code, "because")
    assert s.snapshot().refused == {"finite": 2, "dtype": 1}


def test_one_vote_against_a_merge_drops_it_everywhere() -> None:
    """Only the second range would overflow; the first keeps its center, too."""
    s = split("downpour", "a", server="adagrad")
    payload = np.array([1.0, 1.0, 1.0, 1e200])
    (refused,) = s.handle(push("a", 0.0, payload=payload))
    assert isinstance(refused, Refuse)
    assert refused.code == Code.FINITE
    assert s.kept_for("a") == {(0, 1)}
    kept = s.snapshot()
    assert (kept.version, kept.merged, kept.refused) == (0, 0, {"finite": 1})
    assert not kept.center.any()
    assert kept.state is not None
    assert not kept.state["squares"].any()


def test_differences_are_to_each_range_s_part_of_the_center() -> None:
    rng = np.random.default_rng(0)
    center, differences = (rng.normal(size=SIZE).astype(np.float32) for _ in range(2))
    whole = ParameterServer(SGWU(), center, wire="float16")
    split = SplitServer(SGWU(), Snapshot(center), parts=PARTS, wire="float16")
    for server in (whole, split):
        server.handle(Join(0, "a", 1))
        server.handle(Push(0, "a", 1, 1, 0, differences, 3, 0.5))
        np.testing.assert_array_equal(server.snapshot().center, center + differences)


class Failing(SGWU):
    """A rule of a user's, with a mistake in it."""

    def merge(self, *args: Any) -> Merge:
        raise KeyError("velocity")


def test_a_merge_that_the_ranges_cannot_work_out_says_why_and_leaves_what_there_was() -> None:
    begin = Snapshot(np.ones(6))
    server = SplitServer(Failing(), begin)
    server.handle(Join(0, "a", 1))
    with pytest.raises(MergeFailed) as told:
        server.handle(Push(0, "a", 1, 1, 0, np.zeros(6), 3, 0.5))
    assert told.value.objection.code == Code.FAILED
    assert told.value.objection.reason.startswith("KeyError: 'velocity' (test_split_server.py, line ")
    np.testing.assert_array_equal(server.snapshot().center, begin.center)


# --- on threads ---


@dataclass
class Served:
    """A range on a thread of its own, to which orders come by a queue of its own: nothing is in step."""

    store: OrderedRange
    inbox: queue.SimpleQueue[RangeOrder | None] = field(default_factory=queue.SimpleQueue)
    lock: threading.Condition = field(default_factory=threading.Condition)

    def serve(self) -> None:
        while (order := self.inbox.get()) is not None:
            with self.lock:
                self.store.take([order])
                self.lock.notify_all()

    def vote(self, number: int) -> Vote:
        with self.lock:
            assert self.lock.wait_for(lambda: self.store.done > number, timeout=60)
            return self.store.vote(number)

    def read(self, worker: str, number: int) -> Any:
        with self.lock:
            assert self.lock.wait_for(lambda: self.store.done > number, timeout=60)
            return self.store.answer(worker, number)


def sequencer_of(update: UpdateRule, begin: Snapshot, served: list[Served]) -> Sequencer:
    def send(order: RangeOrder) -> None:
        for each in served:
            each.inbox.put(order)

    def ask(order: MergeOrder) -> list[Vote]:
        send(order)
        return [each.vote(order.number) for each in served]

    return Sequencer(update, SplitCenter(update, begin.center, begin.center.size, send=send, ask=ask), life=1)


@pytest.mark.parametrize("rule_name", ["downpour", "easgd"])
def test_no_reader_ever_has_parts_of_two_versions(rule_name: str) -> None:
    """Every merge leaves a center whose numbers are all the same, so a torn one would show."""
    update, size, parts, rounds = RULES[rule_name](), 4000, 4, 150
    begin = Snapshot(np.zeros(size))
    served = [Served(each) for each in ranges_of(update, begin, parts)]

    sequencer = sequencer_of(update, begin, served)
    guard, torn = threading.Lock(), list[tuple[str, Any]]()

    def tell(request: Request) -> Any:
        with guard:
            (reply,) = sequencer.handle(request)
        assert isinstance(reply, Reply)
        return reply.weights

    def work(worker: str, value: float) -> int:
        read, cuts = 0, spans(size, parts)
        tell(Join(1, worker, 1))
        for seq in range(1, rounds + 1):
            pushed = Push(1, worker, 1, seq, 0, np.empty(0), 1, 0.5)
            for each, (lo, hi) in zip(served, cuts, strict=True):
                with each.lock:
                    assert each.store.stage(replace(pushed, payload=np.full(hi - lo, value)), str(seq)) is None
            staged: Any = StagedPayload(str(seq), (size,))
            tell(replace(pushed, payload=staged))
            number = tell(Pull(1, worker, 1)).number
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
    staged: Any = StagedPayload("t", (2,))
    pushed = Push(1, "a", 1, 1, 0, staged, 1, 1.0)
    for each in (one, other):
        each.stage(replace(pushed, payload=np.ones(1)), "t")
    merge, settle, keep = MergeOrder(0, (pushed,), View(0, 1, Bases())), SettleOrder(1, True), KeepOrder(2)
    one.take([merge, settle, keep])
    other.take([settle, keep])
    assert one.kept(2).center == 1
    with pytest.raises(LookupError):
        other.kept(2)  # it waits for the merge


def test_a_session_that_left_before_its_join_came_leaves_nothing_behind() -> None:
    server = SplitServer(RULES["agwu"](), Snapshot(np.zeros(SIZE)), parts=2, life=1)
    server.handle(Join(1, "c", 1))
    server.handle(Leave("c", 3))
    server.stage(Push(1, "c", 3, 1, 0, np.full(SIZE, 9.0), 1, 0.5))
    server.handle(Join(1, "c", 2))
    server.handle(Leave("c", 12))
    assert server.kept_for("c") == {(0, 0)}
