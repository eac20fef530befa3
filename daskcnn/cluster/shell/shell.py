"""Turns what happens in a cluster into facts, and a coordinator's orders into tasks. Decides nothing."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from distributed import Future
from distributed.client import ClosedClientError

from daskcnn.cluster.link.calls import NotYet, ServerLost, WorkersLost
from daskcnn.cluster.run.admission import lost_while_calibrated
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import PendingWork
from daskcnn.cluster.run.workers import LOOK
from daskcnn.errors import Interrupted, Lost
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import Order


class Decider(Protocol):
    """A coordinator."""

    def handle(self, fact: Any) -> list[Any]:
        """Take a fact in; returns the orders that follow."""
        ...


BROKEN = (WorkersLost, Interrupted, Lost)
"""What any call to the cluster may raise in place of its result."""


def facts_of(context: RunContext, broken: WorkersLost | Interrupted | Lost, at: float) -> list[Fact]:
    """The exception as facts. A signal is told once: what is under way then is the coordinator's to end."""
    if isinstance(broken, WorkersLost):
        return _of_lost(context, broken.names, at)
    if isinstance(broken, Interrupted):
        context.connection.ignore_signals()
        return [facts.Interrupted(broken.signum, at)]
    return [facts.SchedulerGone(broken, at)]


def _of_lost(context: RunContext, names: Iterable[str], at: float) -> list[Fact]:
    calibrating = [name for name in names if name in context.workers.alive and name not in context.calibrations]
    gone = tuple(name for name in names if name not in calibrating)
    found: list[Fact] = [lost_while_calibrated(context, name, at) for name in calibrating]
    return [*found, *([facts.WorkerGone(gone, "connection lost", at)] if gone else [])]


def look_round(context: RunContext, at: float) -> list[Fact]:
    """Look at workers and scheduler; returns what has become of them since the last look."""
    try:
        context.workers.look_round()
    except BROKEN as broken:
        return facts_of(context, broken, at)
    return []


Heard = Callable[[Fact, list[Order]], None]
"""Is told every fact and the orders that it led to."""


class Shell:
    """Drives one coordinator. `carry_out` has a function for every kind of order.

    Attributes
    ----------
    end : the last order, once it was given.
    life : the server's, for facts about it.
    """

    def __init__(self, context: RunContext, coordinator: Decider, heard: Heard | None = None) -> None:
        self.context, self._coordinator, self._heard = context, coordinator, heard
        self.end: orders.End | None = None
        self.life = 0
        self._facts: deque[Fact] = deque()
        self._ended: queue.SimpleQueue[tuple[str, Future]] = queue.SimpleQueue()
        self._work: dict[str, PendingWork] = {}
        self._carry_out: Mapping[type, Callable[[Any], None]] = {}

    def watch(self, name: str, future: Future) -> None:
        """A task of this worker or replica has ended, one way or another. May be called on any thread."""
        self._ended.put((name, future))

    def run(self) -> orders.End:
        """To the end. Raises what tasks raise by a mistake of ours."""
        while self.end is None:
            self._look()
            self._take_result()
            while self._facts and self.end is None:
                fact = self._facts.popleft()
                found = self._coordinator.handle(fact)
                if self._heard is not None:
                    self._heard(fact, found)
                with self._losses_told():
                    self.carry_out(found)
        return self.end

    def tell(self, fact: Fact) -> None:
        """A fact that the coordinator is told in its turn."""
        self._facts.append(fact)

    def carry_out(self, found: list[Order]) -> None:
        """Do what was ordered, in turn."""
        for order in found:
            with self._losses_told():
                self._carry_out[type(order)](order)

    @contextmanager
    def _losses_told(self) -> Iterator[None]:
        """Turn losses that are found meanwhile into facts."""
        try:
            yield
        except ServerLost:
            self.tell(facts.ServerGone(self.life, self.now))
        except BROKEN as broken:
            self._facts += facts_of(self.context, broken, self.now)

    @property
    def now(self) -> float:
        """Seconds on this process's clock."""
        return time.monotonic()

    def _look(self) -> None:
        with self._losses_told():
            if self.context.workers.look_round():
                self.tell(facts.Tick(self.now))

    # --- results ---

    def _take_result(self) -> None:
        if self._facts:
            return
        try:
            name, future = self._ended.get(timeout=LOOK)
        except queue.Empty:
            return
        work = self._work.get(name)
        if work is None or not work.expects(future):
            return  # of something that was given up
        with self._losses_told():
            try:
                result = self.fetch(name, future)
            except NotYet:
                self._ended.put((name, future))
            except (WorkersLost, ServerLost, Interrupted, Lost):
                self._ended.put((name, future))  # it is put off, unless it is of what was lost
                raise
            else:
                self.take(name, work, future, result)

    def fetch(self, name: str, future: Future) -> Any:
        """The result of a task. Raises NotYet, WorkersLost, ServerLost."""
        return self.context.results.fetch(future)

    def take(self, name: str, work: PendingWork, future: Future, result: Any) -> None:
        """Go on with a result."""
        self._facts += work.take(future, result, self.now)

    def give_up(self, name: str) -> None:
        """Stop waiting for what this worker or replica has under way."""
        if (work := self._work.pop(name, None)) is not None:
            with suppress(ClosedClientError):  # the scheduler is gone, and all that was under way
                work.cancel()
