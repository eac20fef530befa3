"""Streams of bytes between two workers, held open, over the port at which a worker listens for Dask.

One worker calls a handler of another, as Dask's own calls do: address, TLS and contact address are Dask's, and no other
port is needed. Both ends then take the socket off their event loops, and a thread of each uses it, blocking. What goes
over it is fixed heads and vectors: nothing is pickled, no task is made, and no other thread has to wake up.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, Final

from distributed.comm import Comm, CommClosedError, connect

TURN: Final = 0.5
"""Seconds between two looks whether a thread that waits on a socket is to stop."""
OPENED: Final = 20.0
"""Seconds within which a worker takes a stream: one that is busy answers a question within them."""
_LIMIT: Final = struct.pack("@ll", 0, round(1e6 * TURN))  # a struct timeval
_NOT_YET: Final = (TimeoutError, BlockingIOError)
PROTOCOLS: Final = ("tcp://", "tls://")
"""Dask's protocols whose connections are sockets."""


class Refused(ConnectionError):
    """The other worker does not take the stream."""


class Stream:
    """One end. A single thread sends, a single thread receives; they may be the same.

    comm: Dask's connection, whose socket this is. loop: its event loop.
    """

    def __init__(self, comm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = _taken(comm.stream)
        self._secure = isinstance(self._socket, ssl.SSLSocket)  # then a call deals with one record, and has no flags
        self._whole = 0 if self._secure else socket.MSG_WAITALL
        self._closing = weakref.finalize(self, _close, comm, loop)
        self._closing.atexit = False

    def send(self, *parts: Any, stopped: Callable[[], bool]) -> None:
        """Send the bytes of these buffers. Raises OSError where the other end is gone, EOFError once stopped."""
        self.send_rest([memoryview(part).cast("B") for part in parts], stopped)

    def send_now(self, *parts: Any) -> list[memoryview]:
        """Send the bytes that the connection takes without waiting. Returns the rest."""
        rest = [memoryview(part).cast("B") for part in parts]
        if self._secure:  # there is no way to send without waiting
            return rest
        with suppress(BlockingIOError):
            while rest:
                rest = _behind(rest, self._socket.sendmsg(rest, [], socket.MSG_DONTWAIT))
        return rest

    def send_soon(self, *parts: Any, stopped: Callable[[], bool]) -> list[memoryview]:
        """Send the bytes that go without waiting, over TLS all of them. Returns the rest. Raises as `send`."""
        rest = self.send_now(*parts)
        if self._secure:
            self.send_rest(rest, stopped)
            return []
        return rest

    def send_rest(self, rest: list[memoryview], stopped: Callable[[], bool]) -> None:
        """Send these bytes. Raises OSError where the other end is gone, EOFError once stopped."""
        while rest:
            try:
                rest = _behind(rest, self._socket.send(rest[0]) if self._secure else self._socket.sendmsg(rest))
            except _NOT_YET:
                if stopped():
                    raise EOFError("stopped while sending") from None

    def receive(self, buffer: Any, stopped: Callable[[], bool]) -> None:
        """Fill the buffer. Raises OSError where the other end is gone, EOFError where it has ended, or once stopped.

        The system wakes this thread up once it is full, not for each packet.
        """
        view = memoryview(buffer).cast("B")
        while len(view):
            try:
                count = self._socket.recv_into(view, 0, self._whole)
            except _NOT_YET:
                if stopped():
                    raise EOFError("stopped while receiving") from None
                continue
            if not count:
                raise EOFError("the other end is closed")
            view = view[count:]

    def close(self) -> None:
        """Close it. The other end sees that."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._closing()


def _behind(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return the bytes of the parts that come after the first `sent`."""
    while parts and sent >= len(parts[0]):
        sent -= len(parts[0])
        parts = parts[1:]
    return [parts[0][sent:], *parts[1:]] if sent else parts


def _taken(stream: Any) -> socket.socket:
    """Take the socket of Tornado's stream off the event loop that this runs on.

    Tornado has no public way. Raises CommClosedError where bytes were read ahead, or are still to be written.
    """
    if stream.closed() or stream._read_buffer_size or stream._write_buffer:
        raise CommClosedError("the connection is not idle")
    if stream._state is not None:
        stream.io_loop.remove_handler(stream.fileno())
        stream._state = None
    end: socket.socket = stream.socket
    if isinstance(end, ssl.SSLSocket):
        end.settimeout(TURN)
    else:  # the system's own limit: Python's would look before each call, and call for each packet
        end.settimeout(None)
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, limit, _LIMIT)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Dask's 30 s would end a connection whose receiver reads nothing for as long, such as one that takes another's
        # vector over a slow link first. Who is gone is found by keepalive, which stays, and by the driver.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return end


def _close(comm: Any, loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # the loop is closed, and the process ends
        loop.call_soon_threadsafe(comm.abort)


def open_stream(
    worker: Any, address: str, handler: str, message: Mapping[str, Any], stopped: Callable[[], bool]
) -> Stream:
    """Open a stream from this worker to the one at the address. Call it on a thread other than the event loop's.

    Raises OSError, among them Refused with the reason, where there is no worker, or it does not take the stream;
    EOFError once stopped.
    """

    async def opened() -> Stream:
        comm: Comm = await connect(address, **worker.connection_args)
        try:
            await comm.write({"op": handler, "reply": False, **message})
            answer = await comm.read()
            if answer.get("status") != "OK":
                raise Refused(f"{address}: {answer.get('reason', answer)}")
            return Stream(comm, asyncio.get_running_loop())
        except BaseException:
            comm.abort()
            raise

    pending = asyncio.run_coroutine_threadsafe(opened(), worker.loop.asyncio_loop)
    deadline = time.monotonic() + OPENED  # Dask tries for longer to reach a worker that is gone
    while not wait([pending], TURN).done:
        if stopped() or time.monotonic() > deadline:
            pending.cancel()
            raise EOFError("stopped while opening") if stopped() else ConnectionError(f"{address}: no answer")
    return pending.result()


Serve = Callable[[Stream], None]


def take_streams(worker: Any, handler: str, take: Callable[[dict[str, Any]], Serve]) -> None:
    """Let others open streams to this worker, by a handler of this name.

    take: is given the message that a stream begins with. Returns what is to be done with the stream, on a thread of its
    own, until it ends; raises Refused. It is called on the event loop.
    """

    async def handle(comm: Any, **message: Any) -> None:
        try:
            serve = take(message)
        except Refused as error:
            await comm.write({"status": "refused", "reason": str(error)})
            return
        await comm.write({"status": "OK"})  # the other end sends nothing before
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stream = Stream(comm, loop)

        def served() -> None:
            try:
                with suppress(OSError, EOFError):
                    serve(stream)
            finally:
                stream.close()
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=served, name=handler, daemon=True).start()
        try:
            await ended.wait()  # Dask reads the connection again when its handler returns
        finally:
            comm.abort()

    worker.handlers[handler] = handle
