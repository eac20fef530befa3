"""Faults around a queue: the service killed at each step, clusters and clocks that are not what they were."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from daskcnn.batch.desk import DeskNews
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.records import Count
from daskcnn.batch.retries import LONGEST
from daskcnn.batch.spool import Spool
from daskcnn.batch.spool_folder import SpoolError
from tests.batch.fake_queue import FakeQueue, worker

GPU = {"gpu": Count(1, 1)}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FakeQueue]:
    made = FakeQueue(tmp_path, "desk-1", "desk-2")
    yield made
    made.close()


class Killed(BaseException):
    """The service ends here."""


def killed_at(patch: pytest.MonkeyPatch, of: type, name: str, *, after: bool) -> None:
    """End the service once, before or after it does this."""
    real, left = getattr(of, name), [None]

    @wraps(real)
    def kills(*values: Any, **options: Any) -> Any:
        kill = bool(left)
        left.clear()
        if kill and not after:
            raise Killed
        found = real(*values, **options)
        if kill:
            raise Killed
        return found

    patch.setattr(of, name, kills)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("of", "name"),
    [(Spool, "explain"), (Spool, "begin"), (Spool, "end"), (Drivers, "lock"), (Drivers, "prepare"),
     (Drivers, "allow"), (Drivers, "start"), (Drivers, "lives"), (Drivers, "exit_code")],
)  # fmt: skip
def test_a_service_that_is_killed_there_does_each_job_once(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch, of: type, name: str, after: bool
) -> None:
    numbers = [queue.add(workers={"cpu": Count(2, 2)}) for _ in range(2)]
    for number in numbers:
        queue.drivers.folder(number).mkdir(parents=True)
        (queue.drivers.folder(number) / "end").write_text("0\n")
    killed_at(monkeypatch, of, name, after=after)
    kills = 0

    def all_done() -> bool:
        nonlocal kills
        try:
            queue.turn()
        except Killed:
            kills += 1
            queue.another_service()
        return {queue.job(number).state for number in numbers} == {"done"}

    queue.wait(all_done)
    assert kills == 1
    assert [(queue.started(number), queue.job(number).attempts) for number in numbers] == [(1, 1)] * 2


def test_a_full_disk_keeps_a_job_whose_end_cannot_be_noted(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = queue.add(), queue.add()
    queue.turn()
    queue.end(first, 0)
    queue.end(second, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_set", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("disk is full")))
        queue.turn()
        queue.turn()
    assert [queue.job(number).state for number in (first, second)] == ["running", "running"]
    assert len([text for text in queue.said if "disk is full" in text]) == 1
    queue.turn()
    assert [queue.job(number).state for number in (first, second)] == ["done", "failed"]


@pytest.mark.parametrize("jump", [-365 * 86_400.0, 365 * 86_400.0])
def test_a_clock_that_jumps_while_jobs_run_and_wait(queue: FakeQueue, jump: float) -> None:
    first, second = queue.add(), queue.add(user="bob")
    queue.turn()
    queue.end(first, 3)
    queue.turn(cluster=False)
    third = queue.add(workers={"cpu": Count(2, 2)})
    queue.now += jump
    queue.turn()
    assert queue.job(first).state == "running", "it does not wait for the time that was"
    queue.end(second, 0)
    queue.end(first, 0)
    queue.turn()
    assert queue.job(third).state == "running"
    queue.now += 1.0
    last = queue.add(user="bob")
    queue.end(third, 0)
    queue.turn()
    assert [queue.job(number).state for number in (first, second, third, last)] == ["done"] * 3 + ["running"]


def test_a_cluster_that_is_gone_for_an_hour(queue: FakeQueue) -> None:
    first, second = queue.add(), queue.add(workers={"cpu": Count(2, 2)})
    queue.turn()
    queue.end(first, 5, "scheduler tcp://here:1: connection lost")
    for _ in range(360):
        queue.now += 10.0
        queue.turn(cluster=False)
    assert [(queue.job(number).state, queue.job(number).attempts) for number in (first, second)] == [
        ("waiting", 1), ("queued", 0)
    ]  # fmt: skip
    queue.workers.clear()  # the scheduler is back before its workers are
    queue.turn()
    assert queue.job(first).state == "waiting"
    queue.workers += ["desk-1", "desk-2"]
    queue.turn()
    assert (queue.job(first).state, queue.job(first).attempts) == ("running", 2)


def test_a_scheduler_that_was_restarted_gives_no_worker_of_a_driver_that_lives_to_another_job(queue: FakeQueue) -> None:
    first = queue.add(only=("desk-1",))
    queue.turn()
    second = queue.add(only=("desk-1",))
    queue.turn(cluster=False)
    queue.turn()  # a new scheduler knows of no leases
    assert (queue.job(first).state, queue.job(second).state) == ("running", "queued")
    queue.end(first, 5)
    queue.turn()
    assert (queue.job(first).state, queue.job(second).state) == ("waiting", "running")
    queue.end(second, 0)
    queue.now += LONGEST
    queue.turn()
    assert queue.job(first).state == "running"


def test_a_name_that_another_machine_has_now_is_not_given_before_its_job_has_ended(queue: FakeQueue) -> None:
    first = queue.add(only=("desk-1",))
    queue.turn()
    second = queue.add(workers=GPU)
    news = DeskNews({}, {"tcp://another": worker("desk-1", "GPU")}, [])
    queue.service.turn(news)
    assert (queue.job(second).state, queue.job(first).has) == ("queued", ("desk-1",))
    assert f"desk-1 is job {first}'s since" in queue.job(second).why
    queue.end(first, 5)
    queue.service.turn(news)
    assert (queue.job(first).state, queue.job(second).has) == ("waiting", ("desk-1",))
    queue.now += LONGEST
    queue.service.turn(news)
    assert queue.job(first).why == "no cpu worker matches desk-1"


def test_machines_without_names_are_not_given_twice_where_one_leaves(queue: FakeQueue) -> None:
    """They are called cpu-0, cpu-1, … by their addresses: as one leaves, the others' names change."""
    addresses = [f"tcp://10.0.0.{i}:1" for i in range(3)]
    leases: list[tuple[str, str, str]] = []

    def turn() -> None:
        workers = {address: worker(address) for address in addresses}
        queue.service.turn(DeskNews({}, workers, [lease for lease in leases if lease[0] in workers]))

    jobs = [queue.add() for _ in range(3)]
    turn()
    assert [queue.job(number).has for number in jobs] == [("cpu-0",), ("cpu-1",), ("cpu-2",)]
    leases += [(address, f"job-{number}", "ann@lab") for address, number in zip(addresses, jobs, strict=True)]
    gone = addresses.pop(0)
    assert gone == leases[0][0]
    later = queue.add()
    queue.end(jobs[0], 5)
    turn()  # cpu-0 is the machine of the second job now
    assert queue.job(later).state == "queued"
    assert "cpu-0 is run job-2 (ann@lab)'s" in queue.job(later).why
    queue.end(jobs[1], 0)
    del leases[1]
    turn()
    assert queue.job(later).has == ("cpu-0",)


