"""Pushes, pulls and replies between a worker and a whole server, over a stream that is held open for the server's life.

On the stream are heads of fixed length, each followed by a vector as it lies in memory. A vector may come in parts,
from its end on: of a push as its numbers are known, of the answer as all workers have sent theirs. The worker's name is
said once, when the stream is opened. A head says how long the vector is. The receiver knows how long it has to be and
refuses any other, so no number that a stranger sends makes it reserve memory.
"""

from __future__ import annotations

import asyncio
import math
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary, ref

import numpy as np
from distributed import get_worker
from distributed.protocol import to_serialize

from daskcnn.cluster.link.streams import TURN, Refused, Serve, Stream, open_stream, take_streams
from daskcnn.errors import PushRefused
from daskcnn.ps import CenterPart, Code, NoiseScale, Pull, Push, PushPart, Refuse, Reply, Vector
from daskcnn.ps.wire import CODED, coded_bytes

Stopped: TypeAlias = Callable[[], bool]
Answer: TypeAlias = Reply | Refuse | ConnectionError
"""The answer to a request as it goes over the wire, or why none will come."""
Tell: TypeAlias = Callable[[Answer], Callable[[], None] | None]
"""Tells a caller its answer. Returns what is left to do for it once all others are told, if anything."""
Give: TypeAlias = Callable[[CenterPart, Vector], None]
"""Gives a caller a part of its answer, and the part's numbers as they go over the wire."""
HANDLER: Final = "daskcnn_server"
CALLED: Final = "daskcnn_called_server"
_PUSH, _PULL, _REPLY, _REFUSAL, _LOST, _PULL_AVERAGE, _PUSH_PART, _CENTER_PART = range(8)
_PUSHED: Final = ("life", "session", "seq", "base_version", "n_samples", "step", "ticket", "last", "accuracy")
_REQUEST: Final = struct.Struct("<qqqqqqqqqdddq")  # the kind, these fields, the pace or NaN, and the vector's numbers
_NO_PACE: Final = (math.nan, math.nan)
_NO_NOISE: Final = NoiseScale(math.nan, math.nan)
_REPLIED: Final = (
    "life", "session", "seq", "version", "base_version", "staleness", "n_samples", "more", "since", "last",
    "parts", "gamma", "accuracy", "waited",
)  # fmt: skip
_ANSWER: Final = struct.Struct("<qqqqqqqqqqqqdddddq")  # kind, these fields, noise or NaN, a vector's or reason's size
_REASON = 1 << 16  # bytes


def send_request(stream: Stream, request: Push | Pull, stopped: Stopped) -> None:
    """Send a push, whose payload is as it goes over the wire, or a pull. Raises OSError or EOFError."""
    if isinstance(request, Pull):
        kind = _PULL_AVERAGE if request.averaged else _PULL
        head = _REQUEST.pack(kind, request.life, request.session, *(0,) * (len(_PUSHED) - 2), *_NO_PACE, 0)
        stream.send(head, stopped=stopped)
    else:
        stream.send(*_push_buffers(_PUSH, request), stopped=stopped)


def _push_buffers(kind: int, push: Push) -> list[Any]:
    fields, payload = [getattr(push, name) for name in _PUSHED], np.ascontiguousarray(push.payload)
    return [_REQUEST.pack(kind, *fields, *(push.pace or _NO_PACE), len(payload)), payload]


class PushMemory:
    """Memory for the vectors of one stream's pushes: each is answered before the next one is read."""

    def __init__(self, lengths: range, wire: np.dtype[Any]) -> None:
        self._lengths, self._vector = lengths, np.empty(0, wire)
        self._parts_of, self._lo = 0, 0

    def of(self, numbers: int, ticket: int = 0) -> tuple[Vector, Vector]:
        """Return a push's vector, and the place in it of this many numbers: all of it, or its front.

        Raises ConnectionError where no vector may be as long.
        """
        if ticket and ticket == self._parts_of and numbers == self._lo:
            self._parts_of = 0
            return self._vector, self._vector[:numbers]
        if numbers not in self._lengths:
            raise ConnectionError(f"a push of {numbers} numbers: {self._lengths[0]} to {self._lengths[-1]} are pushed")
        if len(self._vector) != numbers:
            self._vector = np.empty(numbers, self._vector.dtype)
        return self._vector, self._vector

    def part(self, numbers: int, ticket: int) -> tuple[int, int]:
        """Return lo and hi of the next part, of this many numbers. Raises ConnectionError if there is none."""
        if ticket != self._parts_of:
            self.of(self._lengths[-1])
            self._parts_of, self._lo = ticket, len(self._vector)
        hi, self._lo = self._lo, self._lo - numbers
        if not ticket or not 0 < self._lo < hi:
            raise ConnectionError(f"a part of {numbers} numbers: fewer are left of the push")
        return self._lo, hi

    def __getitem__(self, place: slice) -> Vector:
        """Return a part of the vector."""
        return self._vector[place]


