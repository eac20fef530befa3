"""Messages of a worker to the driver during a task: the step of its calibration, and its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from distributed import Client, get_worker

from daskcnn.events import Calibrating

EVERY = 2.0  # seconds between two messages, which the scheduler passes on; shorter work sends none


def _topic(run: str) -> str:
    return f"daskcnn-{run}"


class Teller:
    """A worker's side."""

    def __init__(self, run: str) -> None:
        self._topic, self._told = _topic(run), time.monotonic()

    def tell(self, doing: str, done: int = 0, of: int = 0) -> None:
        """Send what is being done now, and how many of its parts are done; 0 of 0 where it has no parts."""
        if (now := time.monotonic()) - self._told < EVERY:
            return
        self._told = now
        with suppress(ValueError):  # no task of a cluster
            get_worker().log_event(self._topic, {"doing": doing, "done": done, "of": of})


class News:
    """The driver's side: messages of the run's workers until they are taken."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Mapping[str, Any]] = SimpleQueue()

    def subscribe(self, client: Client, run: str) -> None:
        """Begin to receive messages of the run's workers."""
        client.subscribe_topic(_topic(run), self.heard)

    def unsubscribe(self, client: Client, run: str) -> None:
        """Receive no more messages."""
        client.unsubscribe_topic(_topic(run))

    def heard(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Keep a message. Runs on the thread of the client's event loop."""
        self._queue.put(event[1])

    def taken(self, names: Mapping[str, str]) -> list[Calibrating]:
        """Return the messages so far as events. names: of workers by address; messages of others are dropped."""
        found: list[Calibrating] = []
        while True:
            try:
                said = dict(self._queue.get_nowait())
            except Empty:
                return found
            if (name := names.get(str(said.pop("worker", "")))) is not None:  # the address, which the scheduler adds
                found.append(Calibrating(worker=name, **said))
