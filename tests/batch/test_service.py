"""The service and its drivers, with faults: killed, a full disk, workers that go, clocks that jump."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daskcnn.batch import service
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.records import Count
from daskcnn.batch.retries import FIRST, LONGEST
from daskcnn.events import EpochEnded, Event, Judged, RunStarted
from tests.batch.fake_queue import FakeQueue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FakeQueue]:
    made = FakeQueue(tmp_path, "desk-1", "desk-2")
    yield made
    made.close()


def test_a_job_begins_on_workers_of_its_own_and_its_driver_is_told_which(queue: FakeQueue) -> None:
    number = queue.add(
        content={"train": {"epochs": 3}, "cluster": {"wait": 5}}, name="first", modules=(("own.py", ""),)
    )
    queue.turn()
    job = queue.job(number)
    assert (job.state, len(job.has), job.attempts) == ("running", 1, 1)
    folder = queue.drivers.folder(number)
    told = tomllib.loads((folder / "submitted" / "job.toml").read_text())
    own: dict[str, object] = {"scheduler": "tcp://here:1", "workers": {"cpu": 1}, "only_from": str(folder / "workers")}
    own |= {"wait": 5, "adapt": False}
    assert told == {
        "train": {"epochs": 3}, "cluster": own, "run": {"name": "first", "dir": str(queue.folder / "runs")}
    }  # fmt: skip
    assert (folder / "submitted" / "own.py").exists()
    assert queue.drivers.allowed(number) == job.has
    queue.end(number, 0)
    queue.turn()
    assert (queue.job(number).state, queue.job(number).has) == ("done", ())


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, "done"), (1, "waiting"), (2, "failed"), (3, "waiting"), (4, "failed"), (5, "waiting"), (6, "failed"),
     (130, "waiting"), (137, "waiting"), (143, "waiting")],
)  # fmt: skip
def test_a_job_that_ends_with_this_code(queue: FakeQueue, code: int, state: str) -> None:
    number = queue.add()
    queue.turn()
    queue.end(number, code, "reasons" if code else "")
    queue.turn(cluster=False)
    job = queue.job(number)
    assert (job.state, job.exit_code) == (state, code)
    assert job.why.endswith(": reasons") == (code != 0)
    queue.now += LONGEST
    queue.turn()
    assert (queue.job(number).state == "running") == (state == "waiting")


def test_a_driver_that_is_killed_by_the_system_has_code_137(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.wait(lambda: queue.started(number))
    os.kill(queue.drivers.process(number) or 0, signal.SIGKILL)
    queue.wait(lambda: not queue.drivers.lives(number))
    (queue.drivers.folder(number) / "alive").rmdir()
    queue.turn(cluster=False)
    assert (queue.job(number).exit_code, queue.job(number).state) == (137, "waiting")


def test_another_service_finds_drivers_and_their_ends(queue: FakeQueue) -> None:
    first, second = queue.add(), queue.add()
    queue.turn()
    queue.wait(lambda: queue.started(first) and queue.started(second))
    queue.end(first, 4)  # while there is no service
    queue.another_service()
    queue.turn()
    assert (queue.job(first).state, queue.job(second).state) == ("failed", "running")
    assert queue.started(second) == 1


def test_a_service_that_is_killed_before_it_starts_a_driver_loses_no_job(queue: FakeQueue) -> None:
    first, second = queue.add(), queue.add()
    for number, worker in ((first, "desk-1"), (second, "desk-2")):
        queue.spool.begin(number, [worker], queue.now, boot="", step=-1)
    queue.spool.cancel(second, queue.now)
    queue.another_service().turn(None)
    assert (queue.job(first).state, queue.job(first).attempts) == ("queued", 0)
    assert queue.job(second).state == "cancelled"
    queue.turn()
    queue.wait(lambda: queue.started(first))
    assert queue.started(second) == 0


def test_a_job_never_has_two_drivers_even_if_the_spool_says_that_it_has_none(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.wait(lambda: queue.started(number))
    queue.spool.never_begun(number, queue.now)
    queue.turn()
    assert (queue.job(number).state, queue.started(number)) == ("queued", 1)
    queue.end(number, 3)


def test_a_driver_without_an_exit_code_was_done_if_its_summary_says_so(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.end(number, 0)
    (queue.drivers.folder(number) / "exit").write_text("    ")
    run = Path(queue.job(number).run)
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"status": "done"}')
    queue.turn(cluster=False)
    assert (queue.job(number).state, queue.job(number).exit_code) == ("done", 0)


def test_a_machine_that_was_started_again_tries_its_jobs_again(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = queue.add()
    queue.turn()
    queue.end(number, 1)
    (queue.drivers.folder(number) / "exit").write_text("    ")
    monkeypatch.setattr(service, "boot", lambda: "another")
    queue.turn(cluster=False)
    assert (queue.job(number).state, queue.job(number).why) == ("waiting", "the machine was started again")
    queue.turn()
    assert queue.job(number).state == "running"


def test_progress_is_seen_in_checkpoints(queue: FakeQueue) -> None:
    number = queue.add()
    for step in range(5):
        queue.turn()
        assert queue.job(number).state == "running", "it is tried again as long as it comes further"
        (Path(queue.job(number).run) / "checkpoints" / f"step-{step:09d}").mkdir(parents=True)
        queue.end(number, 137)
        queue.turn(cluster=False)
        queue.now += LONGEST
    assert [attempt.progressed for attempt in queue.spool.attempts(number)] == [True] * 5


def test_cancel_ends_a_driver_in_good_order(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.wait(lambda: queue.started(number))
    queue.spool.cancel(number, queue.now)
    queue.turn()
    queue.wait(lambda: not queue.drivers.lives(number))
    queue.turn()
    job = queue.job(number)
    assert (job.state, job.exit_code, job.signalled) == ("cancelled", 143, 1)


def test_every_wish_to_cancel_is_one_signal(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def told(self: Drivers, number: int) -> bool:
        sent.append(number)
        return True

    monkeypatch.setattr(Drivers, "tell_to_end", told)
    number = queue.add()
    queue.turn()
    queue.spool.cancel(number, queue.now)
    for _ in range(3):
        queue.another_service().turn(None)
    assert sent == [number]
    queue.spool.cancel(number, queue.now)
    queue.turn()
    assert sent == [number] * 2


@pytest.mark.parametrize(
    ("asked", "elastic", "fixed"),
    [
        ({"cpu": Count(1, 4)}, {"cpu": "1..4"}, {"cpu": "1..2"}),
        ({"cpu": Count(2, 4)}, {"cpu": "2..4"}, {"cpu": 2}),
        ({"cpu": Count(1, 1)}, {"cpu": 1}, {"cpu": 1}),
        ({}, {}, {"cpu": 2}),
    ],
)
@pytest.mark.parametrize("how", ["elastic", "reproducible", "without names"])
def test_a_job_of_a_range_gets_what_is_free_and_goes_on_with_its_least(
    queue: FakeQueue, asked: dict[str, Count], elastic: Any, fixed: Any, how: str
) -> None:
    if how == "without names":
        queue.workers = ["tcp://1:1", "tcp://2:2"]
    number = queue.add(workers=asked, content={"train": {"reproducible": how == "reproducible"}})
    queue.turn()
    cluster = tomllib.loads((queue.drivers.folder(number) / "submitted" / "job.toml").read_text())["cluster"]
    assert cluster.get("workers") == (elastic if how == "elastic" else fixed)
    assert ("only" in cluster) == (queue.drivers.allowed(number) is None) == (how != "elastic")


def test_two_jobs_that_want_the_same_worker(queue: FakeQueue) -> None:
    first, second = queue.add(only=("desk-1",)), queue.add(only=("desk-1",))
    queue.turn()
    assert queue.job(second).why.endswith(f"desk-1 is given to job {first}")
    queue.turn()
    assert (queue.job(first).has, queue.job(second).state) == (("desk-1",), "queued")
    assert f"desk-1 is job {first}'s since" in queue.job(second).why
    assert queue.service.places == {second: 1}
    queue.end(first, 0)
    queue.turn()
    assert queue.job(second).has == ("desk-1",)


def test_workers_that_train_for_other_runs_are_left_to_them(queue: FakeQueue) -> None:
    queue.leases = {"desk-1": "mine"}
    number = queue.add(workers={"cpu": Count(2, 2)})
    queue.turn()
    assert queue.job(number).state == "queued"
    assert queue.job(number).why.endswith("; desk-1 is run mine (bob@lab, process 7)'s")
    queue.leases = {}
    queue.turn()
    assert queue.job(number).state == "running"


def test_a_worker_that_leaves_between_the_grant_and_the_start(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    (gone,) = queue.job(number).has
    queue.workers.remove(gone)
    queue.end(number, 3, "0 cpu workers are free after 60 s")
    queue.turn()
    assert queue.job(number).state == "waiting"
    queue.now += LONGEST
    queue.turn()
    assert {*queue.job(number).has} == {*queue.workers}


def test_without_a_cluster_nothing_begins_and_ends_are_seen(queue: FakeQueue) -> None:
    first = queue.add()
    queue.turn()
    second = queue.add()
    queue.end(first, 5)
    queue.turn(cluster=False)
    assert (queue.job(first).state, queue.job(second).state) == ("waiting", "queued")


def test_modules_may_be_named_as_the_files_of_the_service(queue: FakeQueue) -> None:
    names = ("workers", "driver", "lock", "exit", "alive")
    number = queue.add(modules=tuple((f"{name}/__init__.py", "") for name in names))
    queue.turn()
    assert (queue.job(number).state, queue.drivers.allowed(number)) == ("running", queue.job(number).has)


def test_a_job_that_cannot_be_started_leaves_its_worker_to_others(queue: FakeQueue) -> None:
    bad = queue.add(modules=((f"{'a' * 300}.py", ""),))
    queue.workers = ["desk-1"]
    queue.turn()
    job, good = queue.job(bad), queue.add()
    assert (job.state, job.again_at, job.has) == ("waiting", queue.now + FIRST, ())
    assert job.why.startswith("cannot be started: [Errno 36] File name too long")
    queue.turn()
    assert (queue.job(good).state, queue.job(bad).why) == ("running", job.why)
    queue.end(good, 0)
    queue.now += FIRST
    queue.turn()
    assert (queue.job(bad).again_at, queue.job(bad).attempts) == (queue.now + 2 * FIRST, 0)


def test_one_bad_job_does_not_end_the_service(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = queue.add(content={"train": 3}), queue.add()
    queue.turn()
    queue.turn()
    job = queue.job(bad)
    assert (job.state, queue.job(good).state) == ("held", "running")
    assert job.why == "the service failed at it (AttributeError: 'int' object has no attribute 'get')"
    assert [job.why in text for text in queue.said].count(True) == 1
    queue.end(good, 0)
    monkeypatch.setattr(service, "newest_step", lambda run: [][0])
    queue.turn()
    assert queue.job(good).state == "failed"
    assert "the service failed at it (IndexError: list index out of range)" in queue.job(good).why


def test_a_job_of_an_older_spool_whose_run_no_file_system_has_is_held(queue: FakeQueue) -> None:
    number = queue.add(folder="a\0b", workers={})
    queue.turn()
    assert "embedded null" in queue.job(number).why


def test_a_driver_that_cannot_be_started_for_a_fault_of_its_job_is_taken_back(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = queue.add()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: os.stat("a\0b"))
    queue.turn()
    job = queue.job(number)
    assert (job.state, job.attempts, job.has) == ("held", 0, ())
    assert "embedded null" in job.why


def test_a_full_disk_starts_nothing_and_is_told_of_once(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    number = queue.add()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Drivers, "prepare", full)
        queue.turn()
        queue.turn()
    assert (queue.job(number).state, queue.started(number)) == ("waiting", 0)
    assert len([text for text in queue.said if "No space left" in text]) == 1
    queue.now += FIRST
    queue.turn()
    assert queue.job(number).state == "running"


def test_a_system_without_room_for_a_process_takes_the_start_back(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = queue.add()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_, **__: os.open("/none", 0))
        queue.turn()
    assert (queue.job(number).state, queue.job(number).attempts) == ("waiting", 0)
    queue.now += FIRST
    queue.turn()
    assert queue.job(number).attempts == 1


def test_a_clock_that_was_set_back_keeps_no_job_waiting(queue: FakeQueue) -> None:
    number = queue.add()
    queue.turn()
    queue.end(number, 3)
    queue.turn(cluster=False)
    queue.now -= 365 * 86_400
    queue.turn()
    assert queue.job(number).state == "running"
    queue.end(number, 0)
    queue.turn()
    assert queue.job(number).state == "done"


def test_a_job_waits_for_the_one_it_comes_after(queue: FakeQueue) -> None:
    first = queue.add()
    second = queue.add(after=(first,))
    queue.turn()
    assert (queue.job(second).state, queue.job(second).why) == ("queued", f"after job {first}")
    queue.end(first, 0)
    queue.turn()
    assert queue.job(second).state == "running"


def test_runs_of_a_sweep_that_are_not_among_the_best_at_a_rung_end_early(queue: FakeQueue) -> None:
    earlier = [queue.add(name=f"lab-old-{i}", sweep="lab", stop="asha", user="bob") for i in range(3)]
    queue.now += 1.0  # others have used the sweep's name before
    for number in earlier:
        queue.spool.cancel(number, queue.now)
        _judged(Path(queue.job(number).run), 1.0)
    queue.workers = ["desk-1", "desk-2", "desk-3"]
    numbers = [queue.add(name=f"lab-{i}", sweep="lab", stop="asha") for i in range(3)]
    alone = queue.add(name="alone")
    queue.turn()
    for i, number in enumerate(numbers):
        _judged(Path(queue.job(number).run), 0.9 - 0.1 * i, at=2.0 + i)
    queue.turn()
    assert [queue.job(number).cancelling for number in numbers] == [0, 0, 1]
    queue.wait(lambda: queue.started(numbers[2]))
    queue.wait(lambda: queue.started(numbers[2]))
    queue.turn()  # tells the driver
    queue.wait(lambda: not queue.drivers.lives(numbers[2]))
    queue.turn()
    job = queue.job(numbers[2])
    assert (job.state, job.exit_code) == ("cancelled", 143)
    assert job.why == "ended at epoch 1 by --stop asha: place 3 of 3"
    assert queue.job(alone).state == "running"  # it has the worker now
    queue.end(alone, 0)
    queue.spool.release(numbers[2], queue.now)
    queue.turn()
    queue.turn()
    job = queue.job(numbers[2])
    assert (job.state, job.cancelling) == ("running", 0), "it goes on, whatever its place was"


def _judged(run: Path, accuracy: float, at: float = 1.0) -> None:
    """Write the log of a run that has ended an epoch."""
    judged = Judged(loss=1.0, accuracy=accuracy)
    told: list[Event] = [
        RunStarted(epochs=9, at=1.0),
        EpochEnded(epoch=1.0, step=1, loss=1.0, validation=judged, at=at),
    ]
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event.record())}\n" for event in told))
