"""`daskcnn serve`: a service at its spool and its scheduler, until a signal ends it."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from daskcnn.batch.desk import ServiceEnd
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.requests import Requests
from daskcnn.batch.service import Service
from daskcnn.batch.spool import Spool
from daskcnn.batch.spool_folder import note_runs
from daskcnn.cluster.link.calls import Check
from daskcnn.cluster.link.connect import check_scheduler, connect
from daskcnn.cluster.link.signals import Signals
from daskcnn.errors import ClusterError, Interrupted
from daskcnn.files import open_regular
from daskcnn.job.cluster_table import Cluster
from daskcnn.show.text import plural

BUSY, IDLE = 1.0, 2.0
"""Seconds between two turns while jobs run or wait, and while there are none."""
AGAIN = 3.0  # seconds between two attempts to reach the scheduler


def serve(cluster: Cluster, folder: Path, *, runs: Path, say: Callable[[str], None]) -> None:
    """Serve the queue in a folder on a cluster until SIGINT or SIGTERM. Drivers go on, but for those in a container.

    Raises SpoolError for a folder that cannot be used, and ClusterError for an address that can be none.
    runs: the folder of runs whose job names none.
    """
    check_scheduler(cluster)
    with Signals().installed() as signals, Spool(folder) as spool:
        signals.polled = True
        try:
            with alone(spool.folder, signals.check, say):
                with suppress(OSError):  # a full disk: jobs that are submitted here go to the folder noted before
                    note_runs(spool.folder, runs.absolute())
                say(f"queue in {spool.folder}; runs in {runs.absolute()}")
                names = {key: getattr(cluster, key) for key in ("scheduler", "scheduler_file") if getattr(cluster, key)}
                service = Service(spool, Drivers(spool.folder), cluster=names, runs=runs.absolute(), say=say)
                try:
                    Attending(service, cluster, signals.check, say).keep()
                except Interrupted:
                    if os.getpid() == 1:  # the first of a container: the system kills all others of it at its end
                        end_drivers(service, say)
                    raise
        except Interrupted:
            say(f"the service ends; {plural(len(spool.jobs(('running',))), 'job')} still running")


def end_drivers(service: Service, say: Callable[[str], None]) -> None:
    """Ask all drivers to save and end, and wait until they have. Note how they ended."""
    running = service.spool.jobs(("running",))
    asked = {job.id for job in running if job.signalled}  # asked again, a driver ends at once
    if running:
        say(f"waiting for {plural(len(running), 'job')} to be saved; a second signal ends all at once")
    while alive := [job.id for job in running if service.drivers.lives(job.id)]:
        asked |= {number for number in alive if number not in asked and service.drivers.tell_to_end(number)}
        time.sleep(0.1)  # a driver that has ended shows by its lock alone
    service.turn(None)


@contextmanager
def alone(folder: Path, check: Check, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process serves this spool, and keep others from it inside."""
    path = folder / "service.lock"
    descriptor, told = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), False
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not told:
                with open_regular(path) as lock:
                    owner = lock.read(200).decode(errors="replace").strip() or "another process"
                say(f"waiting for {owner}, which serves {folder}")
                told = True
            check()
            time.sleep(0.5)
        with suppress(OSError):  # a courtesy
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


class Attending:
    """Keeps a service at its scheduler, however often that goes away."""

    def __init__(self, service: Service, cluster: Cluster, check: Check, say: Callable[[str], None]) -> None:
        self._service, self._check, self._say = service, check, say
        self._cluster = cluster.model_copy(update={"wait": 0.0})
        self._requests = Requests(
            service.spool, service.drivers, runs=service.runs, clock=service.clock, places=service.places
        )
        self._told = ""

    def keep(self) -> None:
        """Attend for ever. Raises Interrupted after a signal."""
        while True:
            try:
                with connect(self._cluster, self._check) as client:
                    self._attend(ServiceEnd(client), client.scheduler.address)
            except (ClusterError, OSError, sqlite3.Error) as error:
                self._tell(f"{error}; trying again")
            self._service.turn(None)
            self._pause()

    def _attend(self, end: ServiceEnd, address: str) -> None:
        by = f"process {os.getpid()} on {socket.gethostname()}"
        while other := end.attend(by, self._check):
            self._tell(f"waiting for {other}, which serves another queue at scheduler {address}")
            self._service.turn(None)
            self._pause()
        self._tell(f"serving at scheduler {address}")
        end.show_page(self._check)
        answers: Mapping[int, Any] = {}
        while True:
            wait = 0.0 if answers else BUSY if self._service.busy else IDLE
            news = end.exchange(answers, self._requests.rows(), wait, self._check)
            answers = {number: self._requests.answer(request) for number, request in news.requests.items()}
            self._service.turn(news)

    def _pause(self) -> None:
        until = time.monotonic() + AGAIN
        while time.monotonic() < until:
            self._check()
            time.sleep(0.1)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._say(text)
        self._told = text
