"""Whether a task's work is still wanted."""

from __future__ import annotations

from collections.abc import Callable

from distributed import get_worker


def stopped() -> bool:
    """Whether the task in this thread was cancelled, by the driver or because the driver is gone.

    Not to be relied on in a task that depends on an actor: see `server.actor.ServerAt`.
    """
    return stop_signal()()


def stop_signal() -> Callable[[], bool]:
    """The same for this thread's task, to be asked on any thread."""
    worker = get_worker()
    key = worker.get_current_task()

    def stopped() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state != "executing"

    return stopped
