"""Streams between a worker and the server: what goes over them, and what breaks them. Two workers of this process."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from secrets import token_hex
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call
from weakref import ref

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker
from distributed.security import Security
from distributed.worker import _worker_cvar

from daskcnn.cluster.link.calls import ServerLost, Unanswered
from daskcnn.cluster.link.streams import Refused, Stream, open_stream, take_streams
from daskcnn.cluster.run.exchange import ServerExchange
from daskcnn.cluster.server.actor import ServerActor, ServerAt, ServerLink
from daskcnn.cluster.server.ranges import begin_to_load
from daskcnn.cluster.server.stream import PushMemory, read_answer, read_request, reply_parts, send_request
from daskcnn.errors import PushRefused
from daskcnn.nn.optimizers.center import CenterDescent
from daskcnn.nn.optimizers.descent import Descent, Span, Treatment
from daskcnn.nn.optimizers.steps import SGD
from daskcnn.ps import RULES, Code, Join, Leave, NoiseScale, Pull, Push, PushPart, Reply, Snapshot
from daskcnn.ps.server import CenterRange
from daskcnn.training.coordinator.facts import Waits
from daskcnn.training.replica import Stopped
from tests.cluster.cluster_jobs import wait_until

LENGTH = 50_000
_PATCHES: list[Any] = []
"""Functions that stood for methods: a server's thread may be in one as a test ends, and must find it there still."""


def never() -> bool:
    """No wait is to end before what it waits for is there."""
    return False


@contextmanager
def workers_of(**options: Any) -> Iterator[list[Worker]]:
    settings = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**settings, protocol=options.pop("protocol", "tcp"), **options) as local, Client(local):
        yield [local.workers[0], local.workers[1]]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with workers_of() as found:
        yield found


@contextmanager
def on(worker: Worker) -> Iterator[None]:
    """Run inside as a task of this worker does."""
    token = _worker_cvar.set(worker)
    try:
        yield
    finally:
        _worker_cvar.reset(token)


class Hosting:
    """A server on the first worker, and links to it from the second."""

    def __init__(
        self,
        workers: list[Worker],
        rule: str = "downpour",
        wire: str = "float32",
        length: int = LENGTH,
        **of_center: Any,
    ) -> None:
        self.host, self.other = workers
        self.length, self.wire, secret = length, wire, token_hex(8)
        with on(self.host):
            center = Snapshot(np.zeros(length, np.float32))
            self.server = ServerActor(RULES[rule](), center, life=1, wire=wire, secret=secret, **of_center)
        self.at = ServerAt(self.host.address, ("server", 0), (), secret, length)

    def link(self, name: str, stopped: Callable[[], bool] = never, at: ServerAt | None = None) -> ServerLink:
        with on(self.other):
            return (at or self.at).link((at or self.at).stream(name, self.wire), wire=self.wire, stopped=stopped)

    def join(self, name: str) -> None:
        done = threading.Event()
        self.server.serve(Join(1, name, 1), lambda answer: done.set())
        assert done.wait(10)

    def push(self, name: str, seq: int, value: float) -> Push:
        return Push(1, name, 1, seq, 0, np.full(self.length, value, np.float32), 3, 0.5)


def test_requests_and_replies_arrive_as_they_were_sent(workers: list[Worker]) -> None:
    here = Hosting(workers)
    here.join("a")
    link = here.link("a")
    for seq, value in enumerate((1.0, -3.0, 0.25), 1):
        reply = link.call(here.push("a", seq, value))
        assert (reply.worker, reply.session, reply.seq, reply.version, reply.base_version) == ("a", 1, seq, seq, 0)
        assert (reply.n_samples, reply.accuracy, reply.staleness, len(reply.weights)) == (3, 0.5, seq - 1, 0)
    center = link.call(Pull(1, "a", 1)).weights
    np.testing.assert_array_equal(center, np.full(LENGTH, -1.75, np.float32))
    assert (link.bytes_up, link.bytes_down) == (3 * 4 * LENGTH, 4 * LENGTH)


