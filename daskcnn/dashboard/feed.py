"""The driver's side of the page in Dask's dashboard: a display that also sends a run's events there.

A thread of its own sends events in batches, at most twice a second. Workers send nothing, and the run neither waits for
the page nor fails with it.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from distributed import Client

from daskcnn.cluster.link.calls import answer_to, ask_scheduler
from daskcnn.dashboard.live_run import MOST_LAYERS, Message
from daskcnn.dashboard.site import HANDLER, NAME, add_page
from daskcnn.errors import told
from daskcnn.events import Event, RunStarted
from daskcnn.nn.network import LayerSummary
from daskcnn.show.renderers.network_text import times
from daskcnn.show.renderers.terminal import Progress
from daskcnn.show.text import clean

EVERY = 0.5  # seconds between two messages
ANSWER, LAST_ANSWER = 10.0, 2.0
"""Seconds within which the scheduler takes a message, and the last one, for which the run's end waits."""
MOST_WAITING = 5_000  # events that wait for a scheduler without an answer; older ones are dropped


def fed(
    display: Progress, client: Client, layers: Iterable[LayerSummary], say: Callable[[str], None], *, wanted: bool
) -> Progress:
    """Return the display or, if wanted, one that feeds the page too. say: is told its address, or why there is none."""
    if not wanted:
        return display
    try:
        reason = ask_scheduler(client, add_page, within=ANSWER)
    except Exception as error:  # a scheduler without daskcnn, or one that runs no functions
        reason = f"{type(error).__name__}: {error}"
    if reason:
        say(told("dashboard", f"no page of this run ({clean(reason)})", "training goes on"))
        return display
    say(f"page of this run: {client.dashboard_link.removesuffix('/status')}/{NAME}")
    return LiveFeed(display, client, layers)


class LiveFeed:
    """A display that also sends every event; a context manager around the run."""

    def __init__(self, display: Progress, client: Client, layers: Iterable[LayerSummary]) -> None:
        self._display, self._client = display, client
        self._layers = [(row.name, row.layer, times(row.out_shape), row.parameters) for row in layers][:MOST_LAYERS]
        self._key, self._feed = "", uuid.uuid4().hex
        self._waiting: list[dict[str, Any]] = []
        self._first = 0  # number of the first record that waits
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._send_now_and_then, name="daskcnn-dashboard", daemon=True)

    def __enter__(self) -> Self:
        self._display.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(timeout=ANSWER)
        self._display.__exit__(*exc)

    def handle(self, event: Event) -> None:
        """Show the event, and keep it for the next message."""
        self._display.handle(event)
        if isinstance(event, RunStarted):
            self._key = f"{socket.gethostname()}:{Path(event.run).absolute()}"
        record = event.logged(time.time()).record()
        with self._lock:
            self._waiting.append(record)
            if (over := len(self._waiting) - MOST_WAITING) > 0:
                del self._waiting[:over]
                self._first += over

    def _send_now_and_then(self) -> None:
        while not self._ended.wait(EVERY):
            self._send(ANSWER)
        self._send(LAST_ANSWER)

    def _send(self, within: float) -> None:
        """Send what waits; again without an answer, as the scheduler knows by their numbers which records it has."""
        with self._lock:
            first, records = self._first, list(self._waiting)
        if not records:
            return
        with suppress(Exception):  # the run may have lost its scheduler; it finds that out by itself
            self.deliver(Message(self._key, self._feed, first, records, self._layers if first == 0 else ()), within)
            with self._lock:
                done = max(0, first + len(records) - self._first)
                del self._waiting[:done]
                self._first += done

    def deliver(self, message: Message, within: float) -> None:
        """Have the scheduler take a message. Raises the error that prevents it."""
        call = getattr(self._client.scheduler, HANDLER)
        answer_to(self._client, call(**asdict(message)), within=within)
