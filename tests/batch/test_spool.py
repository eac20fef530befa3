"""The spool: changes of state, all or nothing, and folders that it refuses."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from daskcnn.batch import spool_folder
from daskcnn.batch.records import ACTIVE, ENDED, SCHEMA, Attempt, Count, Grant
from daskcnn.batch.spool import Spool
from daskcnn.batch.spool_folder import SpoolError, file_system
from tests.batch.queues import submission


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path / "spool") as made:
        yield made


def add(spool: Spool, now: float = 0.0, **values: object) -> int:
    return spool.add([submission(**values)], Path("/runs"), now)[0].id


def begin(spool: Spool, number: int, *workers: str, now: float = 1.0) -> bool:
    return spool.begin(number, workers, now, boot="b", step=0)


def test_a_job_comes_back_as_it_was_submitted(spool: Spool) -> None:
    asked = submission(
        name="first", user="bob", priority=3, workers={"cpu": Count(2, 4), "gpu": Count(1, None)}, only=("desk-*",),
        content={"train": {"epochs": 2}}, modules=(("own.py", "x = 1"),), sweep="lr",
    )  # fmt: skip
    (job,) = spool.add([asked], Path("/runs"), 7.0)
    assert (job.state, job.submitted, job.since, job.run) == ("queued", 7.0, 7.0, "/runs/first")
    for name in ("user", "priority", "workers", "only", "sweep", "name"):
        assert getattr(job, name) == getattr(asked, name)
    assert spool.content(job.id) == ({"train": {"epochs": 2}}, [("own.py", "x = 1")])


def test_a_submission_that_is_sent_twice_is_one_job(spool: Spool) -> None:
    asked = submission()
    assert spool.add([asked], Path(), 0) == spool.add([asked], Path(), 1)
    assert len(spool.jobs()) == 1


def test_of_several_submissions_all_are_queued_or_none(spool: Spool) -> None:
    with pytest.raises(SpoolError, match="another job of the queue trains this run"):
        spool.add([submission(), submission(name="x"), submission(name="x")], Path("/runs"), 0)
    assert spool.jobs() == []


def test_a_job_begins_once_and_has_its_workers_until_it_ends(spool: Spool) -> None:
    first, second = add(spool), add(spool)
    assert begin(spool, first, "desk-1", "desk-2")
    assert not begin(spool, first, "desk-3")
    assert spool.job(first).has == ("desk-1", "desk-2")
    assert not begin(spool, second, "desk-2")
    assert spool.job(second).state == "queued"
    ended = spool.end(first, Attempt(0), 5.0, reached=(2.0, 0.5))
    assert (ended.state, ended.has, ended.epoch, ended.accuracy) == ("done", (), 2.0, 0.5)
    assert begin(spool, second, "desk-2", now=6.0)
    assert spool.grants(4.0) == [
        Grant(first, "ann", "desk-1", 1.0, 5.0), Grant(first, "ann", "desk-2", 1.0, 5.0),
        Grant(second, "ann", "desk-2", 6.0),
    ]  # fmt: skip
    assert spool.grants(5.0) == [Grant(second, "ann", "desk-2", 6.0)]


def test_two_services_that_see_one_end_count_it_once(spool: Spool) -> None:
    number = add(spool)
    begin(spool, number)
    with Spool(spool.folder) as other:
        assert other.end(number, Attempt(137), 2.0).state == "waiting"
        assert spool.end(number, Attempt(137), 2.0).state == "waiting"
    assert len(spool.attempts(number)) == 1


def test_a_job_that_failed_is_tried_again_with_the_last_words_of_its_driver(spool: Spool) -> None:
    number = add(spool)
    begin(spool, number)
    job = spool.end(number, Attempt(3), 2.0, said="scheduler tcp://x:1: cannot be reached")
    assert (job.state, job.again_at, job.exit_code) == ("waiting", 12.0, 3)
    assert (
        job.why == "exit 3: the cluster was not usable; tried again after 10 s: scheduler tcp://x:1: cannot be reached"
    )
    assert begin(spool, number)
    assert spool.job(number).attempts == 2


def test_cancel_ends_a_job_that_waits_and_asks_one_that_runs(spool: Spool) -> None:
    waits, runs = add(spool), add(spool)
    assert spool.cancel(waits, 1.0).state == "cancelled"
    with pytest.raises(SpoolError, match="it has ended: cancelled"):
        spool.cancel(waits, 1.0)
    begin(spool, runs)
    assert (spool.cancel(runs, 2.0).state, spool.job(runs).cancelling) == ("running", 1)
    spool.signalled(runs, 1)
    assert spool.end(runs, Attempt(143), 3.0).state == "cancelled"


def test_a_job_that_was_done_before_it_could_be_cancelled_is_done(spool: Spool) -> None:
    number = add(spool)
    begin(spool, number)
    spool.cancel(number, 2.0)
    assert spool.end(number, Attempt(0), 3.0).state == "done"


def test_hold_and_release(spool: Spool) -> None:
    number = add(spool)
    assert spool.hold(number, 1.0).why == "held by hand"
    assert not begin(spool, number)
    with pytest.raises(SpoolError, match="it is held"):
        spool.hold(number, 1.0)
    assert spool.release(number, 2.0).state == "queued"
    with pytest.raises(SpoolError, match="it is queued"):
        spool.release(number, 2.0)


def test_a_job_that_failed_is_released_for_another_attempt(spool: Spool) -> None:
    number = add(spool, name="first")
    begin(spool, number)
    assert spool.end(number, Attempt(4), 2.0).state == "failed"
    again = add(spool, name="first")
    with pytest.raises(SpoolError, match="another job of the queue trains this run"):
        spool.release(number, 3.0)
    spool.cancel(again, 3.0)
    assert spool.release(number, 3.0).state == "queued"


def test_a_job_that_is_released_after_failures_is_tried_more_than_once(spool: Spool) -> None:
    number = add(spool)
    for ended in ("waiting", "waiting", "failed", "waiting", "failed"):
        begin(spool, number)
        assert spool.end(number, Attempt(1), 2.0).state == ended
        if ended == "failed":
            spool.release(number, 3.0)


def test_a_run_that_is_there_already_is_no_new_job_s(spool: Spool, tmp_path: Path) -> None:
    """Its driver would find it done, or go on with another job's keys."""
    (early,) = spool.add([submission(name="wide")], tmp_path, 0.0)
    spool.cancel(early.id, 1.0)
    for name in ("wide", "job-2", "job-2-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").touch()
    with pytest.raises(SpoolError, match=r"wide: there is a run of that name already; choose another --name"):
        spool.add([submission(name="wide")], tmp_path, 2.0)
    with pytest.raises(SpoolError, match="there is a run of that name already"):
        spool.release(early.id, 2.0)
    (unnamed,) = spool.add([submission()], tmp_path, 2.0)  # of a queue that has begun anew beside its runs
    assert (unnamed.id, unnamed.name, unnamed.run) == (2, "job-2-3", str(tmp_path / "job-2-3"))
    begin(spool, unnamed.id)
    (tmp_path / "job-2-3").mkdir()
    (tmp_path / "job-2-3" / "job.json").touch()
    spool.end(unnamed.id, Attempt(4), 3.0)
    assert spool.release(unnamed.id, 4.0).state == "queued"  # it is its own


