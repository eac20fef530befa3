"""Who gets which part next, and what becomes of the parts of lost workers. No worker and no clock is needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daskcnn.cluster.link.members import Kind, Member
from daskcnn.cluster.spread.part_queue import AHEAD, ARRIVE, ATTEMPTS, PartQueue
from daskcnn.errors import Lost


def member(name: str, kind: Kind = "cpu", threads: int = 1) -> Member:
    return Member(name, name, "host", kind, threads, 0)


def ready(queue: PartQueue[int], *members: Member) -> None:
    for joining in queue.invite(members, 0.0):
        queue.ready(joining.address)


def given(queue: PartQueue[int], now: float = 0.0) -> list[tuple[str, int]]:
    return [(worker, queued.part) for worker, queued in queue.hand_out(now)]


def names(members: list[Member]) -> list[str]:
    return [member.name for member in members]


def test_parts_go_to_the_worker_with_the_most_room() -> None:
    queue = PartQueue(range(10), {})
    ready(queue, member("a"), member("b", threads=2))
    assert given(queue) == [("a", 0), ("b", 1), ("b", 2), ("a", 3), ("b", 4), ("b", 5)]
    assert given(queue) == []
    assert queue.done("b", 2, 1.0) == 2
    assert given(queue) == [("b", 6)]


def test_a_worker_gets_no_parts_to_wait_while_another_is_about_to_get_ready() -> None:
    queue = PartQueue(range(10), {})
    queue.invite([member("a"), member("b")], 0.0)
    queue.ready("a")
    assert given(queue) == [("a", 0)]
    assert given(queue, ARRIVE) == [("a", 1)]
    queue.ready("b")
    assert given(queue, ARRIVE) == [("b", 2), ("b", 3)]


def test_a_part_that_takes_a_whole_worker_is_one_of_a_few_there() -> None:
    queue = PartQueue(range(10), {}, whole=True)
    ready(queue, member("a", threads=16))
    assert len(given(queue)) == AHEAD


def test_parts_are_drawn_when_a_worker_has_room() -> None:
    drawn = count()
    queue = PartQueue(drawn, {})
    queue.invite([member("a")], 0.0)
    assert given(queue) == []
    queue.ready("a")
    assert len(given(queue)) == AHEAD
    assert next(drawn) == AHEAD


def test_parts_of_a_lost_worker_come_first_and_it_is_over_when_they_are_done() -> None:
    queue = PartQueue(range(3), {})
    ready(queue, member("a"))
    assert given(queue) == [("a", 0), ("a", 1)]
    queue.lose("a")
    assert given(queue) == []
    ready(queue, member("b"))
    assert given(queue) == [("b", 0), ("b", 1)]
    queue.done("b", 0, 0.0)
    assert given(queue) == [("b", 2)]
    for number in (1, 2):
        assert not queue.over
        queue.done("b", number, 0.0)
    assert given(queue) == []
    assert queue.over


def test_a_part_that_takes_workers_down_is_named() -> None:
    queue = PartQueue([7], {})
    for attempt in range(ATTEMPTS - 1):
        ready(queue, member(f"{attempt}"))
        assert given(queue) == [(f"{attempt}", 7)]
        queue.lose(f"{attempt}")
    ready(queue, member("last"))
    assert given(queue) == [("last", 7)]
    with pytest.raises(Lost, match=f"7: {ATTEMPTS} workers were lost that had this part; look at their logs"):
        queue.lose("last")


def test_who_is_invited() -> None:
    there = [member("a"), member("b"), member("g", "gpu"), member("ps", "ps")]
    assert names(PartQueue([], {}).invite(there, 0.0)) == ["a", "b", "g"]
    queue = PartQueue[int]([], {"cpu": 1})
    assert names(queue.invite(there, 0.0)) == ["a"]
    assert queue.invite(there, 0.0) == []


def test_another_takes_the_place_of_a_worker_that_was_lost_or_does_not_get_ready() -> None:
    there = [member("a"), member("b"), member("c")]
    queue = PartQueue[int]([], {"cpu": 1})
    queue.invite(there, 0.0)
    assert queue.invite(there, ARRIVE - 1) == []
    assert names(queue.invite(there, ARRIVE)) == ["b"]
    queue.ready("b")
    queue.lose("b")
    queue.lose("a")
    assert names(queue.invite(there, ARRIVE)) == ["c"]


def test_a_worker_is_quiet_while_it_has_parts_and_gives_no_results() -> None:
    queue = PartQueue(range(3), {})
    ready(queue, member("a"), member("b"))
    assert queue.quiet(100.0, 10.0) == []  # they have nothing to do
    given(queue, 100.0)
    assert queue.quiet(110.0, 10.0) == []
    assert queue.quiet(111.0, 10.0) == ["a", "b"]
    queue.done("b", 1, 105.0)
    assert queue.quiet(111.0, 10.0) == ["a"]


def test_how_long_it_waits_for_workers() -> None:
    queue = PartQueue(range(3), {})
    assert not queue.deserted(0.0, 10.0)
    assert queue.deserted(10.0, 10.0)
    queue.invite([member("a")], 10.0)
    assert not queue.deserted(11.0, 10.0)
    assert queue.deserted(10.0 + ARRIVE, 10.0)
    queue.ready("a")
    assert not queue.deserted(100.0, 10.0)
    queue.lose("a")
    assert not queue.deserted(105.0, 10.0)
    assert queue.deserted(105.0, 0.0)


class AnyOrder(RuleBasedStateMachine):
    """Workers come, end parts and are lost in any order: no part is lost, and none is with two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.drawn, self.ended, self.number = 0, list[int](), count()
        self.queue = PartQueue(self.parts(), {})
        self.workers: dict[str, dict[int, int]] = {}
        self.slots: dict[str, int] = {}

    def parts(self) -> Iterator[int]:
        for part in range(30):
            self.drawn += 1
            yield part

    @rule(threads=st.integers(1, 3))
    def join(self, threads: int) -> None:
        name = f"w{next(self.number)}"
        ready(self.queue, member(name, threads=threads))
        self.workers[name], self.slots[name] = {}, threads

    @rule()
    def hand_out(self) -> None:
        for worker, queued in self.queue.hand_out(0.0):
            self.workers[worker][queued.number] = queued.part
        assert not self.queue.over or sorted(self.ended) == list(range(30))

    @precondition(lambda self: any(self.workers.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, parts in self.workers.items() if parts]))
        number = data.draw(st.sampled_from(list(self.workers[worker])))
        part = self.workers[worker].pop(number)
        assert self.queue.done(worker, number, 0.0) == part
        self.ended.append(part)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(list(self.workers)))
        del self.workers[worker]
        try:
            self.queue.lose(worker)
        except Lost:  # the same part too often: the work ends there
            self.begin()

    @invariant()
    def nothing_is_there_twice(self) -> None:
        flying = [part for parts in self.workers.values() for part in parts.values()]
        assert len({*flying, *self.ended}) == len(flying) + len(self.ended) <= self.drawn
        assert all(len(parts) <= AHEAD * self.slots[name] for name, parts in self.workers.items())

    def teardown(self) -> None:
        """One more worker does all that is left."""
        self.join(1)
        while not self.queue.over:
            self.hand_out()
            for worker, parts in self.workers.items():
                for number in list(parts):
                    self.ended.append(self.queue.done(worker, number, 0.0))
                parts.clear()
        assert sorted(self.ended) == list(range(30))


TestAnyOrder = AnyOrder.TestCase
