"""Messages of a worker to the driver during a task: the step of its calibration, and its progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client, get_worker

from daskcnn.cluster.link.leaving import NOT_RETIRED, RETIRING, topic
from daskcnn.events import Calibrating

EVERY = 2.0  # seconds between two messages, which the scheduler passes on; shorter work sends none


class Teller:
    """A worker's side."""

    def __init__(self, run: str) -> None:
        self._topic, self._told = topic(run), time.monotonic()

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
        self._leaving: SimpleQueue[str] = SimpleQueue()
        self._retiring: SimpleQueue[str] = SimpleQueue()
        self._not_retired: SimpleQueue[str] = SimpleQueue()
        self._run = ""
        self._wake: Callable[[], None] = lambda: None

    def subscribe(self, client: Client, run: str, wake: Callable[[], None] = lambda: None) -> None:
        """Begin to receive messages of the run's workers. wake: is called with those that should not wait."""
        self._run, self._wake = run, wake
        client.subscribe_topic(topic(run), self.heard)
        with _one_at_a_time:
            listeners = _LISTENERS.setdefault(client, set())
            listeners.add(self)
            for shared, hear in _SHARED.items():
                client.subscribe_topic(shared, partial(_tell_all, listeners, hear))

    def subscribe_again(self, client: Client) -> None:
        """Go on after the scheduler has dropped the client, which is connected again."""
        self.subscribe(client, self._run, self._wake)

    def _heard_of_retiring(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Keep the workers that the scheduler is to retire. Runs as `heard`."""
        for worker in event[1]["workers"]:
            self._retiring.put(str(worker))
        self._wake()

    def retiring(self) -> list[str]:
        """Return the addresses of workers, of any run, that the scheduler has been asked since to retire."""
        return [self._retiring.get_nowait() for _ in range(self._retiring.qsize())]

    def _heard_of_actors(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Keep the workers that the scheduler could not retire, since they hold actors. Runs as `heard`."""
        for worker in event[1]["workers"]:
            self._not_retired.put(str(worker))
        self._wake()

    def not_retired(self) -> list[str]:
        """Return the addresses of workers that the scheduler has tried to retire since."""
        return [self._not_retired.get_nowait() for _ in range(self._not_retired.qsize())]

    def unsubscribe(self, client: Client, run: str) -> None:
        """Receive no more messages."""
        _unsubscribe(client, topic(run))
        with _one_at_a_time:
            listeners = _LISTENERS.setdefault(client, set())
            listeners.discard(self)
            if not listeners:
                for shared in _SHARED:
                    _unsubscribe(client, shared)

    def heard(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Keep a message. Runs on the thread of the client's event loop."""
        if (worker := event[1].get("leaves")) is None:
            self._queue.put(event[1])
        else:
            self._leaving.put(str(worker))
            self._wake()

    def leaving(self) -> list[str]:
        """Return the addresses of workers that have told since that they are to end."""
        return [self._leaving.get_nowait() for _ in range(self._leaving.qsize())]

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


_SHARED = {RETIRING: News._heard_of_retiring, NOT_RETIRED: News._heard_of_actors}
"""Topics of all runs: Dask has one handler for each topic of a client."""
_LISTENERS: WeakKeyDictionary[Client, set[News]] = WeakKeyDictionary()
_one_at_a_time = threading.Lock()


def _tell_all(listeners: set[News], hear: Callable[[News, Any], None], event: Any) -> None:
    for each in list(listeners):
        hear(each, event)


def _unsubscribe(client: Client, name: str) -> None:
    """Receive no more of this topic. Dask would keep the handler, and with it the run's weights."""
    client.unsubscribe_topic(name)
    client._event_handlers.pop(name, None)
