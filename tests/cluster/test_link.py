"""A worker's side of talking to the server, with servers that answer late, never, or are gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from daskcnn.cluster.actor import Link
from daskcnn.ps import Join, Reply
from daskcnn.replica import Stopped

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
