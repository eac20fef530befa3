"""A client of a cluster whose workers, or whose scheduler, may hang: no sockets, no processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from distributed.utils import has_arg

ADDRESS = "tcp://10.0.0.1:8786"


class FakeScheduler:
    """The attributes of Dask's scheduler that plugins use. clients: by their ids."""

    def __init__(self, client: FakeClient) -> None:
        self._client, self.plugins = client, dict[str, Any]()
        self.clients = {client.id: client}
        self.idle_timeout: float | None = None
        self.handlers = {"retire_workers": None}

    def add_plugin(self, plugin: Any, *, name: str) -> None:
        self.plugins[name] = plugin

    @property
    def workers(self) -> dict[str, Any]:
        known = self._client.workers
        return {address: SimpleNamespace(name=info.get("name", address)) for address, info in known.items()}


class FakeClient:
    """What `daskcnn.cluster.link.calls` uses of `distributed.Client`, on a loop of its own.

    workers: what the scheduler says of each, by address. hang: addresses that never answer, "scheduler" among them.
    change: what a worker's answer is turned into. lost: addresses that the scheduler cannot reach. before: told who is
    asked, and what.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.scheduler_comm = object()
        self.loop, self.id = SimpleNamespace(asyncio_loop=loop), "client"
        self.dask_scheduler = FakeScheduler(self)
        self.scheduler = SimpleNamespace(address=ADDRESS, identity=self._identity, processing=self._processing)
        self.status, self._event_handlers = "running", dict[str, Callable[[Any], None]]()
        self.workers: Mapping[str, Any] = {}
        self.hang: Collection[str] = ()
        self.lost: Collection[str] = ()
        self.change: Callable[[Any], Any] = lambda answer: answer
        self.before: Callable[[str, Any], None] = lambda address, function: None

    async def run(self, function: Callable[..., Any], *args: Any, workers: list[str], **options: Any) -> dict[str, Any]:
        assert options == {"on_error": "return", "asynchronous": True}
        (address,) = workers
        self.before(address, function)
        await self._perhaps(address)
        if address in self.lost:
            return {address: OSError(f"Timed out trying to connect to {address}")}
        return {address: self.change(function(*args))}

    def map(self, function: Callable[..., Any], *args: Any, key: list[Any], **options: Any) -> list[Any]:
        """Take tasks that nobody runs."""
        return list(key)

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Let tests tell the handler."""
        self._event_handlers[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        """Keep the handler, as Dask does."""

    async def run_on_scheduler(self, function: Callable[..., Any], *, asynchronous: bool) -> Any:
        assert asynchronous
        await self._perhaps("scheduler")
        return function(dask_scheduler=self.dask_scheduler) if has_arg(function, "dask_scheduler") else function()

    async def scatter(self, data: list[Any], *, workers: list[str], **_: Any) -> list[Any]:
        for address in workers:
            await self._perhaps(address)
        return [SimpleNamespace(data=data[0])]

    async def _identity(self, *, n_workers: int) -> dict[str, Any]:
        await self._perhaps("scheduler")
        return {"workers": dict(self.workers)}

    async def _processing(self, *, workers: None) -> dict[str, Any]:
        await self._perhaps("scheduler")
        return {}

    async def _perhaps(self, who: str) -> None:
        if who in self.hang:
            await asyncio.Event().wait()


@contextmanager
def fake_client(workers: Mapping[str, Any], **attributes: Any) -> Iterator[Any]:
    """A fake client with these workers; its loop runs in a thread of its own until the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    client = FakeClient(loop)
    vars(client).update(attributes, workers=workers)
    try:
        yield client
    finally:
        left = asyncio.run_coroutine_threadsafe(_tasks_left(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        assert not left, "calls that nobody waits for any more are cancelled"


async def _tasks_left() -> int:
    for _ in range(3):  # a cancelled task ends at its next turn
        await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1
