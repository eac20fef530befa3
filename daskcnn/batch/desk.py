"""The way between people and the service: a desk in the scheduler's process, at which both leave messages.

Messages are plain values (numbers, texts, lists, tables), so that versions of Python may differ. The service calls
`exchange` again and again: it leaves its answers, and waits for the next requests. Nothing is kept at the desk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

from daskcnn.cluster.link.calls import Check, Unanswered, answer_to, ask_scheduler, no_check
from daskcnn.cluster.link.leases import leases_on
from daskcnn.documents import jsonable
from daskcnn.errors import ClusterError, DataError, UserError
from daskcnn.show.queue_table import DESK

ASK, EXCHANGE = "daskcnn_queue_ask", "daskcnn_queue_exchange"  # its operations
ANSWER = 30.0  # seconds within which the service answers
LOOK = "`daskcnn jobs` says what it has heard"
START = "start one with `daskcnn serve --scheduler {}` on a machine that stays on"

# --- in the scheduler's process ---


class QueueDesk(SchedulerPlugin):  # type: ignore[misc] # Dask has no types
    """Passes requests on to the service, and answers back.

    Attributes
    ----------
    service : the connection of the service; empty if there is none. by : whose process it is, in words.
    rows : the queue, as the page shows it.
    """

    name = DESK

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.service, self.by = "", ""
        self.rows: list[list[str]] = []
        self._numbers, self._waiting = count(), dict[int, asyncio.Future[Any]]()
        self._requests: list[tuple[int, Any]] = []
        self._news = asyncio.Event()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Let the service look at the workers."""
        self._news.set()

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        """Let the service look at the workers."""
        self._news.set()

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Tell all who wait that the service is gone, if it is."""
        if client == self.service:
            self.service, self.by, self.rows = "", "", []
            self._requests.clear()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)

    def attend(self, client: str, by: str) -> str:
        """Let the service of this connection take the desk. Returns who has it, if another has."""
        if self.service not in ("", client):
            return self.by
        self.service, self.by = client, by
        return ""

    async def ask(self, request: Any, within: float = ANSWER) -> Any:
        """Return the service's answer; {"absent": True} if there is no service, and None if it ends meanwhile."""
        if not self.service:
            return {"absent": True}
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._requests.append((number, request))
        self._news.set()
        try:
            return await asyncio.wait_for(self._waiting[number], within)
        except TimeoutError:
            return {"silent": within}
        finally:
            del self._waiting[number]

    async def exchange(self, client: str, answers: Sequence[Any], rows: Sequence[Any], wait: float) -> Any:
        """Take the service's answers, and return requests, workers and leases: at once if there is any news."""
        if client != self.service:
            return None
        self.rows = [list(row) for row in rows]
        for number, answer in answers:
            if number in self._waiting and not self._waiting[number].done():
                self._waiting[number].set_result(answer)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), wait)
        if client != self.service:  # it went meanwhile, and the news is another's
            return None
        self._news.clear()
        requests, self._requests = self._requests, []
        leases = [
            (lease.worker, lease.holder.run, lease.holder.by)
            for lease in leases_on(self._scheduler)
            if not lease.serves
        ]
        workers = {address: _identity(worker) for address, worker in self._scheduler.workers.items()}
        return {"requests": requests, "workers": workers, "leases": leases}


def _identity(worker: Any) -> dict[str, Any]:
    """Return what tells a worker from others, as `advertised` reads it."""
    return {
        "name": worker.name if isinstance(worker.name, str | int) else str(worker.name),
        "host": worker.host,
        "nthreads": worker.nthreads,
        "memory_limit": worker.memory_limit,
        "resources": dict(worker.resources),
    }


def _attend(client: str, by: str, dask_scheduler: Any) -> str:
    if (desk := desk_on(dask_scheduler)) is None:
        dask_scheduler.add_plugin(desk := QueueDesk(dask_scheduler), name=DESK)
        dask_scheduler.handlers |= {ASK: desk.ask, EXCHANGE: desk.exchange}
    if client not in dask_scheduler.clients:
        raise ConnectionError("the connection to the scheduler is closed")
    return desk.attend(client, by)


