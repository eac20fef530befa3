"""A worker's side of talking to the server, with servers that answer late, never, or are gone; and what goes over."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from distributed.protocol import dumps, loads, to_serialize

from daskcnn.cluster.server import ranges as server_ranges
from daskcnn.cluster.server.actor import ServerLink
from daskcnn.cluster.server.ranges import RangeAt, RangeLines
from daskcnn.errors import PushRefused
from daskcnn.ps import RULES, Join, Pull, Push, Refuse, Reply, Sequencer, Snapshot
from daskcnn.ps.split import (
    HandOrder,
    MergeOrder,
    OrderedRange,
    RangeOrder,
    SettleOrder,
    SplitCenter,
    StagedPayload,
    Vote,
    split_snapshot,
)
from daskcnn.training.replica import Stopped

JOIN = Join(1, "cpu-0", 1)
REPLY = Reply(1, "cpu-0", 1, 0, np.zeros(4, np.float32), 0, 0)
GONE = OSError("Unable to contact Actor's worker")


@dataclass
class FakeServer:
    """An actor's handle, which is its own answer: what comes of waiting for it, turn after turn."""

    turns: list[Any]
    calls: int = field(default=0, init=False)

    def handle(self, event: Any) -> FakeServer:
        self.calls += 1
        return self

    def result(self, timeout: float) -> Any:
        outcome = self.turns.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def call(server: FakeServer, *stopped: bool) -> Reply:
    answers = iter(stopped)
    return ServerLink(lambda: server, wire="float32", stopped=lambda: next(answers)).call(JOIN)


def test_waits_for_a_late_answer() -> None:
    server = FakeServer([TimeoutError(), TimeoutError(), REPLY])
    assert call(server, False, False) is REPLY
    assert server.calls == 1


def test_stops_waiting_for_a_server_that_never_answers() -> None:
    with pytest.raises(Stopped):
        call(FakeServer([TimeoutError()] * 3), False, False, True)


def test_sends_again_after_a_broken_connection() -> None:
    server = FakeServer([GONE, TimeoutError(), GONE, REPLY])
    assert call(server, False) is REPLY
    assert server.calls == 3


def test_gives_up_a_server_that_is_gone() -> None:
    with pytest.raises(OSError, match="Unable to contact"):
        call(FakeServer([GONE] * 3))


def test_gives_up_a_server_that_dask_knows_to_be_gone() -> None:
    def lost() -> Any:
        raise RuntimeError("Worker holding Actor was lost.  Status: cancelled")

    with pytest.raises(ConnectionError, match="is gone"):
        ServerLink(lost, wire="float32", stopped=lambda: False).call(JOIN)


# --- messages, as Dask sends them ---

KEY = ("parameter-server-sgwu-20261121-031340-1f2e3d4c5b6", 12)
NUMBERS = np.linspace(-1, 1, 200_000, dtype=np.float32)
PUSH = Push(3, "cpu-17", 2, 1234, 5678, NUMBERS, 50_000, 0.625)


def sent(function: str, *args: Any) -> dict[str, Any]:
    """The message of an actor's call."""
    named = {"function": function, "actor": KEY, "args": [to_serialize(arg) for arg in args], "kwargs": {}}
    return {"op": "actor_execute", **named, "reply": True}


def answered(result: Any) -> dict[str, Any]:
    return {"status": "OK", "result": to_serialize(result)}


def over_the_wire(message: dict[str, Any]) -> int:
    """Bytes of the serialised message; each frame's length goes with it."""
    return sum(memoryview(frame).nbytes + 8 for frame in dumps(message, frame_split_size=64 << 20))


REPLY_OF_A_PUSH = Reply(3, "cpu-17", 2, 1234, NUMBERS, 5679, 5678, 2, 0.75, 0.625, 50_000, 1.25)


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_a_push_and_its_reply_carry_the_vector_and_less_than_a_kilobyte_each(wire: str) -> None:
    push = replace(PUSH, payload=PUSH.payload.astype(wire))
    reply = replace(REPLY_OF_A_PUSH, weights=NUMBERS.astype(wire))
    for message in (sent("handle", push), answered(reply)):
        assert 0 < over_the_wire(message) - push.payload.nbytes < 1024


