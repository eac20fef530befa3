"""Calls to the cluster that end: each has a limit, names the workers that do not answer, and heeds signals meanwhile.

Dask waits without a limit for a worker that hangs: the connection stays open, and the scheduler gives such a worker up
after minutes, if at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import Future as Pending
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from distributed import Client, Future
from distributed.client import ClosedClientError

from daskcnn.errors import PushRefused, UserError


class WorkersLost(Exception):
    """Workers of the run, by their names, are gone."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(", ".join(self.names))


class ServerLost(Exception):
    """The worker that held the parameter server is gone."""


class CutOff(Exception):
    """The scheduler had dropped this client, and with it all tasks; the client is connected again."""


class WorkerFailed(Exception):
    """A worker of the run cannot go on with its work, though it is there. reason: as people are told."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # as it is pickled
        self.name, self.reason = name, reason


OUT_OF_MEMORY = "out of memory while it trained; if that happens again, lower train.batch_size"


class NotYet(Exception):
    """A result has not come so far."""


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Refusal:
    """A task's error that a user can mend, as its result. For an exception Dask prints a traceback on the worker."""

    error: UserError | PushRefused


def returns_refusals(task: Callable[P, R]) -> Callable[P, R | Refusal]:
    """Let a task return refusals as values. Its result must go to the driver: `Results` raises them there."""

    @wraps(task)
    def made(*args: P.args, **kwargs: P.kwargs) -> R | Refusal:
        try:
            return task(*args, **kwargs)
        except (UserError, PushRefused) as error:
            return Refusal(error)

    return made


Check = Callable[[], None]
ANSWER = 20.0  # seconds within which a worker answers a question that costs it next to nothing
SCHEDULER = 20.0  # seconds within which the scheduler answers
TURN = 0.1  # seconds between two checks for a signal
STOPPED = 1.0  # seconds of a turn from which on this process was stopped, or its machine asleep
LAST = 1.0  # seconds for calls through a scheduler that is given up
_GIVEN_UP: WeakSet[Client] = WeakSet()


def give_up(client: Client) -> None:
    """Wait no longer than a moment for anything through this client's scheduler, which does not answer any more."""
    _GIVEN_UP.add(client)


def cancel(tasks: Iterable[Future]) -> None:
    """Cancel these tasks. Where the client is closed the scheduler is gone, and all that was under way."""
    with suppress(ClosedClientError):
        for task in tasks:
            task.cancel()


class Unanswered(TimeoutError):
    """A call to the cluster was not answered within its limit."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The workers' answers, by address: values that the function returned, and errors that it raised there, or that
    the scheduler met on the way. The silent ones gave no answer within the limit.
    """

    given: Mapping[str, Any]
    failed: Mapping[str, Exception]
    silent: tuple[str, ...]


def no_check() -> None:
    """Raise nothing: the check of a caller that nothing interrupts."""


def ask_workers(
    client: Client,
    function: Callable[..., Any],
    workers: Iterable[str],
    *arguments: Any,
    within: float = ANSWER,
    check: Check = no_check,
    one: bool = False,
) -> Answers:
    """Run a function on these workers, all at the same time, and wait `within` seconds for each.

    With `one` the answer of any of them ends the wait for all. `check` is called now and then while it waits, and may
    raise. A function with the parameter `dask_worker` is given the worker. Raises OSError where the scheduler is gone.
    """
    options = {"on_error": "return", "asynchronous": True}
    begun = {a: begin(client, client.run(function, *arguments, workers=[a], **options)) for a in workers}

    def answered() -> bool:
        return one and any(p.done() and not isinstance(_result(p, a), Exception) for a, p in begun.items())

    waiting = _wait(begun.values(), _limit(client, within), check, answered)
    ended = {a: _result(pending, a) for a, pending in begun.items() if pending not in waiting}
    return Answers(
        {a: found for a, found in ended.items() if not isinstance(found, Exception)},
        {a: found for a, found in ended.items() if isinstance(found, Exception)},
        tuple(a for a, pending in begun.items() if pending in waiting),
    )