def test_a_job_that_failed_before_its_run_began_does_not_take_up_another_job_s(spool: Spool, tmp_path: Path) -> None:
    first, second = (spool.add([submission(name="wide")], tmp_path, float(i))[0].id for i in fails(spool))
    with pytest.raises(SpoolError, match="there is a run of that name already"):
        spool.release(first, 9.0)
    assert spool.release(second, 9.0).state == "queued"  # it is its own


def fails(spool: Spool) -> Iterator[int]:
    """Let the job that was added last fail; the second one has made its run."""
    for number in (1, 2):
        yield number
        begin(spool, number)
        if number == 2:
            Path(spool.job(number).run).mkdir()
            (Path(spool.job(number).run) / "job.json").touch()
        spool.end(number, Attempt(2), 3.0)


def test_a_job_without_a_name_leaves_that_of_another_job(spool: Spool) -> None:
    assert spool.job(add(spool, name="job-2")).name == "job-2"
    assert spool.job(add(spool)).name == "job-2-2"


def test_jobs_after_one_that_is_not_done_are_held_until_they_are_released(spool: Spool) -> None:
    first = add(spool)
    second = add(spool, after=(first,))
    begin(spool, first)
    spool.end(first, Attempt(2), 2.0)
    held = spool.job(second)
    assert (held.state, held.why) == ("held", f"job {first}, which it comes after, has failed")
    assert spool.release(second, 3.0).after == ()
    with pytest.raises(SpoolError, match="has not been done"):
        add(spool, after=(first,))
    with pytest.raises(SpoolError, match="job 99: there is none"):
        add(spool, after=(99,))