def test_the_messages_of_a_split_server_carry_the_vector_and_less_than_a_kilobyte_each() -> None:
    """A push of 16 workers over two ranges: pieces, their answers, and what goes by the sequencer."""
    update, orders = RULES["agwu"](), list[RangeOrder]()

    def ask(order: MergeOrder) -> list[Vote]:
        orders.append(order)
        return [Vote(True, {"cpu-3": 0.5})] * 2

    sequencer = Sequencer(update, SplitCenter(update, NUMBERS, NUMBERS.size, send=orders.append, ask=ask), life=1)
    for i in range(16):
        sequencer.handle(Join(1, f"cpu-{i}", 1))
    staged: Any = StagedPayload(uuid4().hex, NUMBERS.shape)
    push = Push(1, "cpu-3", 1, 1, 0, staged, 50_000, 0.625)
    (reply,) = sequencer.handle(push)
    assert isinstance(reply, Reply)
    assert [type(order) for order in orders[15:]] == [HandOrder, MergeOrder, SettleOrder]
    piece = NUMBERS[:100_000]
    for message, payload in [
        (sent("stage", replace(push, payload=piece), uuid4().hex), piece.nbytes),
        (answered(None), 0),
        (sent("handle", push), 0),
        (sent("propose", orders[-2]), 0),
        (answered(Vote(True, {"cpu-3": 0.5})), 0),
        (sent("take", orders[-1:]), 0),
        (answered(reply), 0),
        (sent("read", "cpu-3", 12345), 0),
        (answered(piece), piece.nbytes),
    ]:
        assert 0 < over_the_wire(message) - payload < 1024
    assert loads(dumps(sent("propose", orders[-2])))["args"]


# --- a split server, without a cluster ---


@dataclass
class Done:
    """The answer of a call that was carried out at once."""

    outcome: Any

    def result(self, timeout: float) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class HereAndNow:
    """Sequencer and ranges as handles of actors, in this process; a call named in `broken` fails once.

    `lost`: the call was carried out, and only its answer is lost.
    """

    def __init__(self, cuts: list[tuple[int, int]], center: Any) -> None:
        update, snapshot = RULES["agwu"](), Snapshot(center)
        vectors = SplitCenter(update, center, center.size, send=self.send, ask=self.ask)
        self.sequencer = Sequencer(update, vectors, life=1)
        self.ranges = [OrderedRange(update, part.center) for part in split_snapshot(snapshot, cuts)]
        self.broken: list[tuple[int, str]] = []
        self.lost = False

    def send(self, order: RangeOrder) -> None:
        for each in self.ranges:
            each.take([order])

    def ask(self, order: MergeOrder) -> list[Vote]:
        self.send(order)
        return [each.vote(order.number) for each in self.ranges]

    def handle(self, request: Any) -> Done:
        (instruction,) = self.sequencer.handle(request)
        if self.lost:
            self.lost = False
            return Done(GONE)
        return Done(
            PushRefused(instruction.reason, instruction.code) if isinstance(instruction, Refuse) else instruction
        )

    def of_range(self, i: int, name: str, call: Callable[..., Any]) -> Callable[..., Done]:
        def called(*args: Any) -> Done:
            if (i, name) in self.broken:
                self.broken.remove((i, name))
                return Done(GONE)
            return Done(call(*args))

        return called


@dataclass(frozen=True)
class RangeHere(RangeAt):
    server: HereAndNow | None = None
    number: int = 0

    def actor(self) -> Any:
        assert self.server is not None
        held = self.server.ranges[self.number]
        names: dict[str, Callable[..., Any]] = {"stage": held.stage, "read": held.answer}
        return type("Handle", (), {n: staticmethod(self.server.of_range(self.number, n, c)) for n, c in names.items()})


def split_link(size: int = 10) -> tuple[HereAndNow, ServerLink]:
    cuts = [(0, 4), (4, size)]
    server = HereAndNow(cuts, np.zeros(size, np.float32))
    ranges = [RangeHere("", KEY, lo, hi, server, i) for i, (lo, hi) in enumerate(cuts)]
    return server, ServerLink(lambda: server, ranges, wire="float32", stopped=lambda: False)


def split_push(seq: int, payload: Any) -> Push:
    return Push(1, "cpu-0", 1, seq, 0, payload, 1, 0.5)


def test_split_link_sends_pieces_and_puts_the_answer_together() -> None:
    _, link = split_link()
    assert not link.call(Join(1, "cpu-0", 1)).weights.any()
    step = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(link.call(split_push(1, step)).weights, step / 2)
    np.testing.assert_array_equal(link.call(Pull(1, "cpu-0", 1)).weights, step / 2)
    assert (link.bytes_up, link.bytes_down) == (40, 120)


@pytest.mark.parametrize("broken", [[(0, "stage")], [(1, "read")], [(0, "stage"), (1, "stage"), (0, "read")]], ids=str)
def test_split_link_sends_only_the_broken_piece_again(broken: list[tuple[int, str]]) -> None:
    server, link = split_link()
    link.call(Join(1, "cpu-0", 1))
    server.broken = broken
    step = np.ones(10, np.float32)
    np.testing.assert_array_equal(link.call(split_push(1, step)).weights, step / 2)
    assert server.sequencer.snapshot().merged == 1
    assert not server.broken


