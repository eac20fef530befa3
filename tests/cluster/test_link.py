"""A worker's side of talking to the server, with servers that answer late, never, or are gone; and what goes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from daskcnn.cluster.server.split import Placed, RangeAt, SplitLink
from distributed.protocol import dumps, loads, to_serialize

from daskcnn.cluster.server.actor import Link
from daskcnn.errors import PushRefused
from daskcnn.ps import RULES, Join, Pull, Push, Reply, Snapshot
from daskcnn.ps.split import Objection, Range, Sequencer, split_snapshot
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
    return Link(lambda: server, wire="float32", stopped=lambda: next(answers)).call(JOIN)


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
        Link(lost, wire="float32", stopped=lambda: False).call(JOIN)


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
    snapshot, update = Snapshot(NUMBERS), RULES["agwu"]()
    sequencer = Sequencer(update, snapshot, epoch=1)
    for i in range(16):
        sequencer.handle(Join(1, f"cpu-{i}", 1))
    push = Push(1, "cpu-3", 1, 1, 0, NUMBERS[:0], 50_000, 0.625)
    decision = sequencer.handle(push)
    (answer,) = decision.answers
    assert isinstance(answer.instruction, Reply)
    piece = NUMBERS[:100_000]
    for message, payload in [
        (sent("stage", "cpu-3", 1, 1, piece), piece.nbytes),
        (answered(None), 0),
        (sent("handle", push, None), 0),
        (sent("take", decision.orders), 0),
        (answered(Placed(answer.instruction, answer.number)), 0),
        (sent("read", "cpu-3", 12345), 0),
        (answered(piece), piece.nbytes),
    ]:
        assert 0 < over_the_wire(message) - payload < 1024
    assert loads(dumps(sent("take", decision.orders)))["args"]


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
    """Sequencer and ranges as handles of actors, in this process; calls of a range named in `broken` fail once each."""

    def __init__(self, cuts: list[tuple[int, int]], center: Any) -> None:
        update, snapshot = RULES["agwu"](), Snapshot(center)
        self.sequencer = Sequencer(update, snapshot, epoch=1)
        self.ranges = [Range(update, part.center) for part in split_snapshot(snapshot, cuts)]
        self.broken: list[tuple[int, str]] = []

    def handle(self, event: Any, objection: Objection | None) -> Done:
        decision = self.sequencer.handle(event, objection)
        for each in self.ranges:
            each.take(decision.orders)
        answer = decision.answers[0]
        if isinstance(answer.instruction, Reply):
            return Done(Placed(answer.instruction, answer.number))
        return Done(PushRefused(answer.instruction.reason))  # type: ignore[union-attr]

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
        names = {"stage": held.stage, "read": held.answer}
        return type("Handle", (), {n: staticmethod(self.server.of_range(self.number, n, c)) for n, c in names.items()})


def split_link(size: int = 10) -> tuple[HereAndNow, SplitLink]:
    cuts = [(0, 4), (4, size)]
    server = HereAndNow(cuts, np.zeros(size, np.float32))
    ranges = [RangeHere("", KEY, lo, hi, server, i) for i, (lo, hi) in enumerate(cuts)]
    return server, SplitLink(lambda: server, ranges, wire="float32", stopped=lambda: False)


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
    assert server.sequencer.snapshot()[0].merged == 1
    assert not server.broken


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
    assert sum(server.sequencer.snapshot()[0].refused.values()) == 1
