"""Workers that are asked to end: they tell their runs, and hold their end up for a few seconds until these are ready.

Dask closes a worker on SIGTERM, at the end of its lifetime, and when the scheduler retires it. It calls a plugin's
`teardown` first; a nanny leaves 8 seconds for it. What a worker has of a run says itself when it is no longer needed.
By then Dask starts no task any more. Where a run needs tasks to take over what a worker has, SIGTERM waits before that.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Protocol
from weakref import ref

from distributed import get_worker
from distributed.diagnostics.plugin import WorkerPlugin

LONGEST = 6.0
"""Seconds for which a worker holds its end up: a nanny ends its process after 8, and threads have to end as well."""
UNHEARD = 2.5
"""Seconds after which a run that has not asked for anything is not waited for."""
SHUT_DOWN, RETIRED = "it is shut down", "the scheduler retires it"
"""Why a worker leaves, in words."""
NOT_RETIRED = "daskcnn-not-retired"
"""The topic of workers that the scheduler could not retire, since they hold actors."""
RETIRING = "daskcnn-retiring"
"""The topic of workers that the scheduler is to retire, once their runs have let them go."""
_NAME = "daskcnn-leaving"
_PAUSE = 0.02  # seconds between two looks
_TOLD = 1.0  # seconds at most to tell the runs


def topic(run: str) -> str:
    """Return the topic of a run's messages from its workers."""
    return f"daskcnn-{run}"


class HasOfRun(Protocol):
    """A part of a run that a worker has. All is called on the worker's event loop."""

    def leave(self) -> None:
        """Take note that the worker is to end."""

    @property
    def heard(self) -> bool:
        """True once the run has asked for it."""

    @property
    def done(self) -> bool:
        """True once the run needs it no longer."""


class HeldActor:
    """An actor of a run's server: the run needs it until it has released it."""

    heard = True

    def __init__(self, actor: Any) -> None:
        self._actor = ref(actor)

    def leave(self) -> None:
        """Go on as before: the run asks for the actor's state."""

    @property
    def done(self) -> bool:
        """True once the actor is released."""
        return self._actor() is None


class _Leaving(WorkerPlugin):  # type: ignore[misc] # Dask has no types
    """Holds the end of one worker up. kept: its parts of runs, by run and kind of part."""

    name = _NAME

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], HasOfRun] = {}
        self._begun = self._put_off = False

    def put_off(self, worker: Any) -> None:
        """Let the worker run tasks while it waits."""
        if self._put_off:
            return
        self._put_off, close = True, worker.close

        async def closed(*args: Any, **options: Any) -> Any:
            worker.close = close
            await self.teardown(worker)
            return await close(*args, **options)

        worker.close = closed

    async def teardown(self, worker: Any) -> None:
        """Tell the runs, and wait for them, once."""
        if self._begun:
            return
        self._begun = True
        begun, kept = time.monotonic(), dict(self.kept)
        for each in kept.values():
            each.leave()
        for run in {run for run, _ in kept}:
            with suppress(Exception):  # the scheduler is gone as well, or the run: then nobody asks
                told = worker.scheduler.log_event(topic=topic(run), msg={"leaves": worker.address})
                await asyncio.wait_for(told, _TOLD)
        while waiting := [each for each in kept.values() if not each.done]:
            passed = time.monotonic() - begun
            if passed > LONGEST or (passed > UNHEARD and not any(each.heard for each in waiting)):
                return
            await asyncio.sleep(_PAUSE)


def hold_end_up(run: str, what: str, kept: HasOfRun, *, tasks: bool = False) -> None:
    """Let the worker of this task tell this run when it is to end, and wait for it. A process that is none has no end.

    tasks: the run needs tasks of the worker until then.
    """
    try:
        worker = get_worker()
    except ValueError:
        return
    plugin = worker.plugins.setdefault(_NAME, _Leaving())
    if tasks:
        plugin.put_off(worker)
    plugin.kept = {key: each for key, each in plugin.kept.items() if not each.done} | {(run, what): kept}
