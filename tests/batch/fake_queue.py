"""A service without a cluster. Its drivers are shell scripts that end when and as a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from daskcnn.batch.desk import DeskNews
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.records import QueuedJob
from daskcnn.batch.requests import Requests
from daskcnn.batch.service import Service
from daskcnn.batch.spool import Spool
from tests.batch.queues import submission

DRIVER = """
folder=${1%/submitted/*}
mkdir "$folder/alive" || echo "$1" >>"$folder/../twice"
trap 'rmdir "$folder/alive"; exit 143' TERM
echo start >>"$folder/starts"
while [ ! -s "$folder/end" ]; do sleep 0.01; done
read code words <"$folder/end"
rm "$folder/end"
[ -z "$words" ] || echo "error: $words" >&2
rmdir "$folder/alive"
exit $code
"""
"""Ends with the code in the file `end`, and says what stands behind it."""
IMPATIENT = 10.0


class FakeQueue:
    """A spool, its service, and a clock that a test turns.

    Attributes
    ----------
    workers : names of CPU workers that are there. servers : of those set apart for servers.
    leases : of others' runs, by worker.
    said : what the service has said.
    """

    def __init__(self, folder: Path, *workers: str, spool: Spool | None = None) -> None:
        self.folder, self.workers, self.leases = folder, [*workers], dict[str, str]()
        self.servers = list[str]()
        self.now, self.said = 1e9, list[str]()
        self.spool = spool or Spool(folder / "spool")
        self.drivers = Drivers(self.spool.folder, ("/bin/sh", "-c", DRIVER, "driver"), folder)
        self.service = self.another_service()
        self.requests = Requests(
            self.spool, self.drivers, runs=folder, clock=lambda: self.now, places=self.service.places
        )

    def another_service(self) -> Service:
        """As after the first one was killed."""
        how: dict[str, Any] = {"cluster": {"scheduler": "tcp://here:1"}, "runs": self.folder}
        drivers = Drivers(self.spool.folder, ("/bin/sh", "-c", DRIVER, "driver"), self.folder)
        self.service = Service(self.spool, drivers, say=self.said.append, clock=lambda: self.now, **how)
        return self.service

    def add(self, **values: Any) -> int:
        return self.spool.add([submission(**values)], self.folder / "runs", self.now)[0].id

    def turn(self, *, cluster: bool = True) -> None:
        self.service.turn(self.news() if cluster else None)

    def news(self) -> DeskNews:
        workers = {f"tcp://{name}": worker(name) for name in self.workers}
        workers |= {name: worker(name, "PS") for name in self.servers}
        leases = [(f"tcp://{name}", run, "bob@lab, process 7") for name, run in self.leases.items()]
        return DeskNews({}, workers, leases)

    def end(self, number: int, code: int, words: str = "") -> None:
        """Let a job's driver end."""
        (self.drivers.folder(number) / "end").write_text(f"{code} {words}\n")
        self.wait(lambda: not self.drivers.lives(number))

    def started(self, number: int) -> int:
        """How often a driver of the job has begun."""
        path = self.drivers.folder(number) / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait(self, until: Callable[[], Any]) -> None:
        """Wait for a process."""
        deadline = time.monotonic() + IMPATIENT
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def job(self, number: int) -> QueuedJob:
        return self.spool.job(number)

    def close(self) -> None:
        for job in self.spool.jobs(("running",)):
            self.end(job.id, 0)
        self.spool.close()
        assert not (self.spool.folder / "jobs" / "twice").exists(), "a job has had two drivers at once"


def worker(name: str, resource: str = "CPU") -> Mapping[str, Any]:
    """A worker as the desk tells of it."""
    return {"name": name, "host": name, "nthreads": 1, "memory_limit": 1 << 30, "resources": {resource: 1.0}}
