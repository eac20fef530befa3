"""Workers that running jobs give up and take: what the service tells drivers, and what becomes of it after faults."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from daskcnn.batch.drivers import Drivers
from daskcnn.batch.records import Count
from daskcnn.batch.spool import Spool
from tests.batch.fake_queue import FakeQueue

WIDE = {"cpu": Count(1, 4)}


class ElasticQueue(FakeQueue):
    """Drivers take leases on the workers of their lists, and free others, when a test says so."""

    def obey(self) -> None:
        """Let all drivers do what their lists say."""
        for job in self.spool.jobs(("running",)):
            allowed = {*(self.drivers.allowed(job.id) or ())}
            mine = {name for name, run in self.leases.items() if run == job.name}
            self.leases = {name: run for name, run in self.leases.items() if name not in mine - allowed}
            self.leases |= {name: job.name for name in allowed & {*self.workers} if name not in self.leases}
        self.check()

    def check(self) -> None:
        """No worker is two jobs', and each driver is told of no worker that is not its job's."""
        for job in self.spool.jobs(("running",)):
            assert {*(self.drivers.allowed(job.id) or ())} <= {*job.has}

    def settle(self, turns: int = 4) -> None:
        for _ in range(turns):
            self.turn()
            self.obey()

    def has(self, number: int) -> set[str]:
        return {*self.job(number).has}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[ElasticQueue]:
    made = ElasticQueue(tmp_path, "desk-1", "desk-2", "desk-3", "desk-4")
    yield made
    made.close()


def two_jobs(queue: ElasticQueue, **second: Any) -> tuple[int, int]:
    """One that has all workers, and another that has come."""
    first = queue.add(workers=WIDE)
    queue.settle(1)
    assert len(queue.has(first)) == 4
    return first, queue.add(**{"user": "bob", "workers": WIDE, **second})


def test_a_newcomer_starts_once_workers_are_given_up_and_both_come_to_have_equal_parts(queue: ElasticQueue) -> None:
    first, second = two_jobs(queue)
    queue.turn()
    allowed = queue.drivers.allowed(first) or ()
    assert (len(allowed), len(queue.has(first)), queue.job(second).state) == (2, 4, "queued")
    assert queue.job(second).why.startswith("starts when they are given up: desk-")
    queue.turn()
    assert queue.job(second).state == "queued", "the driver has not given them up"
    assert queue.drivers.allowed(first) == allowed, "and is asked for no others"
    queue.obey()
    queue.turn()
    assert (queue.job(second).state, queue.has(first)) == ("running", {*allowed})
    queue.settle()
    assert {*queue.leases.values()} == {"job-1", "job-2"}
    assert len(queue.has(first)) == len(queue.has(second)) == 2
    queue.end(second, 0)
    del queue.leases[queue.job(second).has[0]], queue.leases[queue.job(second).has[1]]
    queue.settle()
    assert queue.has(first) == {*queue.workers}, "idle workers go to who gains"


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", [(Drivers, "allow"), (Spool, "give_up"), (Spool, "begin"), (Spool, "take")])
def test_a_service_that_is_killed_at_any_step_loses_no_worker(
    queue: ElasticQueue, step: tuple[Any, str], behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before or behind each change of the spool, and of a list."""
    queue.workers.remove("desk-4")
    first = queue.add(workers=WIDE)
    queue.settle(1)
    second = queue.add(workers=WIDE, user="bob")
    real, killed = getattr(*step), 0

    def killing(self: Any, *args: Any, **how: Any) -> Any:
        nonlocal killed
        killed += 1
        if behind:
            real(self, *args, **how)
        raise Killed

    for turn in range(8):
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(*step, killing)
            queue.turn()
        queue.another_service()
        queue.obey()
        if turn == 4:
            queue.workers.append("desk-4")
    assert killed
    queue.settle()
    assert queue.has(first) | queue.has(second) == {*queue.workers}
    assert queue.job(second).state == "running"


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


def test_a_newcomer_that_is_cancelled_meanwhile_leaves_the_workers_to_who_had_them(queue: ElasticQueue) -> None:
    first, second = two_jobs(queue)
    queue.turn()
    queue.spool.cancel(second, queue.now)
    queue.settle()
    assert queue.has(first) == {*queue.workers} == {*(queue.drivers.allowed(first) or ())}


def test_a_driver_that_dies_as_it_gives_workers_up_frees_them(queue: ElasticQueue) -> None:
    first, second = two_jobs(queue, workers={"cpu": Count(2, 2)})
    queue.turn()
    queue.end(first, 137)
    queue.leases.clear()
    queue.turn()
    assert (queue.job(second).state, queue.job(first).state) == ("running", "waiting")
    queue.now += 60
    queue.settle()
    assert (len(queue.has(first)), len(queue.has(second))) == (2, 2)


def test_a_worker_that_dies_as_it_is_given_up_is_no_more_waited_for(queue: ElasticQueue) -> None:
    first, second = two_jobs(queue, workers={"cpu": Count(1, 1)})
    queue.turn()
    (gone,) = queue.has(first) - {*(queue.drivers.allowed(first) or ())}
    queue.workers.remove(gone)
    del queue.leases[gone]
    queue.settle()
    assert queue.job(second).state == "running"
    queue.workers.append(gone)
    queue.settle()
    assert len(queue.has(first)) == 3


def test_a_job_that_lost_a_worker_takes_another(queue: ElasticQueue) -> None:
    queue.workers = ["desk-1", "desk-2"]
    first = queue.add(workers={"cpu": Count(2, 2)})
    queue.settle(1)
    queue.workers = ["desk-2", "desk-3"]
    queue.settle()
    assert {*(queue.drivers.allowed(first) or ())} >= {"desk-2", "desk-3"}
    queue.workers += ["desk-1"]
    queue.settle()
    assert queue.has(first) == {"desk-1", "desk-2"}, "and gives it up once it has its own again"


def test_a_full_disk_changes_nothing_and_is_tried_again(queue: ElasticQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_jobs(queue)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("daskcnn.batch.drivers.replace_file", full)
        queue.settle()
    assert len(queue.drivers.allowed(first) or ()) == len(queue.has(first)) == 4
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "give_up", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("full")))
        queue.settle()
    assert len(queue.has(first)) == 4
    queue.settle()
    assert (len(queue.has(first)), len(queue.has(second))) == (2, 2)


@pytest.mark.parametrize("how", ["reproducible", "without names"])
def test_a_job_whose_workers_cannot_change_keeps_them(queue: ElasticQueue, how: str) -> None:
    if how == "without names":
        queue.workers = [f"tcp://{i}" for i in range(4)]
    first = queue.add(workers=WIDE, content={"train": {"reproducible": how == "reproducible"}})
    queue.settle(1)
    second = queue.add(workers=WIDE, user="bob")
    queue.settle()
    assert (len(queue.has(first)), queue.job(second).state) == (4, "queued")


def test_a_worker_without_a_name_that_is_set_apart_for_servers_keeps_nobody_from_sharing(queue: ElasticQueue) -> None:
    queue.servers = ["tcp://ps"]
    first, second = two_jobs(queue)
    queue.settle()
    assert (len(queue.has(first)), len(queue.has(second))) == (2, 2)
