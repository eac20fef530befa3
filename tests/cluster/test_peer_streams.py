"""Pieces between workers that meet: over streams, and by calls where there are none. Two workers of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from secrets import token_hex
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
from distributed import Worker
from distributed.security import Security

from daskcnn.cluster.link.streams import Stream
from daskcnn.cluster.peers.pieces import OutOfTurn, Peers, PieceExchange
from daskcnn.errors import Diverged, PushRefused
from daskcnn.ps import Code
from daskcnn.ps.bsp import ASA, BSP
from daskcnn.training.replica import Stopped
from tests.cluster.cluster_jobs import wait_until
from tests.cluster.test_streams import never, on, workers_of

SIZE, NAMES = 50_001, ("a", "b")


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with workers_of() as found:
        yield found


class Pair:
    """Two workers that meet, with the vectors that they begin with."""

    def __init__(self, workers: list[Worker], exchange: Literal["asa", "asa16"] = "asa") -> None:
        self.workers, asa = dict(zip(NAMES, workers, strict=True)), ASA.of(BSP(exchange=exchange), "float32")
        self.peers = Peers("run", 1, NAMES, SIZE, token_hex(8), tuple(worker.address for worker in workers))
        self.asa, self.sides = asa, dict[str, PieceExchange]()
        for name, worker in self.workers.items():
            with on(worker):
                self.sides[name] = PieceExchange(self.peers, name, asa)

    def meet(self, name: str, value: float, version: int, stopped: Callable[[], bool] = never) -> np.ndarray:
        """What one of them has after a meeting."""
        side, (lo, hi) = self.sides[name], self.peers.spans()[name]
        said = np.full(SIZE, value, self.asa.wire)
        with on(self.workers[name]):
            side.know(self.peers)
        replies = side.exchange(said, np.zeros(hi - lo, np.float32), 3, version, stopped)
        assert {reply.version for reply in replies.values()} == {version + 1}
        return np.concatenate([replies[each].weights for each in NAMES])

    def met(self, values: tuple[float, float], version: int) -> list[np.ndarray]:
        with ThreadPoolExecutor(2) as pool:
            told = [pool.submit(self.meet, name, value, version) for name, value in zip(NAMES, values, strict=True)]
            return [each.result(20) for each in told]


@pytest.mark.parametrize("exchange", ["asa", "asa16"])
def test_both_have_the_mean_meeting_after_meeting(workers: list[Worker], exchange: Literal["asa", "asa16"]) -> None:
    pair = Pair(workers, exchange)
    for version in (5, 6, 7):
        for whole in pair.met((1.0, 2.0 * version), version):
            np.testing.assert_array_equal(whole, np.full(SIZE, (1.0 + 2.0 * version) / 2, pair.asa.wire))
    moved = 3 * SIZE * pair.asa.wire.itemsize
    assert [(side.bytes_up, side.bytes_down) for side in pair.sides.values()] == [(moved, moved)] * 2


def test_peers_meet_over_tls() -> None:
    with workers_of(protocol="tls", security=Security.temporary()) as workers:
        for whole in Pair(workers).met((1.0, 3.0), 0):
            np.testing.assert_array_equal(whole, 2.0)


def test_peers_meet_by_calls_where_connections_are_no_sockets() -> None:
    with workers_of(protocol="inproc") as workers:
        pair = Pair(workers)
        for version in (0, 1):
            for whole in pair.met((1.0, 3.0), version):
                np.testing.assert_array_equal(whole, 2.0)
        with pytest.raises(Stopped):
            pair.meet("a", 1.0, 2, lambda: True)


@pytest.mark.parametrize("lost", ["send", "receive"])
def test_a_meeting_goes_on_where_a_stream_breaks(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    pair, original, broken = Pair(workers), getattr(Stream, lost), [False]
    pair.met((1.0, 3.0), 0)
    end: Any = pair.sides["a"]._ends["b"]
    desk = pair.sides["b"]._desk

    def breaks(stream: Stream, *args: Any, **options: Any) -> None:
        if stream is end._stream and not broken[0]:
            broken[0] = True
            if lost == "receive":  # the other has the piece, and no one hears what it says
                wait_until(lambda: "a" in desk._pushed or desk._summed == 1)
            stream.close()
            raise ConnectionError("what has arrived already could still be read")
        original(stream, *args, **options)

    monkeypatch.setattr(Stream, lost, breaks)
    for whole in pair.met((2.0, 4.0), 1):
        np.testing.assert_array_equal(whole, 3.0)
    assert broken[0]


def test_a_sum_that_is_not_finite_is_told_to_both(workers: list[Worker]) -> None:
    pair = Pair(workers)
    with ThreadPoolExecutor(2) as pool:
        for told in [pool.submit(pair.meet, name, value, 0) for name, value in zip(NAMES, (1.0, np.nan), strict=True)]:
            with pytest.raises(Diverged, match=r"lower train\.lr"):
                told.result(20)


def test_a_sum_that_cannot_be_made_is_told_to_both(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other was taken for one that does not come."""
    pair = Pair(workers)
    monkeypatch.setattr(BSP, "merge", Mock(side_effect=KeyError("velocity")))
    with ThreadPoolExecutor(2) as pool:
        for told in [pool.submit(pair.meet, name, 1.0, 0) for name in NAMES]:
            with pytest.raises(PushRefused, match="KeyError: 'velocity'") as refused:
                told.result(20)
            assert refused.value.code == Code.FAILED


def test_strangers_and_other_lives_add_nothing(workers: list[Worker]) -> None:
    pair = Pair(workers)
    with on(workers[0]):
        stranger = PieceExchange(replace(pair.peers, secret="guessed"), "a", pair.asa)
        stranger.know(replace(pair.peers, secret="guessed"))
        former = PieceExchange(replace(pair.peers, life=0), "c", pair.asa)
        former.know(replace(pair.peers, life=0, names=("b", "c"), addresses=pair.peers.addresses[::-1]))
    with pytest.raises(OutOfTurn, match="worker b does not come to the meeting of version 0"):
        stranger.exchange(np.ones(SIZE, np.float32), np.zeros(SIZE // 2 + 1, np.float32), 3, 0, never)
    with pytest.raises(OutOfTurn, match="life=0"):
        former.exchange(np.ones(SIZE, np.float32), np.zeros(SIZE // 2, np.float32), 3, 0, never)
    with on(workers[0]):
        pair.sides["a"] = PieceExchange(pair.peers, "a", pair.asa)
    for whole in pair.met((1.0, 3.0), 0):
        np.testing.assert_array_equal(whole, 2.0)


def test_a_wait_for_one_that_does_not_come_ends_when_the_run_is_stopped(workers: list[Worker]) -> None:
    pair, stop = Pair(workers), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(pair.meet, "a", 1.0, 0, stop.is_set)
        while not pair.sides["a"].waits:
            time.sleep(0.01)
        assert not waits.done()
        stop.set()
        with pytest.raises(Stopped):
            waits.result(10)