def read_request(stream: Stream, worker: str, pushed: PushMemory, stopped: Stopped) -> Push | Pull | PushPart:
    """Read a request of this worker, or a part of one. A push's payload is memory of `pushed`.

    Raises EOFError where the other end is closed, or OSError where it is gone or sends a vector of another length.
    """
    head = bytearray(_REQUEST.size)
    stream.receive(head, stopped)
    kind, *fields, lr, progress, numbers = _REQUEST.unpack(head)
    if kind in (_PULL, _PULL_AVERAGE):
        return Pull(fields[0], worker, fields[1], averaged=kind == _PULL_AVERAGE)
    named: dict[str, Any] = dict(zip(_PUSHED, fields, strict=True))
    pace = None if math.isnan(lr) else (lr, progress)
    if kind == _PUSH_PART:
        lo, hi = pushed.part(numbers, named["ticket"])
        stream.receive(pushed[lo:hi], stopped)
        return PushPart(Push(worker=worker, payload=pushed[lo:hi], pace=pace, **named), lo, hi)
    if kind != _PUSH:
        raise ConnectionError(f"a request of kind {kind}: there is none")
    payload, missing = pushed.of(numbers, named["ticket"])
    stream.receive(missing, stopped)
    return Push(worker=worker, payload=payload, pace=pace, **named)


def reply_parts(reply: Reply, given: int | None = None) -> list[Any]:
    """Return the buffers of a reply, whose weights are as they go over the wire.

    given: the number from which on the receiver has weights that were given ahead.
    """
    holds = given is not None and reply.ahead is not None and reply.ahead <= given
    weights = np.ascontiguousarray(reply.weights[:given] if holds else reply.weights)
    fields = [getattr(reply, name) for name in _REPLIED]
    return [_ANSWER.pack(_REPLY, *fields, *(reply.noise or _NO_NOISE), len(weights)), weights]


def center_part_buffers(part: CenterPart, values: Vector) -> list[Any]:
    """Return the buffers of a part of the center. values: its own, as they go over the wire."""
    rest = *(0,) * (len(_REPLIED) - 3), *_NO_NOISE
    return [_ANSWER.pack(_CENTER_PART, 0, part.session, part.seq, *rest, len(values)), np.ascontiguousarray(values)]


def refusal_parts(refused: Refuse | Exception) -> list[Any]:
    """Return the buffers of a refusal, or of the news that no answer will come."""
    known = isinstance(refused, Refuse)
    reason = (f"{refused.code}\n{refused.reason}" if isinstance(refused, Refuse) else str(refused)).encode()[:_REASON]
    return [_ANSWER.pack(_REFUSAL if known else _LOST, *(0,) * len(_REPLIED), *_NO_NOISE, len(reason)), reason]


def read_answer(stream: Stream, request: Push | Pull, length: int, wire: np.dtype[Any], stopped: Stopped) -> Reply:
    """Read the answer to a request, with a vector of this length, coded or not, or none.

    Parts of one that is not coded may have come ahead.

    Raises PushRefused, EOFError where the server has ended, or OSError where it is gone.
    """
    weights, lo = np.empty(length, wire), length
    head = bytearray(_ANSWER.size)
    stream.receive(head, stopped)
    kind, *fields, scale, error, size = _ANSWER.unpack(head)
    while kind == _CENTER_PART and 0 < size <= length:
        of_this = fields[1:3] == [request.session, request.seq]  # not of a push that was given up
        if of_this and size >= lo:
            break
        stream.receive(weights[lo - size : lo] if of_this else np.empty(size, wire), stopped)
        lo -= size if of_this else 0
        stream.receive(head, stopped)
        kind, *fields, scale, error, size = _ANSWER.unpack(head)
    if kind in (_REFUSAL, _LOST) and 0 <= size <= _REASON:
        words = bytearray(size)
        stream.receive(words, stopped)
        code, _, reason = words.decode(errors="replace").partition("\n")
        if kind == _LOST:
            raise ConnectionError(code)
        raise PushRefused(f"{request.worker}: {reason}", Code(code))
    if kind == _REPLY and size == coded_bytes(length):
        weights = np.empty(size, CODED)
    elif kind != _REPLY or size not in (0, length, lo):
        raise ConnectionError(f"an answer of kind {kind} with {size} numbers: the center has {length}")
    stream.receive(weights[:size], stopped)
    named: dict[str, Any] = dict(zip(_REPLIED, fields, strict=True))
    named["noise"] = None if math.isnan(scale) else NoiseScale(scale, error)
    return Reply(worker=request.worker, weights=weights if size else weights[:0], **named)