def silent_among(
    client: Client, workers: Iterable[str], *, within: float = ANSWER, check: Check = no_check
) -> set[str]:
    """Return those of the workers that do not answer."""
    return set(ask_workers(client, time.time, workers, within=within, check=check).silent)


def ask_scheduler(
    client: Client, function: Callable[..., Any], *, within: float = SCHEDULER, check: Check = no_check
) -> Any:
    """Run a function in the scheduler's process. Raises Unanswered, and OSError where the scheduler is gone."""
    return answer_to(client, client.run_on_scheduler(function, asynchronous=True), within=within, check=check)


def scheduler_of(client: Client) -> str:
    """Return what the scheduler is called in a message. Dask forgets its address where it closes the client."""
    return "the scheduler" if client.scheduler is None else f"scheduler {client.scheduler.address}"


def answer_to(client: Client, call: Awaitable[Any], *, within: float = SCHEDULER, check: Check = no_check) -> Any:
    """Wait for the result of a call through the scheduler, which is a coroutine.

    Raises Unanswered, what the call raises, and what `check` raises.
    """
    pending = begin(client, call)
    within = _limit(client, within)
    if _wait([pending], within, check):
        silence = f"no answer within {within:g} s; is its process stopped, or its machine overloaded?"
        raise Unanswered(f"{scheduler_of(client)}: {silence}")
    return pending.result()


def answer_of_actor(answer: Any, *, within: float, check: Check = no_check) -> Any:
    """Wait for the result of a call to an actor. Raises Unanswered, what the call raises, and what `check` raises."""
    deadline = time.monotonic() + within
    while True:
        check()
        left = deadline - time.monotonic()
        try:
            return answer.result(timeout=min(TURN, max(left, 0.001)))
        except TimeoutError as error:
            if left <= 0:
                raise Unanswered(f"no answer within {within:g} s") from error


def begin(client: Client, call: Awaitable[Any]) -> Pending[Any]:
    """Begin a call on the client's event loop. Raises ConnectionError where it is closed."""

    async def awaited() -> Any:
        return await call

    # a coroutine is begun by itself: inside another that is cancelled before it begins, it would never be awaited
    coroutine: Coroutine[Any, Any, Any] = call if isinstance(call, Coroutine) else awaited()
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, client.loop.asyncio_loop)
    except RuntimeError as error:  # the client is closed, and its loop with it
        coroutine.close()
        raise ConnectionError("the connection to the scheduler is closed") from error


def tell(client: Client, address: str, function: Callable[..., Any], *args: Any) -> None:
    """Have the worker at this address call this beside its tasks, and wait for no answer. Raises as `begin`."""
    options: dict[str, Any] = {"workers": [address], "on_error": "return", "asynchronous": True}
    begin(client, client.run(function, *args, **options))


def _limit(client: Client, within: float) -> float:
    return min(within, LAST) if client in _GIVEN_UP else within


def _wait(
    calls: Collection[Pending[Any]], within: float, check: Check, enough: Callable[[], bool] = lambda: False
) -> set[Pending[Any]]:
    """Wait until all have ended or it is enough, at most `within` seconds. Returns those that have not, cancelled.

    Time in which this process did not run does not count.
    """
    left, waiting = within, set(calls)
    try:
        while waiting and not enough():
            check()
            if left <= 0:
                break
            begun = time.monotonic()
            waiting = wait(waiting, timeout=min(TURN, left)).not_done
            left -= min(time.monotonic() - begun, STOPPED)
    finally:
        waiting = {pending for pending in waiting if not pending.done()}
        for pending in waiting:
            pending.cancel()
    return waiting


def _result(pending: Pending[Any], address: str) -> Any:
    """Return the worker's answer, or the error: the worker's, or the scheduler's on the way there."""
    try:
        return pending.result()[address]
    except KeyError as error:  # the scheduler knows it no more
        return error
