"""A cluster that Dask can scale: a run asks it for workers, and gives them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from queue import SimpleQueue
from threading import Thread
from typing import Any

from distributed import Client, SpecCluster

from daskcnn.arrays import cpu_count
from daskcnn.cluster.link.calls import ask_scheduler
from daskcnn.cluster.link.leases import leases_on
from daskcnn.errors import ClusterError
from daskcnn.job.cluster_table import Cluster

GIVEN_BACK = 30.0
"""Seconds at most that the end of a run waits for its cluster to take workers back."""
_ELSE = (
    "train from Python with a client of the cluster object, as daskcnn.train(Client(cluster), job), or leave out "
    "cluster.adapt (--adapt) and give cluster.workers a range: the run takes workers that come"
)


def check_scalable(settings: Cluster, client: Client | None) -> None:
    """Raise ClusterError where a job is to ask for workers and its cluster is one that Dask cannot scale.

    client: the one that the user gives; None where the job connects or starts a cluster by itself.
    """
    if not settings.adapt:
        return
    if client is None and (where := settings.scheduler or settings.scheduler_file):
        raise ClusterError(f"scheduler {where}", "an address cannot be asked for workers", _ELSE)
    if client is not None and not callable(getattr(client.cluster, "scale", None)):
        where = f"client of scheduler {client.scheduler.address}"
        raise ClusterError(where, "it has no cluster object that could be asked for workers", _ELSE)


class ScaledCluster:
    """The cluster behind a client. Calls return at once: another thread makes them in turn.

    own: the job has started it, and ends it.

    Attributes
    ----------
    first : Names of its workers at the beginning.
    most : Workers of a run that it has room for.
    faults : What went wrong, in words, until it is taken from here.
    """

    def __init__(self, client: Client, *, own: bool) -> None:
        self._client, self._cluster, self._own = client, client.cluster, own
        self._asked = False
        self._calls: SimpleQueue[tuple[str, Callable[[], Any]] | None] = SimpleQueue()
        self.most: float = cpu_count() if own else inf
        self.faults: SimpleQueue[str] = SimpleQueue()
        self.first = self._names()
        self._thread = Thread(target=self._work, name="daskcnn-scaling", daemon=True)
        self._thread.start()

    def _names(self) -> set[str]:
        """Return the names of its workers, and of those that are to come, if it tells them.

        Where workers are set apart for servers, a cluster that chooses itself has a group of its own for them.
        """
        if self._by_name:
            return {*map(str, self._cluster.plan)}
        there = self._cluster.scheduler_info["workers"].values()
        return {str(info["name"]) for info in there if "PS" not in info["resources"]}

    @property
    def _by_name(self) -> bool:
        """True if the cluster ends the workers that are named; others choose among those that no run has."""
        return isinstance(self._cluster, SpecCluster)

    def ask(self, more: int) -> None:
        """Ask for this number of workers besides those that are there."""
        self._asked = True
        self._calls.put((f"{more} more workers", lambda: self._grow(more)))

    def give_back(self, address: str, name: str) -> None:
        """Let the cluster end a worker that the run has let go. name: by which Dask calls it."""
        self._calls.put((f"give back worker {name}", lambda: self._end({name}, [address])))

    def close(self) -> None:
        """Give back the free workers that came since it was first asked, once the run has let go of them."""
        if self._asked and not self._own:
            self._calls.put(("give back workers", self._shrink))
        self._calls.put(None)
        self._thread.join(GIVEN_BACK)

    # --- in the thread ---

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            what, function = call
            try:
                function()
            except Exception as error:  # whatever a cluster of some kind raises
                self.faults.put(f"{type(self._cluster).__name__}: {what}: {type(error).__name__}: {error}")

    def _grow(self, more: int) -> None:
        names = self._names()
        coming = len(names - {*map(str, self._cluster.observed)})
        if more > coming:
            self._cluster.scale(len(names) + more - coming)

    def _shrink(self) -> None:
        free, held = ask_scheduler(self._client, _free_and_held)
        came = self._names() - self.first - held
        self._end(came, [address for address, name in free.items() if name in came])

    def _end(self, names: set[str], addresses: list[str]) -> None:
        """Have workers end in good order, and no others start in their place. Some may not have come yet.

        A job of a queue with several workers ends with the last of them.
        """
        if not self._by_name:
            self._cluster.scale(len(self._names() - names))
            return
        if addresses:
            self._client.retire_workers(addresses, close_workers=True)
        specified = [name for name in self._cluster.worker_spec if str(name) in names]
        self._cluster.sync(self._cluster.scale_down, specified)


@contextmanager
def scaled_cluster(client: Client, settings: Cluster, *, own: bool) -> Iterator[ScaledCluster | None]:
    """Give the cluster behind the client if the job may ask it for workers; it has been asked for the least."""
    if not settings.adapt:
        yield None
        return
    cluster = ScaledCluster(client, own=own)
    if (missing := sum(settings.workers.given.values()) - len(cluster.first)) > 0:
        cluster.ask(missing)
    try:
        yield cluster
    finally:
        cluster.close()


def _free_and_held(dask_scheduler: Any) -> tuple[dict[str, str], set[str]]:
    """Return the names of the scheduler's workers that no run has, by address, and those of the others."""
    held = {lease.worker for lease in leases_on(dask_scheduler)}
    names = {address: str(own.name) for address, own in dask_scheduler.workers.items()}
    free = {address: name for address, name in names.items() if address not in held}
    return free, {*names.values()} - {*free.values()}