class WorkerEnd:
    """A worker's end, opened when it is first used, and again where it breaks.

    worker: Dask's, on which this is. name: the worker's in its run. secret: the server's. length: of the center.
    """

    def __init__(self, worker: Any, name: str, address: str, secret: str, length: int, wire: str) -> None:
        self._worker, self._address, self._length, self._wire = worker, address, length, np.dtype(wire)
        self._opening = {"server": secret, "worker": name}
        self._stream: Stream | None = None
        self._sent: tuple[int, int] | None = None  # the ticket of the parts that were sent, and where they begin
        self._left: list[memoryview] = []  # of these parts, what the connection did not take yet
        self._turn = threading.Lock()  # a round that is stopped may still wait for an answer when the next one begins

    def leads_to(self, secret: str) -> bool:
        """Return True if it leads to the server with this secret."""
        return self._opening["server"] == secret

    def call(self, request: Push | Pull, stopped: Stopped) -> Reply:
        """Send a request and wait for the answer.

        Raises PushRefused, or OSError or EOFError where the stream breaks or the wait is stopped.
        """
        with self._turn:
            self.begin(request, stopped)
            return self.finish(request, stopped)

    def send_part(self, part: PushPart, stopped: Stopped) -> None:
        """Send a part of a push ahead of the rest, if the stream is open and free. If it breaks, all is sent later.

        What the connection does not take at once goes with what is sent next: its memory must not change until then.
        """
        if self._turn.acquire(blocking=False):
            try:
                with suppress(OSError, EOFError), self._closed_if_broken():
                    before = self._length if self._sent is None or self._sent[0] != part.push.ticket else self._sent[1]
                    if self._stream is not None and before == part.hi:
                        buffers = [*self._left, *_push_buffers(_PUSH_PART, part.push)]
                        self._left = self._stream.send_soon(*buffers, stopped=stopped)
                        self._sent = part.push.ticket, part.lo
            finally:
                self._turn.release()

    def begin(self, request: Push | Pull, stopped: Stopped) -> None:
        """Send a request, or what is left of it. Raises OSError or EOFError."""
        with self._closed_if_broken():
            if self._stream is None:
                self._stream = open_stream(self._worker, self._address, HANDLER, self._opening, stopped)
            if isinstance(request, Push) and self._sent is not None and request.ticket == self._sent[0]:
                request = replace(request, payload=request.payload[: self._sent[1]])
            left, self._sent, self._left = self._left, None, []
            self._stream.send_rest(left, stopped)
            send_request(self._stream, request, stopped)

    def finish(self, request: Push | Pull, stopped: Stopped) -> Reply:
        """Wait for the answer to the request that was sent last. Raises PushRefused, OSError or EOFError."""
        with self._closed_if_broken():
            if self._stream is None:
                raise ConnectionError(f"{self._address}: the stream is broken")
            reply = read_answer(self._stream, request, self._length, self._wire, stopped)
            if isinstance(request, Push) and (reply.session, reply.seq) != (request.session, request.seq):
                raise ConnectionError(f"{self._address}: the answer to push {reply.seq} in place of {request.seq}")
            return reply

    def close(self) -> None:
        """Close the stream. It is opened again where it is used again."""
        self._sent, self._left = None, []
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @contextmanager
    def _closed_if_broken(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError):
            self.close()
            raise


class CalledEnd:
    """A worker's end where Dask's connections are no sockets: each push is a call of the other worker."""

    def __init__(self, worker: Any, address: str, secret: str) -> None:
        self._worker, self._address, self._secret = worker, address, secret
        self._answer: Future[Any] = Future()

    def begin(self, request: Push | Pull, stopped: Stopped) -> None:
        """Send a request."""

        async def called() -> Any:
            call = getattr(self._worker.rpc(self._address), CALLED)
            return await call(server=self._secret, request=to_serialize(request))

        self._answer = asyncio.run_coroutine_threadsafe(called(), self._worker.loop.asyncio_loop)

    def finish(self, request: Push | Pull, stopped: Stopped) -> Reply:
        """Wait for the answer to the request that was sent last. Raises PushRefused, OSError or EOFError."""
        while not wait([self._answer], TURN).done:
            if stopped():
                self._answer.cancel()
                raise EOFError("stopped while waiting")
        answer = self._answer.result()["answer"]
        if isinstance(answer, Refuse):
            raise PushRefused(f"{request.worker}: {answer.reason}", answer.code)
        if not isinstance(answer, Reply):
            raise ConnectionError(f"{self._address}: {answer or 'the server is not there'}")
        return answer

    def close(self) -> None:
        """Nothing is held open."""


