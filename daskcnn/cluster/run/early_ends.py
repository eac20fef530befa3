"""The driver's side of rounds that end early: it asks for reports while workers end, or their server moves."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from daskcnn.cluster.link.calls import begin
from daskcnn.cluster.link.leaving import LONGEST
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.worker.session import end_round
from daskcnn.training.coordinator.orders import EndRound
from daskcnn.training.round_report import RoundReport

Ended = tuple[EndRound, RoundReport | Literal["not begun"] | None]
"""An order, and what it led to: a report, the round has not begun, or nothing is known."""


class EarlyEnds:
    """Calls workers whose rounds are to end early."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._ended: SimpleQueue[Ended] = SimpleQueue()

    def ask(self, order: EndRound) -> None:
        """Let a round end early. Raises Lost where the scheduler is gone."""
        workers, client = self._context.workers, self._context.dispatch.client
        if (member := workers.alive.get(order.replica)) is None:
            return
        workers.awaited.add(order.replica)
        key = order.life, order.session, order.number
        options: dict[str, Any] = {"workers": [member.address], "on_error": "return", "asynchronous": True}
        with workers.connection.reached():
            call = begin(client, client.run(end_round, self._context.name, key, LONGEST, **options))
        call.add_done_callback(partial(self._has_ended, order, member.address))

    def _has_ended(self, order: EndRound, address: str, call: Future[Any]) -> None:
        """Keep what the worker has answered. Runs on the client's thread."""
        failed = call.cancelled() or call.exception() is not None
        found = None if failed else call.result().get(address)
        self._ended.put((order, None if isinstance(found, Exception) else found))
        self._context.results.wake()

    def taken(self) -> list[Ended]:
        """Return the answers that have come since."""
        found = [self._ended.get_nowait() for _ in range(self._ended.qsize())]
        self._context.workers.awaited.difference_update(order.replica for order, _ in found)
        return found