def test_the_average_of_the_center_is_pulled_when_it_is_asked_for(workers: list[Worker]) -> None:
    here = Hosting(workers, ema=0.9)
    here.join("a")
    link = here.link("a")
    link.call(here.push("a", 1, 11.0))
    average = link.call(Pull(1, "a", 1, averaged=True)).weights
    np.testing.assert_allclose(average, np.full(LENGTH, 9.0), rtol=1e-6)  # after a merge it keeps 2/11 of itself
    np.testing.assert_array_equal(link.call(Pull(1, "a", 1)).weights, np.full(LENGTH, 11.0))


def test_the_server_tells_who_waits_and_when_it_heard_of_each_or_answered_it(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is at its next push, or on its way, does not wait. That it was heard of shows that it lives."""
    clock = Mock(return_value=100.0)
    monkeypatch.setattr("daskcnn.cluster.server.actor.time", Mock(monotonic=clock))
    here = Hosting(workers, "bsp")
    for name in "ab":
        here.join(name)
    clock.return_value = 110.0
    here.server.serve(here.push("a", 1, 1.0), Mock())
    clock.return_value = 115.0
    assert asyncio.run(here.server.waiting()) == (["a"], {"a": 5.0, "b": 15.0})
    here.server.serve(here.push("b", 1, 1.0), Mock())
    clock.return_value = 116.0
    assert asyncio.run(here.server.waiting()) == ([], {"a": 1.0, "b": 1.0})


def test_float16_travels_as_such(workers: list[Worker]) -> None:
    here = Hosting(workers, wire="float16")
    here.join("a")
    link = here.link("a")
    link.call(here.push("a", 1, 0.1))
    center = link.call(Pull(1, "a", 1)).weights
    assert center.dtype == np.float16
    np.testing.assert_array_equal(center, np.float16(0.1))
    assert (link.bytes_up, link.bytes_down) == (2 * LENGTH, 2 * LENGTH)


def test_all_who_meet_get_the_same_center(workers: list[Worker]) -> None:
    here, names = Hosting(workers, "bsp"), ["a", "b", "c"]
    for name in names:
        here.join(name)
    with ThreadPoolExecutor(3) as pool:
        links = {name: here.link(name) for name in names}
        for seq in range(1, 6):
            values = {name: float(seq * place) for place, name in enumerate(names)}
            pushed = [pool.submit(links[name].call, here.push(name, seq, values[name])) for name in names]
            for reply in (each.result(10) for each in pushed):
                np.testing.assert_allclose(reply.weights, seq, rtol=1e-6)
                assert reply.version == seq


# --- parts that go ahead ---

CUTS = 40_000, 10_000


class ByGradients(Hosting):
    """A server that steps by gradients, and pushes in parts that begin at `CUTS`."""

    def __init__(self, workers: list[Worker], wire: str = "float32") -> None:
        plain = Descent(SGD(momentum=0.0, weight_decay=0.0), frozenset(), (), False, None)
        steps = CenterDescent(plain, (Span(slice(0, LENGTH), Treatment(1.0, False)),), LENGTH)
        super().__init__(workers, "bsp", wire, steps=steps)
        self.server._loaded.result()  # parts that come before are not looked at
        for name in "ab":
            self.join(name)

    def gradients(self, name: str, seq: int, ticket: int) -> Push:
        numbers = np.random.default_rng(seq + ord(name)).normal(size=LENGTH).astype(np.float32)
        return Push(1, name, 1, seq, seq - 1, numbers, 3, 0.5, pace=(0.1, 0.0), step=seq, ticket=ticket)

    def send_parts(self, link: ServerLink, push: Push) -> None:
        for lo, hi in pairwise([*CUTS[::-1], LENGTH][::-1]):
            link.send_part(PushPart(replace(push, payload=push.payload[hi:lo]), hi, lo))

    def sizes_sent(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return what grows by the bytes of each vector that a worker or the server sends."""
        sent, send, send_now = list[int](), Stream.send, Stream.send_now

        def noted(stream: Stream, *parts: Any, stopped: Callable[[], bool]) -> None:
            sent.extend(part.nbytes for part in parts if isinstance(part, np.ndarray))
            send(stream, *parts, stopped=stopped)

        def noted_now(stream: Stream, *parts: Any) -> list[memoryview]:
            sent.extend(part.nbytes for part in parts if isinstance(part, np.ndarray))
            return send_now(stream, *parts)

        _PATCHES.extend((noted, noted_now))
        monkeypatch.setattr(Stream, "send", noted)
        monkeypatch.setattr(Stream, "send_now", noted_now)
        return sent


def meet(links: dict[str, ServerLink], pushes: dict[str, Push]) -> list[Reply]:
    with ThreadPoolExecutor(len(pushes)) as threads:
        return list(threads.map(lambda name: links[name].call(pushes[name]), pushes))


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_parts_go_once_and_the_center_is_that_of_whole_pushes(
    workers: list[Worker], wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, whole = ByGradients(workers, wire), ByGradients(workers, wire)
    links, others = ({name: each.link(name) for name in "ab"} for each in (here, whole))
    for name in "ab":  # a stream is opened by a whole request
        assert links[name].call(Pull(1, name, 1)).version == 0
    sent, size = here.sizes_sent(monkeypatch), np.dtype(wire).itemsize
    for seq in (1, 2, 3):
        pushes = {name: here.gradients(name, seq, ticket=seq) for name in "ab"}
        sent.clear()
        for name, push in pushes.items():
            here.send_parts(links[name], push)
        found = meet(links, pushes)
        each = [LENGTH - CUTS[0], CUTS[0] - CUTS[1], CUTS[1]]
        assert sorted(sent) == sorted(size * n for n in each * 4), "two workers, two directions"
        expected = meet(others, {name: replace(push, ticket=0) for name, push in pushes.items()})
        for reply, other in zip(found, expected, strict=True):
            assert reply.weights.tobytes() == other.weights.tobytes()
            assert reply.version == seq


def test_a_stream_that_breaks_between_parts_is_made_up_for_by_a_whole_push(workers: list[Worker]) -> None:
    here, whole = ByGradients(workers), ByGradients(workers)
    links, others = ({name: each.link(name) for name in "ab"} for each in (here, whole))
    for name in "ab":
        links[name].call(Pull(1, name, 1))
    pushes = {name: here.gradients(name, 1, ticket=5) for name in "ab"}
    for name, push in pushes.items():
        here.send_parts(links[name], push)
    stream = links["a"]._stream
    assert stream is not None
    stream.close()
    found = meet(links, pushes)
    expected = meet(others, {name: replace(push, ticket=0) for name, push in pushes.items()})
    assert [each.weights.tobytes() for each in found] == [each.weights.tobytes() for each in expected]


@pytest.mark.parametrize("before", [1, 7])
def test_a_step_that_is_made_anew_leaves_nothing_of_the_one_before(workers: list[Worker], before: int) -> None:
    here, whole = ByGradients(workers), ByGradients(workers)
    links, others = ({name: each.link(name) for name in "ab"} for each in (here, whole))
    for name in "ab":
        links[name].call(Pull(1, name, 1))
        here.send_parts(links[name], replace(here.gradients(name, 7, ticket=5), seq=before, base_version=0))
    pushes = {name: here.gradients(name, 1, ticket=6) for name in "ab"}
    here.send_parts(links["a"], pushes["a"])
    found = meet(links, {"a": pushes["a"], "b": replace(pushes["b"], ticket=0)})
    expected = meet(others, {name: replace(push, ticket=0) for name, push in pushes.items()})
    assert [each.weights.tobytes() for each in found] == [each.weights.tobytes() for each in expected]


def test_parts_that_exceed_the_vector_close_the_stream() -> None:
    memory = PushMemory(range(5, 6), np.dtype("float32"))
    assert memory.part(2, ticket=1) == (3, 5)
    with pytest.raises(ConnectionError, match="a part of 3 numbers: fewer are left"):
        memory.part(3, ticket=1)
    with pytest.raises(ConnectionError, match="a push of 3 numbers: 5 to 5 are pushed"):
        memory.of(3, ticket=2)


def test_refusals_have_their_reason_and_the_stream_goes_on(workers: list[Worker]) -> None:
    here = Hosting(workers)
    here.join("a")
    link = here.link("a")
    with pytest.raises(PushRefused, match="a: payload") as caught:
        link.call(here.push("a", 1, np.nan))
    assert caught.value.code == Code.FINITE
    assert link.call(here.push("a", 1, 1.0)).version == 1


@pytest.mark.parametrize("error", [ValueError("no mean of none"), MemoryError("Unable to allocate 1.2 GiB")], ids=str)
def test_a_merge_that_raises_is_told_to_all_who_wait_once_and_in_words(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It was made again for each of six streams, and taken for a server that is gone."""
    here, merge = Hosting(workers, "bsp"), Mock(side_effect=error)
    for name in "ab":
        here.join(name)
    monkeypatch.setattr(CenterRange, "proposed", merge)
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(here.link(name).call, here.push(name, 1, 1.0)) for name in "ab"]
        refused = {name: each.exception(10) for name, each in zip("ab", told, strict=True)}
    for name, found in refused.items():
        assert isinstance(found, PushRefused)
        assert found.code == (Code.MEMORY if isinstance(error, MemoryError) else Code.FAILED)
        assert str(found).startswith(f"{name}: ")
        assert str(error) in str(found)
    assert merge.call_count == 1
    asyncio.run(here.server.leave("a", 1))
    with pytest.raises(PushRefused, match=str(error)):
        here.link("b").call(Pull(1, "b", 1))
    assert merge.call_count == 1


def test_one_that_left_with_a_push_and_is_back_is_not_told_the_answer_to_that(workers: list[Worker]) -> None:
    here = Hosting(workers, "bsp")

    def left(*args: Any) -> Future[bool]:
        found = Future[bool]()
        found.set_result(asyncio.run(here.server.leave(*args)))
        return found

    for name in ("a", "b"):
        here.join(name)
    with on(here.other):
        stream = here.at.stream("a", here.wire)
    how: dict[str, Any] = {"wire": here.wire, "stopped": never}
    gone = ServerLink(lambda: SimpleNamespace(leave=left), stream=stream, **how)
    assert gone.leave(here.push("a", 1, 1.0), sent=False, until=time.monotonic() + 10)
    assert here.link("b").call(here.push("b", 1, 3.0)).version == 1
    here.server.serve(Join(1, "a", 2), lambda answer: None)
    here.server.serve(Leave("b", 1))
    push = replace(here.push("a", 1, 5.0), session=2, base_version=1)
    reply = ServerLink(lambda: None, stream=stream, **how).call(push)
    assert (reply.session, reply.version) == (2, 2)
    np.testing.assert_array_equal(reply.weights, np.full(LENGTH, 5.0, np.float32))


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_push_whose_stream_breaks_is_sent_again_and_merged_once(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    here, broken = Hosting(workers), [False]
    here.join("a")
    link = here.link("a")
    link.call(here.push("a", 1, 1.0))
    stream: Stream = link._stream._stream  # type: ignore[union-attr, assignment]
    method = "receive" if lost == "answer" else "send"

    def breaks(*args: Any, **options: Any) -> None:
        broken[0] = True
        if lost == "answer":  # the server has it, and no one hears what it says
            wait_until(lambda: asyncio.run(here.server.snapshot()).version == 2)
        stream.close()
        raise ConnectionError("what has arrived already could still be read")

    monkeypatch.setattr(stream, method, breaks)  # of this end alone: other threads are in the class's own
    assert link.call(here.push("a", 2, 1.0)).version == 2
    assert broken[0]
    np.testing.assert_array_equal(link.call(Pull(1, "a", 1)).weights, 2.0)


def test_strangers_are_refused(workers: list[Worker]) -> None:
    here = Hosting(workers)
    stranger = ServerAt(here.at.address, here.at.key, (), "guessed", LENGTH)
    with pytest.raises(Refused, match="is not here"):
        here.link("a", at=stranger).call(Pull(1, "a", 1))


def test_a_vector_of_another_length_closes_the_stream(workers: list[Worker]) -> None:
    here = Hosting(workers)
    here.join("a")
    long = Push(1, "a", 1, 1, 0, np.zeros(2 * LENGTH, np.float32), 3, 0.5)
    with pytest.raises(ConnectionError, match="is gone"):
        here.link("a").call(long)
    link = here.link("a")
    assert link.call(here.push("a", 1, 1.0)).version == 1


def test_a_host_that_is_busy_for_some_tries_costs_no_worker_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskcnn.cluster.server.actor.PAUSE", 0.0)
    stream = Mock(call=Mock(side_effect=[ConnectionError("no answer")] * 5 + [Mock(weights=np.zeros(3))]))
    link = ServerLink(Mock(), (), stream, wire="float32", stopped=never)
    assert link.call(Pull(1, "a", 1)).weights.size == 3
    stopped = ServerLink(Mock(), (), Mock(call=Mock(side_effect=OSError)), wire="float32", stopped=lambda: True)
    with pytest.raises(Stopped):
        stopped.call(Pull(1, "a", 1))


def test_a_server_that_has_ended_is_gone(workers: list[Worker]) -> None:
    here = Hosting(workers, "bsp")
    for name in "ab":
        here.join(name)
    link = here.link("a")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(link.call, here.push("a", 1, 1.0))  # "b" never comes
        time.sleep(0.2)
        assert not waits.done()
        del here.server
        with pytest.raises(Refused, match="is not here"):
            waits.result(20)


def test_a_part_without_its_rest_does_not_keep_a_replaced_server(workers: list[Worker]) -> None:
    """Its worker was stopped or cut off in between, and its stream is still open."""
    here = ByGradients(workers)
    link = here.link("a")
    link.call(Pull(1, "a", 1))
    push = here.gradients("a", 1, ticket=5)
    link.send_part(PushPart(replace(push, payload=push.payload[CUTS[0] :]), CUTS[0], LENGTH))
    wait_until(lambda: "a" in here.server._gives)
    server = ref(here.server)
    del here.server

    def gone() -> bool:  # the stream's thread may still be in its call
        gc.collect()
        return server() is None

    wait_until(gone)


def test_a_wait_ends_when_the_run_is_stopped(workers: list[Worker]) -> None:
    here, stop = Hosting(workers, "bsp"), threading.Event()
    for name in "ab":
        here.join(name)
    link = here.link("a", stopped=stop.is_set)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(link.call, here.push("a", 1, 1.0))
        stop.set()
        with pytest.raises(Stopped):
            waits.result(10)


def test_calls_of_several_threads_take_turns_on_one_stream(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that is stopped may still wait on the thread of exchanges when the next one begins."""
    here, opened = Hosting(workers), Mock(wraps=open_stream)
    monkeypatch.setattr("daskcnn.cluster.server.stream.open_stream", opened)
    here.join("a")
    link, numbers = here.link("a"), np.random.default_rng(0).normal(size=LENGTH).astype(np.float32)
    link.call(Push(1, "a", 1, 1, 0, numbers, 3, 0.5))
    with ThreadPoolExecutor(4) as pool:
        for reply in pool.map(link.call, [Pull(1, "a", 1)] * 80):
            np.testing.assert_array_equal(reply.weights, numbers)
    assert opened.call_count == 1


def test_whoever_does_not_read_holds_nobody_up(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    here = Hosting(workers, "bsp", length=4_000_000)  # more than a connection holds
    for name in "az":
        here.join(name)
    deaf, hears, reads, receive = here.link("a"), here.link("z"), threading.Event(), Stream.receive

    def late(stream: Stream, *args: Any) -> None:
        if stream is deaf._stream._stream:  # type: ignore[union-attr]
            reads.wait(20)
        receive(stream, *args)

    monkeypatch.setattr(Stream, "receive", late)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(deaf.call, here.push("a", 1, 1.0))
        assert pool.submit(hears.call, here.push("z", 1, 1.0)).result(20).version == 1
        assert not waits.done()
        first = deaf._stream._stream  # type: ignore[union-attr]
        reads.set()
        assert waits.result(20).version == 1
        assert deaf._stream._stream is first  # type: ignore[union-attr]


def test_streams_go_over_tls() -> None:
    with workers_of(protocol="tls", security=Security.temporary()) as workers:
        here = Hosting(workers)
        assert here.at.address.startswith("tls://")
        here.join("a")
        link = here.link("a")
        assert link.call(here.push("a", 1, 2.0)).version == 1
        np.testing.assert_array_equal(link.call(Pull(1, "a", 1)).weights, 2.0)


def test_bytes_arrive_in_order_whatever_their_number(workers: list[Worker]) -> None:
    """Echoed, in pieces of all sizes."""
    host, other = workers
    sizes = [1, 7, 65_536, 1_000_003, 0, 12]

    def echo(stream: Stream) -> None:
        for size in sizes:
            buffer = bytearray(size)
            stream.receive(buffer, never)
            stream.send(buffer[: size // 2], buffer[size // 2 :], stopped=never)

    take_streams(host, "echo", lambda message: echo)
    stream, rng = open_stream(other, host.address, "echo", {}, never), np.random.default_rng(0)
    for size in sizes:
        said, heard = rng.bytes(size), bytearray(size)
        stream.send(said, stopped=never)
        stream.receive(heard, never)
        assert heard == said
    with pytest.raises(EOFError, match="closed"):
        stream.receive(bytearray(1), never)
    stream.close()


class Pipe:
    """What is sent is what is received."""

    def __init__(self) -> None:
        self.bytes = b""

    def send(self, *parts: Any, stopped: Callable[[], bool]) -> None:
        self.bytes += b"".join(bytes(part) for part in parts)

    def receive(self, into: Any, stopped: Callable[[], bool]) -> None:
        view = memoryview(into).cast("B")
        view[:], self.bytes = self.bytes[: len(view)], self.bytes[len(view) :]


def test_every_field_of_a_push_and_of_its_reply_travels() -> None:
    pipe: Any = Pipe()
    push = Push(1, "a", 2, 3, 4, np.arange(5, dtype=np.float32), 6, 0.75, step=7, ticket=8, last=True)
    send_request(pipe, push, never)
    assert read_request(pipe, "a", PushMemory(range(5, 6), push.payload.dtype), never) == push
    numbers = np.arange(5, dtype=np.float32)
    reply = Reply(
        1, "a", 2, 3, numbers, 8, 4, 3, 0.5, 0.75, 6, 1.5, more=-9, since=10, parts=True, noise=NoiseScale(250.0, 12.5)
    )
    reply = replace(reply, last=True)
    plain = [each for each in fields(Reply) if each.default is not MISSING and each.name != "ahead"]
    assert all(getattr(reply, each.name) != each.default for each in plain), "this would not show what is left out"
    pipe.send(*reply_parts(reply), stopped=never)
    found = read_answer(pipe, push, 5, numbers.dtype, never)
    assert found == reply
    np.testing.assert_array_equal(found.weights, numbers)


@pytest.mark.parametrize("alone", [True, False])
def test_a_host_of_its_own_loads_the_merges_while_workers_are_calibrated(*, alone: bool) -> None:
    """Else the first push of a run waits for them. A worker of the run loads them itself."""
    context = Mock()
    context.workers.members.server_alone = alone
    ServerExchange(context, RULES["bsp"](), Mock(), Mock())
    host, dtype = context.workers.members.server, context.job.model.dtype
    asked = [call(host, "load-merges", begin_to_load, dtype)] if alone else []
    assert context.dispatch.submit_at.call_args_list == asked


@pytest.mark.parametrize(("stall", "within"), [(20.0, [20.0]), (300.0, [60.0] * 5)])
def test_the_driver_waits_for_the_server_no_longer_than_the_stall_timeout(
    monkeypatch: pytest.MonkeyPatch, stall: float, within: list[float]
) -> None:
    context, asked = Mock(), Mock(side_effect=Unanswered("no answer"))
    context.job.cluster.stall_timeout, context.workers.members.server_alone = stall, False
    monkeypatch.setattr("daskcnn.cluster.run.exchange.answer_of_actor", asked)
    exchange = ServerExchange(context, RULES["bsp"](), Mock(), Mock())
    exchange._hosted = Mock(at=Mock(length=0))
    with pytest.raises(ServerLost):
        exchange.snapshot()
    assert [each.kwargs["within"] for each in asked.call_args_list] == within


def test_a_snapshot_that_takes_its_time_is_waited_for_while_its_hosts_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link it would never come to an end otherwise: the same merges would be made again and again."""
    whole = Snapshot(np.zeros(3, np.float32))
    context, asked = Mock(), Mock(side_effect=[*[Unanswered("no answer")] * 20, whole])
    context.job.cluster.stall_timeout, context.workers.members.server_alone = 300.0, False
    monkeypatch.setattr("daskcnn.cluster.run.exchange.answer_of_actor", asked)
    exchange = ServerExchange(context, RULES["bsp"](), Mock(), Mock())
    exchange._hosted = Mock(at=Mock(length=250_000_000), hosts={"tcp://a"})
    assert exchange.snapshot().center is whole.center
    assert exchange._hosted.ask.call_count == 1, "one transfer"
    asked.side_effect, context.workers.require_answers.side_effect = Unanswered("no answer"), ServerLost
    with pytest.raises(ServerLost):
        exchange.snapshot()
    assert context.workers.require_answers.call_args == call({"tcp://a"})


def test_a_host_of_a_range_that_hangs_is_given_up_before_any_worker() -> None:
    """Nobody gets past it, and the sequencer, which is asked who waits, is on another host."""
    context = Mock()
    context.workers.require_answers.side_effect = ServerLost
    exchange = ServerExchange(context, RULES["bsp"](), Mock(), Mock())
    exchange._hosted = Mock(hosts=frozenset({"tcp://a", "tcp://b"}))
    with pytest.raises(ServerLost):
        exchange.waiting(["cpu-0", "cpu-1"])
    assert context.workers.require_answers.call_args == call({"tcp://a", "tcp://b"})


def test_the_coordinator_is_told_when_the_server_heard_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, heard = Mock(stuck=lambda replica: (replica,)), {"cpu-0": 9.0, "cpu-1": 0.5}
    monkeypatch.setattr("daskcnn.cluster.run.exchange.answer_of_actor", Mock(return_value=(["cpu-0"], heard)))
    context = Mock()
    context.job.cluster.stall_timeout, context.workers.members.server_alone = 300.0, False
    exchange = ServerExchange(context, RULES["bsp"](), replicas, Mock())
    exchange._hosted = Mock()
    assert exchange.waiting(["cpu-0", "cpu-1"]) == Waits(frozenset({"cpu-0"}), ANY, {"cpu-1": ("cpu-1",)}, heard=heard)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_one_that_does_not_read_for_a_while_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask gives its connections 30 s, here 1 s. A worker may take another's vector over a slow link meanwhile."""

    def limit(comm: Any) -> None:
        comm.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000)

    monkeypatch.setattr("distributed.comm.tcp.set_tcp_timeout", limit)
    sent, arrived = np.arange(1 << 24, dtype=np.uint8), np.empty(1 << 24, np.uint8)

    def read_late(stream: Stream) -> None:
        time.sleep(2.5)  # longer than the limit, and the probe behind it
        stream.receive(arrived, never)
        stream.send(b"!", stopped=never)

    with workers_of() as (host, other):
        take_streams(host, "late", lambda message: read_late)
        stream = open_stream(other, host.address, "late", {}, never)
        stream.send(sent, stopped=never)
        stream.receive(bytearray(1), never)
        stream.close()
    np.testing.assert_array_equal(arrived, sent)


def test_all_are_told_before_any_thread_is_woken_up(workers: list[Worker]) -> None:
    here, order = Hosting(workers, "bsp"), list[str]()
    for name in "ab":
        here.join(name)

    def tell(answer: Any) -> Callable[[], None]:
        order.append("told")
        return lambda: order.append("woken")

    for name in "ab":
        here.server.serve(here.push(name, 1, 1.0), tell)
    assert order == ["told", "told", "woken", "woken"]