class StreamedServer(Protocol):
    """A server that takes requests from streams. lengths: that a push may have. wire: the dtype of vectors there."""

    lengths: range
    wire: np.dtype[Any]

    def serve(self, request: Push | Pull, tell: Tell) -> None:
        """Carry out a request, on any thread; `tell` is called with its answer, now or later, on any thread."""

    def serve_part(self, part: PushPart, give: Give) -> None:
        """Take a part of a push; `give` is called with parts of the answer, now or later, on any thread."""


_servers: WeakValueDictionary[str, StreamedServer] = WeakValueDictionary()  # of this process, by their secrets


def take_workers(secret: str, server: StreamedServer) -> None:
    """Let workers that know the secret open streams to this server, as long as it is there."""
    _servers[secret] = server
    worker = get_worker()
    worker.handlers[CALLED] = _called
    take_streams(worker, HANDLER, _served)


async def _called(server: str, request: Push | Pull) -> Any:
    """Answer a call in place of a request on a stream."""
    if (found := _servers.get(server)) is None:
        return {"answer": None}
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def settle(told: Answer) -> None:
        if not answer.done():  # the caller is gone
            answer.set_result(told)

    def tell(told: Answer) -> None:
        loop.call_soon_threadsafe(settle, told)

    with suppress(ConnectionError):  # the caller is told of it
        found.serve(request, tell)
    del found
    return {"answer": to_serialize(await answer)}


def _served(message: dict[str, Any]) -> Serve:
    """Return how a new stream is served. Raises Refused for a stranger."""
    server = _servers.get(str(message.get("server")))
    if server is None:
        raise Refused("the parameter server is not here")
    found, worker = ref(server), str(message.get("worker"))

    def gone() -> bool:
        return found() is None

    def serve(stream: Stream) -> None:
        if (server := found()) is None:
            return
        pushed, caller = PushMemory(server.lengths, server.wire), _Caller(stream)
        del server
        while True:
            request = read_request(stream, worker, pushed, gone)
            if (server := found()) is None:
                return
            if isinstance(request, PushPart):
                server.serve_part(request, caller.give)
                del server  # it may be replaced before the next request comes
                continue
            with suppress(ConnectionError):  # the caller is told of it
                server.serve(request, caller.tell)
            del server
            stream.send_rest(caller.rest(gone), gone)
            caller = _Caller(stream)

    return serve


class _Caller:
    """A worker that waits for an answer at the other end of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left: list[memoryview] = []  # of parts that the connection did not take at once
        self._given: tuple[int, int] | None = None  # the push that parts were given for, and where they begin
        self._rest: SimpleQueue[list[memoryview] | OSError] = SimpleQueue()

    def give(self, part: CenterPart, values: Vector) -> None:
        """Send a part of the answer, as far as that goes without waiting."""
        buffers = center_part_buffers(part, values)
        self._given = part.seq, part.lo
        with suppress(OSError):  # so will the answer find
            self._left = self._sent_now(buffers)

    def tell(self, answer: Answer) -> Callable[[], None] | None:
        """Send what goes without waiting, on the thread that has the answer: no other has to wake up before.

        Whoever does not read is then waited for by its own thread, and holds nobody up. Returns what wakes that thread
        up, which may as well be done once others are told.
        """
        if isinstance(answer, Reply):
            of_this = self._given is not None and self._given[0] == answer.seq
            parts = reply_parts(answer, self._given[1] if of_this and self._given is not None else None)
        else:
            parts = refusal_parts(answer)
        rest: list[memoryview] | OSError
        try:
            rest = self._sent_now(parts)
        except OSError as error:
            rest = error
        if rest == []:
            return lambda: self._rest.put([])
        self._rest.put(rest)
        return None

    def _sent_now(self, parts: list[Any]) -> list[memoryview]:
        """Send what goes without waiting, behind what is left of earlier parts. Returns the rest."""
        if self._left:
            return [*self._left, *(memoryview(part).cast("B") for part in parts)]
        return self._stream.send_now(*parts)

    def rest(self, stopped: Stopped) -> list[memoryview]:
        """Wait for the answer. Returns what is still to be sent of it. Raises OSError or EOFError."""
        while True:
            try:
                found = self._rest.get(timeout=TURN)
            except Empty:
                if stopped():
                    raise EOFError("the server is gone") from None
                continue
            if isinstance(found, OSError):
                raise found
            return found
