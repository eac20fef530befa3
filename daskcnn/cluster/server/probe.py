"""The price of a meeting, before there is any: each worker's way to the server's host, and the host's time to merge.

Vectors go there and back over streams, as those of training do.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any, Final

import numpy as np
from distributed import get_worker

from daskcnn.cluster.link.streams import Refused, Serve, Stream, open_stream, take_streams
from daskcnn.ps.vectors import weighted_sum

HANDLER: Final = "daskcnn_probe"
TOGETHER: Final = 256 << 10
"""Bytes that all workers send at once."""
_SMALLEST, _LARGEST = 64 << 10, 4 << 20
_LONG = 0.05  # seconds of a way that is long enough to be measured
_TIMES = 5
_LIMIT = 20.0  # seconds that a probe may take
_HEAD = struct.Struct("<q")
_secrets: set[str] = set()  # of the runs that may send probes to this process


def expect_probes(secret: str, nbytes: int) -> float:
    """Let workers that know the secret send probes to this worker. Returns its seconds to merge a vector of a worker.

    nbytes: of the vector.
    """
    _secrets.add(secret)
    take_streams(get_worker(), HANDLER, _taken)
    part = max(4, min(nbytes, _LARGEST))
    vectors = [np.zeros(part // 4, np.float32) for _ in range(2)]
    return min(_seconds(lambda: weighted_sum(vectors, [0.5, 0.5])) for _ in range(_TIMES)) / 2 * nbytes / part


def _taken(message: dict[str, Any]) -> Serve:
    if str(message.get("secret")) not in _secrets:
        raise Refused("no probe is expected here")
    return _send_back


def _send_back(stream: Stream) -> None:
    head = bytearray(_HEAD.size)
    while True:
        stream.receive(head, _never)
        (nbytes,) = _HEAD.unpack(head)
        if not 0 <= nbytes <= _LARGEST:
            raise ConnectionError(f"a probe of {nbytes} bytes: there is none")
        vector = bytearray(nbytes)
        stream.receive(vector, _never)
        stream.send(head, vector, stopped=_never)


def _never() -> bool:
    return False


def probe_way(address: str, secret: str, nbytes: int) -> tuple[float, float] | None:
    """Return bandwidth and latency of this worker's way to the one at the address; None where there is no stream.

    nbytes: of the vector that is to travel. Smaller ones are sent where they take long enough.
    """
    most = min(nbytes, _LARGEST)

    def measured(way: Callable[[int], float]) -> tuple[float, float]:
        latency = min(way(0) for _ in range(_TIMES))  # other programs only lengthen it
        size = min(_SMALLEST, most)
        first = way(size)
        while first < _LONG and size < most:
            size = min(4 * size, most)
            first = way(size)
        whole = min([first, *(way(size) for _ in range(_TIMES - 1))])
        return size / max(whole - latency, whole / 10), latency

    return _over_stream(address, secret, measured)


def probe_together(address: str, secret: str, nbytes: int) -> float | None:
    """Return the seconds of this worker's way there while others send as well; None where there is no stream."""
    return _over_stream(address, secret, lambda way: median(way(nbytes) for _ in range(_TIMES)))


def _over_stream(address: str, secret: str, measured: Callable[[Callable[[int], float]], Any]) -> Any:
    """Measure with a function that sends as many bytes there and back and returns the seconds of one way."""
    end = time.monotonic() + _LIMIT

    def late() -> bool:
        return time.monotonic() > end

    def way(nbytes: int) -> float:
        head, vector = _HEAD.pack(nbytes), bytearray(nbytes)
        answer = bytearray(_HEAD.size + nbytes)

        def there_and_back() -> None:
            stream.send(head, vector, stopped=late)
            stream.receive(answer, late)

        return _seconds(there_and_back) / 2

    try:
        stream = open_stream(get_worker(), address, HANDLER, {"secret": secret}, late)
        with closing(stream):
            way(0)
            return measured(way)
    except (OSError, EOFError):
        return None


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
