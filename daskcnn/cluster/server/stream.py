"""Pushes, pulls and replies between a worker and a whole server, over a stream that is held open for the server's life.

On the stream are heads of fixed length, each followed by a vector as it lies in memory. The worker's name is said once,
when the stream is opened. A head says how long the vector is. The receiver knows how long it has to be and refuses any
other, so no number that a stranger sends makes it reserve memory.
"""

from __future__ import annotations

import asyncio
import math
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary, ref

import numpy as np
from distributed import get_worker
from distributed.protocol import to_serialize

from daskcnn.cluster.link.streams import TURN, Refused, Serve, Stream, open_stream, take_streams
from daskcnn.errors import PushRefused
from daskcnn.ps import Code, Pull, Push, Refuse, Reply, Vector

Stopped: TypeAlias = Callable[[], bool]
Answer: TypeAlias = Reply | Refuse | ConnectionError
"""The answer to a request as it goes over the wire, or why none will come."""
Tell: TypeAlias = Callable[[Answer], Callable[[], None] | None]
"""Tells a caller its answer. Returns what is left to do for it once all others are told, if anything."""
HANDLER: Final = "daskcnn_server"
CALLED: Final = "daskcnn_called_server"
_PUSH, _PULL, _REPLY, _REFUSAL, _LOST, _PULL_AVERAGE = range(6)
_PUSHED: Final = ("life", "session", "seq", "base_version", "n_samples", "step", "accuracy")
_REQUEST: Final = struct.Struct("<qqqqqqqdddq")  # the kind, these fields, the pace or NaN, and the vector's numbers
_NO_PACE: Final = (math.nan, math.nan)
_REPLIED: Final = (
    "life", "session", "seq", "version", "base_version", "staleness", "n_samples", "more", "since", "gamma",
    "accuracy", "waited",
)  # fmt: skip
_ANSWER: Final = struct.Struct("<qqqqqqqqqqdddq")  # the kind, these fields, the vector's numbers or a reason's bytes
_REASON = 1 << 16  # bytes


def send_request(stream: Stream, request: Push | Pull, stopped: Stopped) -> None:
    """Send a push, whose payload is as it goes over the wire, or a pull. Raises OSError or EOFError."""
    if isinstance(request, Pull):
        kind = _PULL_AVERAGE if request.averaged else _PULL
        head = _REQUEST.pack(kind, request.life, request.session, 0, 0, 0, 0, 0.0, *_NO_PACE, 0)
        stream.send(head, stopped=stopped)
    else:
        fields = [getattr(request, name) for name in _PUSHED]
        payload = np.ascontiguousarray(request.payload)
        stream.send(_REQUEST.pack(_PUSH, *fields, *(request.pace or _NO_PACE), len(payload)), payload, stopped=stopped)


class PushMemory:
    """Memory for the vectors of one stream's pushes: each is answered before the next one is read."""

    def __init__(self, lengths: range, wire: np.dtype[Any]) -> None:
        self._lengths, self._vector = lengths, np.empty(0, wire)

    def of(self, numbers: int) -> Vector:
        """Return a vector of this length to be filled. Raises ConnectionError where none may be as long."""
        if numbers not in self._lengths:
            raise ConnectionError(f"a push of {numbers} numbers: {self._lengths[0]} to {self._lengths[-1]} are pushed")
        if len(self._vector) != numbers:
            self._vector = np.empty(numbers, self._vector.dtype)
        return self._vector


def read_request(stream: Stream, worker: str, pushed: PushMemory, stopped: Stopped) -> Push | Pull:
    """Read a request of this worker. A push's payload is memory of `pushed`.

    Raises EOFError where the other end is closed, or OSError where it is gone or sends a vector of another length.
    """
    head = bytearray(_REQUEST.size)
    stream.receive(head, stopped)
    kind, *fields, lr, progress, numbers = _REQUEST.unpack(head)
    if kind in (_PULL, _PULL_AVERAGE):
        return Pull(fields[0], worker, fields[1], averaged=kind == _PULL_AVERAGE)
    if kind != _PUSH:
        raise ConnectionError(f"a request of kind {kind}: there is none")
    payload = pushed.of(numbers)
    stream.receive(payload, stopped)
    pace = None if math.isnan(lr) else (lr, progress)
    return Push(worker=worker, payload=payload, pace=pace, **dict(zip(_PUSHED, fields, strict=True)))