# --- to cancel ---


def test_a_job_is_cancelled_between_two_attempts(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.end(number, 3)
    queue.turn()
    queue.spool.cancel(number, queue.now)
    queue.now += LONGEST
    queue.turn()
    assert (queue.job(number).state, queue.started(number)) == ("cancelled", 1)


def test_a_job_is_cancelled_as_its_driver_starts(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    number = queue.add()
    queue.turn()
    queue.spool.cancel(number, queue.now)
    with monkeypatch.context() as patch:
        patch.setattr(Drivers, "process", lambda *_: None)  # the keeper has not written it yet
        queue.turn()
    assert (queue.job(number).signalled, queue.drivers.lives(number)) == (0, True)
    queue.wait(lambda: queue.started(number))
    queue.turn()
    queue.wait(lambda: not queue.drivers.lives(number))
    queue.turn()
    assert (queue.job(number).state, queue.job(number).signalled) == ("cancelled", 1)


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (143, "cancelled"), (5, "cancelled"), (137, "cancelled")])
def test_a_job_is_cancelled_while_its_driver_saves(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    monkeypatch.setattr(Drivers, "tell_to_end", lambda *_: True)  # it goes on until it has saved
    number = queue.add()
    queue.turn()
    queue.spool.cancel(number, queue.now)
    queue.turn()
    assert queue.job(number).state == "running"
    with pytest.raises(SpoolError, match="it is running"):
        queue.spool.release(number, queue.now)
    queue.end(number, code)
    queue.turn()
    assert queue.job(number).state == state
    if state == "cancelled":
        assert queue.spool.release(number, queue.now).cancelling == 0
        queue.turn()
        assert (queue.job(number).state, queue.job(number).cancelling) == ("running", 0)