def desk_on(dask_scheduler: Any) -> QueueDesk | None:
    """Return the desk of this scheduler, in its process; None if no service has been here."""
    found: QueueDesk | None = dask_scheduler.plugins.get(DESK)
    return found


def _with_page(dask_scheduler: Any) -> str:
    """Add the page to the scheduler's dashboard; returns why there is none. The service need not import it."""
    from daskcnn.dashboard.site import add_page

    return add_page(dask_scheduler)


def _has_desk(dask_scheduler: Any) -> bool:
    return desk_on(dask_scheduler) is not None


# --- in the service's process ---


@dataclass(frozen=True, slots=True)
class DeskNews:
    """Messages that have come to the desk, and what the cluster is like.

    requests : by number. workers : of the scheduler, by address. leases : the address of each worker that trains for
    a run, with the run and whose it is.
    """

    requests: Mapping[int, Any] = field(default_factory=dict)
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leases: Sequence[tuple[str, str, str]] = ()


class DeskLost(ConnectionError):
    """The scheduler knows the service no more: it was started again."""


class ServiceEnd:
    """The service's end of the way."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def attend(self, by: str, check: Check = no_check) -> str:
        """Take the desk. Returns whose service has it, if another has. Raises OSError where the scheduler is gone."""
        found: str = ask_scheduler(self._client, partial(_attend, self._client.id, by), check=check)
        return found

    def show_page(self, check: Check = no_check) -> None:
        """Have the scheduler's dashboard show the queue, if it can. Raises OSError where the scheduler is gone."""
        ask_scheduler(self._client, _with_page, check=check)

    def exchange(
        self, answers: Mapping[int, Any], rows: Sequence[Sequence[str]], wait: float, check: Check = no_check
    ) -> DeskNews:
        """Leave answers and the rows of the page, and wait for news. Raises OSError where the scheduler is gone."""
        call = getattr(self._client.scheduler, EXCHANGE)
        message = {"client": self._client.id, "answers": [*answers.items()], "rows": rows, "wait": wait}
        found = answer_to(self._client, call(**message), within=wait + ANSWER, check=check)
        if found is None:
            raise DeskLost("the scheduler was started again")
        leases = [(worker, run, by) for worker, run, by in found["leases"]]
        return DeskNews(dict(found["requests"]), found["workers"], leases)


# --- in a submitter's process ---


class Unacknowledged(ClusterError):
    """It is not known if the service has heard a request."""


def ask_service(client: Client, request: Mapping[str, Any]) -> Any:
    """Return the service's answer. Raises ClusterError if there is none, and the service's refusal as UserError."""
    where = f"scheduler {client.scheduler.address}"
    call = getattr(client.scheduler, ASK)
    try:
        # a scheduler's log has a line for each look at a desk, so there is one only where no answer has come
        answer = answer_to(client, call(request=dict(request)), within=2 * ANSWER)
        if answer is None and not ask_scheduler(client, _has_desk):
            answer = {"absent": True}
    except Unanswered as error:
        raise ClusterError(reason=error, remedy="restart it") from error
    except OSError as error:
        raise Unacknowledged(where, f"connection lost ({error})", LOOK) from error
    if answer is None:
        raise Unacknowledged(where, "the service has ended meanwhile", LOOK)
    if "absent" in answer:
        raise ClusterError(where, "no service of a queue is there", START.format(client.scheduler.address))
    if "silent" in answer:
        raise Unacknowledged(where, f"the service has not answered within {answer['silent']:g} s", LOOK)
    if "refused" in answer:
        raise refusal(*answer["refused"])
    return jsonable(answer["answer"])  # Dask makes tuples of lists


_REFUSALS: dict[int, type[UserError]] = {2: DataError, 3: ClusterError}


def refusal(code: int, value: str, reason: str, remedy: str) -> UserError:
    """Return the error that the service has refused a request with."""
    return _REFUSALS.get(code, UserError)(value, reason, remedy)