def reply_parts(reply: Reply) -> list[Any]:
    """Return the buffers of a reply, whose weights are as they go over the wire."""
    head = _ANSWER.pack(_REPLY, *[getattr(reply, name) for name in _REPLIED], len(reply.weights))
    return [head, np.ascontiguousarray(reply.weights)]


def refusal_parts(refused: Refuse | Exception) -> list[Any]:
    """Return the buffers of a refusal, or of the news that no answer will come."""
    known = isinstance(refused, Refuse)
    reason = (f"{refused.code}\n{refused.reason}" if isinstance(refused, Refuse) else str(refused)).encode()[:_REASON]
    return [_ANSWER.pack(_REFUSAL if known else _LOST, *(0,) * len(_REPLIED), len(reason)), reason]


def read_answer(stream: Stream, request: Push | Pull, length: int, wire: np.dtype[Any], stopped: Stopped) -> Reply:
    """Read the answer to a request, with a vector of this length, or none.

    Raises PushRefused, EOFError where the server has ended, or OSError where it is gone.
    """
    head = bytearray(_ANSWER.size)
    stream.receive(head, stopped)
    kind, *fields, size = _ANSWER.unpack(head)
    if kind in (_REFUSAL, _LOST) and 0 <= size <= _REASON:
        words = bytearray(size)
        stream.receive(words, stopped)
        code, _, reason = words.decode(errors="replace").partition("\n")
        if kind == _LOST:
            raise ConnectionError(code)
        raise PushRefused(f"{request.worker}: {reason}", Code(code))
    if kind != _REPLY or size not in (0, length):
        raise ConnectionError(f"an answer of kind {kind} with {size} numbers: the center has {length}")
    weights = np.empty(size, wire)
    stream.receive(weights, stopped)
    return Reply(worker=request.worker, weights=weights, **dict(zip(_REPLIED, fields, strict=True)))


class WorkerEnd:
    """A worker's end, opened when it is first used, and again where it breaks.

    worker: Dask's, on which this is. name: the worker's in its run. secret: the server's. length: of the center.
    """

    def __init__(self, worker: Any, name: str, address: str, secret: str, length: int, wire: str) -> None:
        self._worker, self._address, self._length, self._wire = worker, address, length, np.dtype(wire)
        self._opening = {"server": secret, "worker": name}
        self._stream: Stream | None = None
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

    def begin(self, request: Push | Pull, stopped: Stopped) -> None:
        """Send a request. Raises OSError or EOFError."""
        with self._closed_if_broken():
            if self._stream is None:
                self._stream = open_stream(self._worker, self._address, HANDLER, self._opening, stopped)
            send_request(self._stream, request, stopped)

    def finish(self, request: Push | Pull, stopped: Stopped) -> Reply:
        """Wait for the answer to the request that was sent last. Raises PushRefused, OSError or EOFError."""
        with self._closed_if_broken():
            if self._stream is None:
                raise ConnectionError(f"{self._address}: the stream is broken")
            return read_answer(self._stream, request, self._length, self._wire, stopped)

    def close(self) -> None:
        """Close the stream. It is opened again where it is used again."""
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
        pushed = PushMemory(server.lengths, server.wire)
        del server
        while True:
            request = read_request(stream, worker, pushed, gone)
            if (server := found()) is None:
                return
            caller = _Caller(stream)
            with suppress(ConnectionError):  # the caller is told of it
                server.serve(request, caller.tell)
            del server
            stream.send_rest(caller.rest(gone), gone)

    return serve


class _Caller:
    """A worker that waits for an answer at the other end of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest: SimpleQueue[list[memoryview] | OSError] = SimpleQueue()

    def tell(self, answer: Answer) -> Callable[[], None] | None:
        """Send what goes without waiting, on the thread that has the answer: no other has to wake up before.

        Whoever does not read is then waited for by its own thread, and holds nobody up. Returns what wakes that thread
        up, which may as well be done once others are told.
        """
        parts = reply_parts(answer) if isinstance(answer, Reply) else refusal_parts(answer)
        rest: list[memoryview] | OSError
        try:
            rest = self._stream.send_now(*parts)
        except OSError as error:
            rest = error
        if rest == []:
            return lambda: self._rest.put([])
        self._rest.put(rest)
        return None

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