def test_the_newest_of_many_jobs_come_in_order(spool: Spool) -> None:
    numbers = [add(spool) for _ in range(5)]
    for number in numbers[:4]:
        spool.cancel(number, 1.0)
    assert [job.id for job in spool.jobs(ENDED, last=2)] == numbers[2:4]
    assert spool.counts() == {"cancelled": 4, "queued": 1}


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as made:
        assert made.folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SpoolError, match="others may look into it; chmod 700"):
        Spool(tmp_path / "open")
    with pytest.raises(SpoolError, match="no spool of `daskcnn serve` is there"):
        Spool(tmp_path / "none", must_exist=True)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p", "beegfs"])
def test_a_spool_on_a_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(spool_folder, "file_system", lambda folder: kind)
    with pytest.raises(SpoolError, match=rf"on a network \({kind}\), whose locks do not hold"):
        Spool(tmp_path / "spool")


def test_the_kind_of_a_file_system_is_the_systems(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    own = f"30 1 {os.major(device)}:{os.minor(device)} / /x rw - nfs4 host:/x rw\n"
    table.write_text("29 1 254:999 / /y rw shared:1 - ext4 /dev/vda rw\n" + own)
    assert file_system(tmp_path, str(table)) == "nfs4"
    assert file_system(tmp_path, str(tmp_path / "none")) == ""


def test_a_file_that_is_no_spool_or_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    Spool(folder).close()
    with sqlite3.connect(folder / "jobs.sqlite") as tables:
        tables.execute("PRAGMA user_version = 99")
    tables.close()
    with pytest.raises(SpoolError, match=r"another version of daskcnn \(tables 99, here 1\)"):
        Spool(folder)
    (folder / "jobs.sqlite").write_bytes(b"not a table" * 1000)
    with pytest.raises(SpoolError, match="not a database"):
        Spool(folder)


def test_a_full_disk_changes_nothing(spool: Spool) -> None:
    number = add(spool)
    pages = spool._db.execute("PRAGMA page_count").fetchone()[0]
    spool._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        add(spool, content={"model": {"layers": "x" * 100_000}})
    spool._db.execute("PRAGMA max_page_count = 1000000")
    assert [job.id for job in spool.jobs()] == [number]
    assert add(spool) == number + 1


class Queue(RuleBasedStateMachine):
    """Anything that people and the service may do, in any order."""

    jobs = Bundle[int]("jobs")
    running = Bundle[tuple[int, str]]("running")

    @initialize()
    def made(self) -> None:
        self.clock, self.free = 0.0, {"a", "b"}
        self.spool = Spool.__new__(Spool)
        self.spool._db = sqlite3.connect(":memory:", isolation_level=None)
        self.spool._db.row_factory = sqlite3.Row
        self.spool._db.executescript(SCHEMA)

    def teardown(self) -> None:
        self.spool.close()

    @rule(target=jobs, held=st.booleans())
    def submit(self, held: bool) -> int:
        self.clock += 1
        return add(self.spool, self.clock, held=held)

    @rule(number=jobs, what=st.sampled_from(["cancel", "hold", "release"]))
    def ask(self, number: int, what: str) -> None:
        before = self.spool.job(number)
        try:
            getattr(self.spool, what)(number, self.clock)
        except SpoolError:
            assert self.spool.job(number) == before

    @rule(target=running, number=jobs, worker=st.sampled_from(["a", "b"]))
    def start(self, number: int, worker: str) -> tuple[int, str]:
        begins = self.spool.job(number).state in ("queued", "waiting") and worker in self.free
        assert begin(self.spool, number, worker, now=self.clock) == begins
        self.free -= {worker} if begins else set()
        return number, worker

    @rule(which=consumes(running), code=st.sampled_from([None, 0, 1, 3, 4, 143]))
    def end(self, which: tuple[int, str], code: int | None) -> None:
        self.free |= {*self.spool.job(which[0]).has}
        self.spool.end(which[0], Attempt(code), self.clock)

    @invariant()
    def workers_belong_to_jobs_that_run(self) -> None:
        jobs = self.spool.jobs((*ACTIVE, *ENDED))
        has = [worker for job in jobs for worker in job.has]
        assert len(has) == len({*has})
        assert {*has} == {"a", "b"} - self.free
        for job in jobs:
            assert bool(job.has) == (job.state == "running")
            assert len(self.spool.attempts(job.id)) == job.attempts - (job.state == "running")
            assert job.signalled <= job.cancelling


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