@pytest.mark.parametrize("accuracy", [0.5, 2.0], ids=["merged", "refused"])
def test_split_link_stages_again_when_the_answer_to_a_push_is_lost(accuracy: float) -> None:
    """The pieces of a refused push are gone by then, and those of a merged one too."""
    server, link = split_link()
    link.call(Join(1, "cpu-0", 1))
    server.lost = True
    push = replace(split_push(1, np.ones(10, np.float32)), accuracy=accuracy)
    if accuracy > 1:
        with pytest.raises(PushRefused, match="must lie in"):
            link.call(push)
    else:
        np.testing.assert_array_equal(link.call(push).weights, 0.5)
    counted = server.sequencer.snapshot()
    assert (counted.merged, counted.repeated, sum(counted.refused.values())) == (
        (1, 1, 0) if accuracy < 1 else (0, 0, 2)
    )
    assert [each.kept_for["cpu-0"][0] for each in server.ranges] == [0, 0]


def test_split_link_passes_on_that_the_merge_would_overflow() -> None:
    """The push is finite, and so is the first range's part of the merge."""
    _, link = split_link()
    link.call(Join(1, "cpu-0", 1))
    step = np.zeros(10, np.float32)
    step[-1] = np.finfo(np.float32).max
    pushes = [replace(split_push(seq, step), accuracy=1.0) for seq in (1, 2)]
    center = link.call(pushes[0]).weights
    with pytest.raises(PushRefused, match="would hold NaN or infinity"):
        link.call(pushes[1])
    np.testing.assert_array_equal(link.call(Pull(1, "cpu-0", 1)).weights, center)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (np.array([0, 0, 0, 0, 0, 0, np.inf, 0, 0, 0], np.float32), "NaN or infinity"),
        (np.zeros(12, np.float32), "same network"),
        (np.zeros(3, np.float32), "same network"),
    ],
    ids=["infinite", "long", "short"],
)
def test_split_server_refuses_the_whole_push_for_one_piece(payload: Any, reason: str) -> None:
    server, link = split_link()
    link.call(Join(1, "cpu-0", 1))
    with pytest.raises(PushRefused, match=reason):
        link.call(split_push(1, payload))
    assert not link.call(Pull(1, "cpu-0", 1)).weights.any()
    assert link.call(split_push(1, np.ones(10, np.float32))).version == 1
    assert sum(server.sequencer.snapshot().refused.values()) == 1


# --- from the sequencer to the ranges ---


class Answers:
    """A range's worker: its answers to calls, in turn. None: it never answers."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)

    async def actor_execute(self, **call: Any) -> Any:
        outcome = self.outcomes.pop(0)
        if outcome is None:
            await asyncio.sleep(60)
        if isinstance(outcome, Exception):
            raise outcome
        return {"status": "OK", "result": outcome}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A worker's event loop, on a thread of its own."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def lines(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, limit: float, **workers: Answers
) -> tuple[RangeLines, queue.SimpleQueue[Exception]]:
    here = SimpleNamespace(rpc=workers.__getitem__, loop=SimpleNamespace(asyncio_loop=loop))
    monkeypatch.setattr(server_ranges, "get_worker", lambda: here)
    lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    ranges = [RangeAt(address, KEY, i, i + 1) for i, address in enumerate(workers)]
    return RangeLines(ranges, limit=limit, lost=lost.put), lost


MERGE = MergeOrder(0, (), None)  # type: ignore[arg-type]


def test_votes_come_from_every_range_after_a_broken_connection_too(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lost = lines(loop, monkeypatch, 60.0, one=Answers(Vote(True)), other=Answers(GONE, GONE, Vote(False)))
    assert [vote.finite for vote in made.ask(MERGE)] == [True, False]
    assert lost.empty()


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [([None], "no answer within 0.05 s"), ([GONE] * 3, "Unable to contact")],
    ids=["hangs", "gone"],
)
def test_a_range_that_does_not_vote_is_named(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], reason: str
) -> None:
    made, _ = lines(loop, monkeypatch, 0.05, one=Answers(Vote(True)), other=Answers(*outcomes))
    with pytest.raises(ConnectionError, match=rf"on other, is gone: {reason}"):
        made.ask(MERGE)


def test_an_order_that_does_not_arrive_is_told_of(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lost = lines(loop, monkeypatch, 60.0, one=Answers(0), other=Answers(*[GONE] * 3))
    made.send(HandOrder(0, "a", 1))
    assert "on other, is gone" in str(lost.get(timeout=60))
