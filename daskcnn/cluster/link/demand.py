"""A job's demand for workers, in a form that clusters see which adapt by themselves (`cluster.adapt`).

Dask's `Adaptive` counts tasks: by their expected seconds it says how many workers there should be. A job that waits for
workers has no task that could run. It keeps tasks at the scheduler that no worker can run, as many as stand for the
workers that are missing. They go with its connection.
"""

from __future__ import annotations

from uuid import uuid4

from distributed import Client, Future

A_WORKER = 10
"""Tasks for a worker: one of unknown length counts for 0.5 s, and `distributed.adaptive.target-duration` is 5 s."""
NOBODY = {"daskcnn-wanted": 1}
"""A resource that no worker has."""


class Demand:
    """The workers that a job is missing."""

    def __init__(self, client: Client) -> None:
        self._client, self._name = client, f"daskcnn-wanted-{uuid4().hex}"
        self._tasks: list[Future] = []

    def set(self, missing: int) -> None:
        """Ask for this many workers more than there are."""
        wanted, have = A_WORKER * missing, len(self._tasks)
        if wanted > have:
            keys = [(self._name, number) for number in range(have, wanted)]
            self._tasks += self._client.map(_nothing, keys, key=keys, resources=NOBODY, pure=False)
        del self._tasks[wanted:]  # the scheduler forgets a task that nobody waits for

    def close(self) -> None:
        """Ask for none."""
        self._tasks.clear()


def _nothing(key: object) -> None:
    """Do nothing, nowhere."""
